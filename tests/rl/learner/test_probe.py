"""The probe finds what is wrong between generator and trainer, and is not taken in by age."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from weight_arrays import arrays, stream

from scalerl.rl.algo.schedule import OffPolicy, PipelineRL
from scalerl.rl.config.health import Health
from scalerl.rl.config.optimiser import AdamW
from scalerl.rl.config.settings import BatchSize
from scalerl.rl.engine.build import load_generator
from scalerl.rl.health.figures import FIGURES
from scalerl.rl.learner.load import load_learner
from scalerl.rl.learner.probe import Probe
from scalerl.rl.learner.score import ranks_of
from scalerl.rl.loop.pipeline import Pipeline
from scalerl.rl.loop.prompt_pool import PromptPool
from scalerl.rl.model.causal_lm import load_model, load_tokenizer
from scalerl.rl.types import Done, Reward


@pytest.fixture(scope="module")
def recipe(tiny_recipe):
    """A learning rate that moves a log-probability by a tenth of a nat within the age that is allowed."""
    return replace(
        tiny_recipe,
        schedule=PipelineRL(k=4),
        batch=BatchSize(prompts=4, samples=8, micro=32),
        optimiser=AdamW(lr=3e-3, warmup_steps=0),
        health=Health(probe=8),
    )


def judge(groups):
    def by_parity(rollout):
        right = bool(rollout.token_T[rollout.sampled_T].sum() % 2)
        return Reward(1.0 if right else -1.0, right)

    return Done([[by_parity(rollout) for rollout in group] for group in groups])


def run(recipe, generator=None, n_steps=16, change=lambda rollout, learner: rollout):
    """The probe's rows, the steps, and the learner; `change` tampers with what was sampled."""
    learner = load_learner(recipe, recipe.model)
    generator = generator or load_generator(recipe, recipe.model, 0, recipe.decode_slots)
    pool = PromptPool(recipe.task.prompts("train"), recipe.curriculum, 0)
    probe, rows, steps = Probe(learner, recipe), [], []
    for step in islice(Pipeline(recipe, pool, generator, learner, judge).steps(), n_steps):
        rows.append(probe([change(r, learner) for group in step.groups for r in group.rollouts]))
        steps.append(step)
    return rows, steps, learner


class Tampered:
    """A generator whose weights are changed on their way: `change` gets them and their version."""

    def __init__(self, recipe, change):
        self._generator, self._change = load_generator(recipe, recipe.model, 0, recipe.decode_slots), change

    def __getattr__(self, name):
        return getattr(self._generator, name)

    def update(self, weights, version):
        self._generator.update(stream(self._change(arrays(weights), version)), version)


@pytest.mark.parametrize("schedule", [PipelineRL(k=4), PipelineRL(k=0), OffPolicy(k=3)])
def test_age_does_not_show_where_all_is_well(recipe, schedule):
    rows, steps, _ = run(replace(recipe, schedule=schedule))
    probes = [row for row in rows if row]
    assert len(probes) >= 4
    assert max(row["logp_gap_max"] for row in probes) < 2e-5
    assert FIGURES["sampling"].level(FIGURES["sampling"](probes)) is None
    shift = max(step.stats.logp_shift for step in steps if len(step.batch))
    if schedule.max_staleness:
        assert shift > 0.05  # what the trained tokens themselves would have shown
    else:
        assert shift < 1e-5


def test_probing_changes_nothing_of_the_training(recipe):
    _, _, probed = run(recipe, n_steps=8)
    _, _, alone = run(replace(recipe, health=Health(probe=0)), n_steps=8)
    for name, weight in probed.weights():
        np.testing.assert_array_equal(weight, arrays(alone.weights())[name])


def test_nothing_is_probed_where_it_is_off(recipe):
    rows, _, _ = run(replace(recipe, health=Health(probe=0)), n_steps=4)
    assert rows == [{}] * 4


def test_what_is_scored_and_against_what(recipe, make_rollout):
    """Against the model's own forward pass: the tokens of the version held, the inserted one apart."""
    learner, tokens = load_learner(recipe, recipe.model), [9, 10, 11, 12, 13, 14]
    model = load_model(recipe.model)
    prompt_T = np.array([9, 6, 10, 5])
    logits_TV = model(input_ids=torch.tensor([[*prompt_T, *tokens]])).logits[0].detach()
    logp_T = torch.log_softmax(logits_TV[3:-1], -1)[range(6), tokens].numpy()
    offset_T = np.array([0.1, -0.3, 9.0, 0.5, 9.0, 9.0])  # 9: of no account
    rollout = make_rollout(6, inserted=(2,), token_T=tuple(tokens), logp_T=logp_T + offset_T)
    rollout = replace(rollout, version_T=np.array([0, 0, 0, 0, 1, 2]))
    other = make_rollout(3, version=1)  # begun by another version
    found = Probe(learner, recipe)([other, rollout])
    assert found["probe_tokens"] == 3
    assert found["logp_gap"] == pytest.approx(0.3, abs=1e-5)  # (.1 + .3 + .5) / 3
    assert found["logp_gap_max"] == pytest.approx(0.5, abs=1e-5)
    p_TV = torch.softmax(logits_TV[[3, 4, 6]], -1).numpy()
    ranks = [p[p > p[t]].sum() + p[t] / 2 for p, t in zip(p_TV, [9, 10, 12], strict=True)]
    assert found["rank"] == pytest.approx(np.mean(ranks), abs=1e-6)


def test_the_rank_of_a_sample_has_mean_one_half_and_the_variance_that_is_stated():
    # Ranks .25, .65, .9 with probability .5, .3, .2: mean .125 + .195 + .18, variance .32 - .25.
    logp_WV = torch.tensor([[0.3, 0.5, 0.2]]).log().repeat(3, 1)
    each = [float(ranks_of(logp_WV[:1], torch.tensor([[token]]))[0]) for token in (1, 0, 2)]
    assert each == pytest.approx([0.25, 0.65, 0.9])
    assert ranks_of(logp_WV, torch.tensor([[0], [1], [2]]))[1].tolist() == pytest.approx([0.07] * 3)
    tied, _ = ranks_of(torch.tensor([[0.25, 0.25, 0.5]]).log(), torch.tensor([[1]]))
    assert float(tied) == pytest.approx(0.75)  # of two that are alike neither comes first


@pytest.mark.parametrize("temperature", [0.9, 0.98, 1.02])
def test_another_temperature_of_the_generator_is_an_alarm(recipe, temperature):
    wrong = load_generator(replace(recipe, temperature=temperature), recipe.model, 0, recipe.decode_slots)
    rows, _, _ = run(recipe, wrong, n_steps=8)
    figure = FIGURES["logp_gap"].of("float32")
    assert figure.level(figure(rows)) == "alarm"


def test_what_the_recipe_cuts_off_is_no_alarm_and_what_it_does_not_is(recipe):
    cut = replace(recipe, top_p=0.8, top_k=12)
    rows, _, _ = run(cut, n_steps=8)
    probes = [row for row in rows if row]
    assert max(row["logp_gap_max"] for row in probes) < 2e-5
    assert FIGURES["sampling"].level(FIGURES["sampling"](probes)) is None
    for engine, trainer in ((cut, recipe), (recipe, cut)):
        wrong = load_generator(engine, recipe.model, 0, recipe.decode_slots)
        rows, _, _ = run(trainer, wrong, n_steps=8)
        figure = FIGURES["logp_gap"].of("float32")
        assert figure.level(figure(rows)) == "alarm"


def one_behind():
    """Every version arrives one too late."""
    late = []

    def change(weights, version):
        late.append(weights)
        return late[-2] if len(late) > 1 else weights

    return change


def corrupted(weights, version):
    """A bit of one number is lost from version 3 on."""
    name = "model.layers.0.mlp.down_proj.weight"
    if version >= 3:
        weights[name] = weights[name].copy()
        weights[name][5, 7] += 0.25
    return weights


def never_again(recipe):
    first = {n: p.detach().numpy().copy() for n, p in load_model(recipe.model).named_parameters()}
    return lambda weights, version: first


@pytest.mark.parametrize("fault", ["one behind", "corrupted", "never again"])
def test_weights_that_did_not_arrive_are_an_alarm(recipe, fault):
    change = {"one behind": one_behind(), "corrupted": corrupted, "never again": never_again(recipe)}[fault]
    rows, _, _ = run(recipe, Tampered(recipe, change))
    figure = FIGURES["logp_gap"].of("float32")
    assert figure.level(figure([row for row in rows if row][:1])) is None  # version 0 was right
    assert figure.level(figure(rows)) == "alarm"


@pytest.mark.parametrize("trainer", ["both", "neither"])
@pytest.mark.parametrize("generator", ["both", "neither"])
def test_an_lm_head_of_another_precision_is_an_alarm(recipe, trained_folder, generator, trainer):
    recipe = replace(recipe, model=trained_folder, precision="bfloat16", health=Health(probe=32))
    of_trainer, of_generator = replace(recipe, fp32_logits=trainer), replace(recipe, fp32_logits=generator)
    made = load_generator(of_generator, recipe.model, 0, recipe.decode_slots)
    rows, _, _ = run(of_trainer, made, n_steps=16)
    expected = None if generator == trainer else "alarm"
    assert FIGURES["head"].level(FIGURES["head"](rows)) == expected
    gap = FIGURES["logp_gap"].of("bfloat16")
    assert gap.level(gap(rows)) is None  # in the noise of bfloat16 it does not show


@pytest.fixture(scope="module")
def trained_folder(recipe, tmp_path_factory):
    """A model that has learnt to repeat one token, as LM heads of use are in line with their inputs."""
    model, folder = load_model(recipe.model), str(tmp_path_factory.mktemp("trained"))
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(0)
    for _ in range(150):
        token_BT = torch.randint(3, 19, (16, 1)).repeat(1, 12)
        logits_BTV = model(input_ids=token_BT).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), token_BT[:, 1:].flatten()).backward()
        optimiser.step()
        optimiser.zero_grad()
    model.save_pretrained(folder)  # pyright: ignore[reportCallIssue]
    load_tokenizer(recipe.model).save_pretrained(folder)
    return folder


def test_heads_that_differ_by_the_recipe_are_not_looked_at(recipe):
    one_sided = replace(recipe, precision="bfloat16", fp32_logits="trainer")
    rows, _, _ = run(one_sided, n_steps=4)
    assert any(rows)
    assert not any("head_gap" in row for row in rows)


def test_tokens_that_are_no_sample_of_what_was_recorded_are_an_alarm(recipe):
    """An engine that samples at .6 and returns the log-probabilities at 1, which are those of the trainer."""
    sharper = load_generator(replace(recipe, temperature=0.6), recipe.model, 0, recipe.decode_slots)
    on_policy = replace(recipe, schedule=PipelineRL(k=0), optimiser=AdamW(lr=1e-9))

    def as_recorded_at_1(rollout, learner):
        token_1T = torch.from_numpy(np.concatenate([rollout.prompt_T, rollout.token_T]))[None]
        wanted_1T = torch.ones(token_1T.shape, dtype=torch.bool)[:, 1:]
        wanted_1T[:, : len(rollout.prompt_T) - 1] = False
        with torch.no_grad():
            logp_1T, _ = learner.score(token_1T.numpy(), wanted_1T.numpy())
        return replace(rollout, logp_T=logp_1T[wanted_1T].numpy())

    rows, _, _ = run(on_policy, sharper, n_steps=12, change=as_recorded_at_1)
    figure = FIGURES["logp_gap"].of("float32")
    assert figure.level(figure(rows)) is None  # they agree to the last digit
    assert FIGURES["sampling"].level(FIGURES["sampling"](rows)) == "alarm"
    assert np.mean([row["rank"] for row in rows if row]) < 0.47


def test_the_state_of_a_probe_can_be_put_back(recipe, make_rollout):
    learner = load_learner(recipe, recipe.model)
    probe = Probe(learner, recipe)
    state, rollout = probe.state(), make_rollout(5)
    expected = probe([rollout])
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.mul_(1.1)
    another = Probe(learner, recipe)
    assert another([rollout]) != expected
    another.restore(state)
    assert another([rollout]) == expected


def test_ranks_that_hold_the_weights_themselves_hold_those_of_the_resume(recipe, monkeypatch):
    learner = load_learner(recipe, recipe.model)
    state = Probe(learner, recipe).state()
    monkeypatch.setattr(learner, "hold", list)  # as `LearnerGroup.hold`
    learner.version = 2
    probe = Probe(learner, recipe)
    probe.restore(state)  # of one process
    assert probe.version == 2
