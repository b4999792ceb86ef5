"""Every choice of a recipe at work: runs in which it changes what it is said to change."""

from dataclasses import replace
from itertools import combinations, islice

import numpy as np
import pytest
from weight_arrays import arrays

from scalerl.rl.algo.averaging import ConstantAverage, PromptAverage, SampleAverage, TokenAverage
from scalerl.rl.algo.curriculum import NoPositiveResampling, Uniform
from scalerl.rl.algo.length import LengthPenalty, NoLengthControl
from scalerl.rl.algo.loss import Cispo, Dapo, Decoupled, Grpo, Gspo, Reinforce
from scalerl.rl.algo.schedule import OffPolicy, PipelineRL
from scalerl.rl.config.optimiser import AdamW
from scalerl.rl.config.settings import BatchSize, Context
from scalerl.rl.learner.load import load_learner
from scalerl.rl.tasks.chain import Chain
from scalerl.rl.types import Reward

RIGHT, WRONG = Reward(1.0, True), Reward(-1.0, False)


@pytest.fixture
def recipe(tiny_recipe):
    """Steps so large that the policy leaves the one that sampled."""
    return replace(
        tiny_recipe,
        optimiser=AdamW(lr=1e-2, warmup_steps=0),
        batch=BatchSize(prompts=2, samples=8, micro=16),
        schedule=PipelineRL(k=2),
    )


def weights_after(loop_and_parts, n_steps):
    """The steps of a run, and all of its weights in one row."""
    loop, _, learner = loop_and_parts
    steps = list(islice(loop, n_steps))
    return steps, np.concatenate([w.ravel() for _, w in sorted(arrays(learner.weights()).items())])


def test_no_loss_is_another_once_the_policy_has_moved_and_all_bounds_act(recipe, start_run):
    decoupled = [Decoupled(max_weight=1.5, updates=n) for n in (1, 2)]
    losses = [Cispo(1.5), Dapo(), Grpo(), Gspo(), Gspo(length_normalised=False), Reinforce(1.5), *decoupled]
    after = []
    for loss in losses:
        steps, weights = weights_after(start_run(replace(recipe, loss=loss)), 6)
        assert steps[0].stats.ratio_mean == pytest.approx(1, abs=1e-4)  # version 0 sampled the first batch
        assert steps[0].stats.ratio_clipped == 0
        assert max(step.stats.ratio_max for step in steps[1:]) > 1.5
        assert max(step.stats.ratio_clipped for step in steps[1:]) > 0.01
        after.append(weights)
    for (a, one), (b, other) in combinations(zip(losses, after, strict=True), 2):
        assert np.abs(one - other).max() > 1e-3, (a, b)


@pytest.mark.parametrize("loss", [Cispo, Reinforce])
def test_a_cap_that_nothing_reaches_changes_nothing(recipe, start_run, loss):
    far, farther = (weights_after(start_run(replace(recipe, loss=loss(cap))), 4)[1] for cap in (1e6, 1e9))
    near = weights_after(start_run(replace(recipe, loss=loss(1.1))), 4)[1]
    np.testing.assert_array_equal(far, farther)
    assert np.abs(near - far).max() > 1e-3


def test_a_small_pool_comes_again_and_what_is_learnt_retires_by_its_history(recipe, start_run):
    """Of four prompts one is right always, one from its second draw on, and two never."""
    recipe = replace(recipe, task=Chain(k_max=1, heldout_per_length=4, train_per_length=4))
    always, later, *never = (prompt.id for prompt in recipe.task.prompts("train"))

    def verify(rollout):
        learnt = rollout.prompt.id == always or (rollout.prompt.id == later and rollout.epoch >= 1)
        return RIGHT if learnt else WRONG

    def drawn(curriculum):
        loop, _, _ = start_run(replace(recipe, curriculum=curriculum), verify)
        return [group.prompt.id for step in islice(loop, 30) for group in step.groups]

    everything, latest = drawn(NoPositiveResampling(history="all")), drawn(NoPositiveResampling())
    uniform = drawn(Uniform())
    assert len(everything) == len(latest) == len(uniform) == 60
    # Six groups are in flight at k = 2, so that a prompt may come a few times more before it retires.
    assert always in everything[:6]
    assert not {always} & set(everything[20:])
    assert not {always, later} & set(latest[20:])
    # Once wrong of so many draws is still below nine in ten after some ten draws: then it retires, too.
    assert 9 <= everything.count(later) <= 16
    assert everything.count(always) <= 4
    assert latest.count(later) <= 6
    assert set(latest[20:]) == set(never)
    assert min(uniform.count(name) for name in (always, later, *never)) == 15


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_the_temperature_is_that_of_the_generator_and_of_the_trainer(recipe, start_run, temperature):
    recipe = replace(recipe, temperature=temperature, schedule=PipelineRL(k=0))
    steps, _ = weights_after(start_run(recipe), 3)
    assert [step.stats.ratio_max for step in steps] == [pytest.approx(1, abs=1e-4)] * 3
    cold = load_learner(replace(recipe, temperature=1.0), recipe.model)
    assert cold.step(steps[0].batch).ratio_max > 1.5


def test_a_length_penalty_shortens_what_is_right(recipe, start_run):
    recipe = replace(
        recipe,
        length=LengthPenalty(max_length=16, cache=12),
        curriculum=Uniform(),
        truncated="keep",
        optimiser=AdamW(lr=2e-3, warmup_steps=0),
        batch=BatchSize(prompts=2, samples=16, micro=32),
    )
    loop, _, _ = start_run(recipe, lambda rollout: RIGHT)
    steps = list(islice(loop, 25))
    for group in steps[0].groups:
        by_hand = [1 + min(max((16 - r.length) / 12 - 1, -1), 0) for r in group.rollouts]
        np.testing.assert_allclose(group.reward_G, by_hand)
        assert group.correct_G.all()
    mean = [np.mean([r.length for group in step.groups for r in group.rollouts]) for step in steps]
    assert np.mean(mean[-5:]) < 0.7 * np.mean(mean[:5])
    # Without the penalty what is always right is no signal, and nothing is trained.
    plain, _, learner = start_run(replace(recipe, length=NoLengthControl()), lambda rollout: RIGHT)
    assert not any(len(step.batch) for step in islice(plain, 3))
    assert learner.version == 3


def test_truncated_completions_are_trained_on_as_failures_or_left_out(recipe, start_run):
    recipe = replace(recipe, length=NoLengthControl(), context=Context(prompt=8, thinking=8, answer=4))
    kept, kept_weights = weights_after(start_run(replace(recipe, truncated="keep")), 2)
    dropped, dropped_weights = weights_after(start_run(replace(recipe, truncated="drop")), 2)
    rollouts = [r for group in kept[0].groups for r in group.rollouts]
    cut = np.array([r.truncated for r in rollouts])
    assert 2 <= cut.sum() <= len(rollouts) - 2
    assert [r.token_T.tolist() for group in dropped[0].groups for r in group.rollouts] == [
        r.token_T.tolist() for r in rollouts
    ]
    assert len(kept[0].batch) == len(rollouts)
    assert len(dropped[0].batch) == len(rollouts) - cut.sum()
    assert kept[0].batch.advantage_N[cut].max() < 0
    assert np.abs(kept_weights - dropped_weights).max() > 1e-3


def test_the_four_averages_weigh_completions_of_mixed_lengths_differently(recipe, start_run):
    ways = {"prompt": PromptAverage(), "sample": SampleAverage(), "token": TokenAverage()}
    ways["constant"] = ConstantAverage()
    runs = {name: weights_after(start_run(replace(recipe, averaging=way)), 5) for name, way in ways.items()}
    first = {name: steps[0].batch for name, (steps, _) in runs.items()}
    lengths = first["token"].sampled_NT.sum(1)
    assert lengths.max() > 3 * lengths.min()
    of_completion = {name: batch.weight_NT.sum(1) for name, batch in first.items()}  # (N,)
    np.testing.assert_allclose(of_completion["sample"], 1 / len(lengths))
    np.testing.assert_allclose(of_completion["token"], lengths / lengths.sum())
    np.testing.assert_allclose(of_completion["constant"], lengths / (len(lengths) * recipe.context.sampled))
    for group in np.split(np.arange(len(lengths)), [len(lengths) // 2]):
        if first["prompt"].groups_used == 2 and len(lengths) == 16:  # nothing was left out
            assert of_completion["prompt"][group].sum() == pytest.approx(0.5)
    for one, other in combinations(ways, 2):
        assert np.abs(of_completion[one] - of_completion[other]).max() > 1e-3
        assert np.abs(runs[one][1] - runs[other][1]).max() > 1e-3, (one, other)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_the_ages_of_off_policy_k_are_exactly_0_to_k_minus_1(recipe, start_run, k):
    steps, _ = weights_after(start_run(replace(recipe, schedule=OffPolicy(k=k))), 2 * k)
    staleness = [set((s.index - 1 - s.batch.version_NT)[s.batch.sampled_NT].tolist()) for s in steps]
    assert staleness == [{n % k} for n in range(2 * k)]
    ratios = [step.stats.ratio_max for step in steps]
    for n, ratio in enumerate(ratios):
        assert (ratio < 1.001) == (n % k == 0)  # only what the weights of the day have sampled has ratio 1
