"""What the generator records at sampling is what the trainer computes for the same weights."""

import numpy as np
import pytest
import torch
from small_runs import learner_recipe

from scalerl.rl.learner.learner import Learner
from scalerl.rl.model.causal_lm import load_model


def trainer_logp(folder, rollouts, temperature, fp32_logits=True):
    """The trainer's log-probability of every sampled token, completion after completion."""
    where = "both" if fp32_logits else "neither"
    learner = Learner(load_model(folder), learner_recipe(temperature=temperature, fp32_logits=where))
    found = []
    for r in rollouts:
        token_1T = torch.from_numpy(np.concatenate([r.prompt_T, r.token_T]))[None]
        wanted_1T = torch.from_numpy(np.concatenate([np.zeros(len(r.prompt_T), bool), r.sampled_T]))[None, 1:]
        logp_1T, _ = learner.log_probs(token_1T, wanted_1T)
        found.append(logp_1T[wanted_1T].detach().numpy())
    return np.concatenate(found)


def recorded_logp(rollouts):
    return np.concatenate([r.logp_T[r.sampled_T] for r in rollouts])


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
