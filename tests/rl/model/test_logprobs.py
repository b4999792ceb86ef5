"""What the generator records at sampling is what the trainer computes for the same weights."""

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from small_runs import learner_recipe

from scalerl.rl.engine.build import load_generator
from scalerl.rl.learner.group import LearnerGroup
from scalerl.rl.learner.learner import Learner
from scalerl.rl.learner.load import load_learner
from scalerl.rl.model.causal_lm import head_of, hidden_states, load_model, log_probs_TV
from scalerl.rl.model.weights import WeightStream


def trainer_logp(folder, rollouts, temperature, fp32_logits=True):
    """The trainer's log-probability of every sampled token, completion after completion."""
    where = "both" if fp32_logits else "neither"
    learner = Learner(load_model(folder), learner_recipe(temperature=temperature, fp32_logits=where))
    found = []
    for r in rollouts:
        token_1T = torch.from_numpy(np.concatenate([r.prompt_T, r.token_T]))[None]
        wanted_1T = torch.from_numpy(np.concatenate([np.zeros(len(r.prompt_T), bool), r.sampled_T]))[None, 1:]
        logp_1T, _ = learner.score(token_1T.numpy(), wanted_1T.numpy())
        found.append(logp_1T[wanted_1T].detach().numpy())
    return np.concatenate(found)


def recorded_logp(rollouts):
    return np.concatenate([r.logp_T[r.sampled_T] for r in rollouts])


class NoRanks:
    size = 1

    def all(self, name, *args):
        return "cpu"  # the device that they load the model on


def sample(generator, prompts, n_samples):
    for prompt in prompts:
        generator.submit(prompt, 0, n_samples)
    return [rollout for group in generator.collect(len(prompts)) for rollout in group]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    "architecture", ["llama", "qwen3", "qwen3_moe", "mixtral", "gemma", "gpt2", "gpt_neox", "opt"]
)
def test_recorded_log_probabilities_are_the_trainers(
    save_model, make_generator, uneven_prompts, architecture, temperature
):
    folder = save_model(architecture, seed=3)
    generator = make_generator(folder, rows=5, temperature=temperature)
    rollouts = sample(generator, uneven_prompts, 5)
    # Thirty completions through five rows: rows were refilled, at uneven times, next to others in flight.
    lengths = [len(r.token_T) for r in rollouts]
    assert max(lengths) > 2 * min(lengths)
    assert generator.counters.ticks < sum(lengths) / 3
    recorded = recorded_logp(rollouts)
    assert recorded.std() > 0.5  # far from uniform
    np.testing.assert_allclose(recorded, trainer_logp(folder, rollouts, temperature), atol=1e-5, rtol=1e-5)


def test_an_fp32_head_on_both_sides_brings_generator_and_trainer_together(
    save_model, make_generator, uneven_prompts
):
    folder = save_model("llama", dtype=torch.bfloat16)
    assert next(load_model(folder).parameters()).dtype == torch.bfloat16
    gap = {}
    for at_sampling in (True, False):
        rollouts = sample(make_generator(folder, rows=5, fp32_logits=at_sampling), uneven_prompts, 10)
        for in_training in (True, False):
            difference = recorded_logp(rollouts) - trainer_logp(folder, rollouts, 1.0, in_training)
            gap[at_sampling, in_training] = float(np.abs(difference).mean())
    # How much of the gap is the head's depends on the processor: the rest of the model rounds, too.
    assert gap[True, True] < 0.85 * min(gap[True, False], gap[False, True])


def test_the_fp32_head_is_on_the_side_that_the_recipe_names(save_model, tiny_recipe, uneven_prompts):
    """In bf16, where the precision of the head shows in every log-probability."""
    folder = save_model("llama", dtype=torch.bfloat16)
    sampled, scored = {}, {}
    token_1T = torch.arange(12)[None] + 3
    for where in ("both", "generator", "trainer", "neither"):
        recipe = replace(tiny_recipe, model=folder, precision="bfloat16", fp32_logits=where)
        generator = load_generator(recipe, folder, 0, 6)
        sampled[where] = recorded_logp(sample(generator, uneven_prompts[:2], 3)).tolist()
        logp_1T, _ = load_learner(recipe, folder).score(token_1T.numpy(), np.ones((1, 11), dtype=bool))
        scored[where] = logp_1T.detach().float().numpy().tolist()
        # The driver of several ranks computes nothing, but has the probe look at the trainers' head.
        group = LearnerGroup(cast(Any, NoRanks()), recipe, folder)
        assert group.fp32_logits == (where in ("both", "trainer"))
    assert sampled["both"] == sampled["generator"] != sampled["neither"] == sampled["trainer"]
    assert scored["both"] == scored["trainer"] != scored["neither"] == scored["generator"]
    # And which of the two is which: only FP32 has logits between two neighbours in bf16.
    model = load_model(folder)
    hidden_TD = hidden_states(model, input_ids=token_1T[:, :-1], use_cache=False)[0]
    exact_T = log_probs_TV(model, hidden_TD, 1.0, True).gather(-1, token_1T[0, 1:, None])[:, 0]
    assert scored["both"][0] == exact_T.tolist()


def test_the_head_in_float32_is_made_once_for_each_version(tiny_recipe, uneven_prompts, monkeypatch):
    """And it is that of the weights that sample: log-probabilities are those of the model's own pass."""
    from scalerl.rl.engine import generator as module

    generator = load_generator(replace(tiny_recipe, precision="bfloat16"), tiny_recipe.model, 0, 4)
    model, made = generator.model, []
    monkeypatch.setattr(module, "head_of", lambda *args: made.append(head_of(*args)) or made[-1])
    for version in (1, 2):
        weights = {name: p.detach() * (1 + 0.3 * version) for name, p in model.named_parameters()}
        generator.update(WeightStream.of(weights), version)
        generator.submit(uneven_prompts[0], 0, 2)
        ((rollout, _),) = generator.collect(1)
        assert len(made) == version
        assert made[-1][0].dtype == torch.float32
        token_T = torch.from_numpy(np.concatenate([rollout.prompt_T, rollout.token_T]))
        hidden_TD = hidden_states(model, input_ids=token_T[None], use_cache=False)[0]
        exact_TV = log_probs_TV(model, hidden_TD[len(rollout.prompt_T) - 1 : -1], 1.0, True)
        found_T = exact_TV.gather(-1, torch.from_numpy(rollout.token_T)[:, None])[:, 0].numpy()
        # bfloat16 in another order of operations: a head of other weights is off by more.
        assert np.abs(found_T - rollout.logp_T)[rollout.sampled_T].mean() < 0.03
    assert not torch.equal(made[0][0], made[1][0])
