"""Every choice beside every other: runs of three steps in which each pair of variants meets at least once."""

import math
from dataclasses import replace
from itertools import combinations, islice, product

import numpy as np
import pytest
from weight_arrays import arrays

from scalerl.rl.algo.advantage import BatchStd, LeaveOneOut, NoStd, PromptStd
from scalerl.rl.algo.averaging import ConstantAverage, PromptAverage, SampleAverage, TokenAverage
from scalerl.rl.algo.curriculum import NoPositiveResampling, Uniform
from scalerl.rl.algo.length import ForcedInterruption, LengthPenalty, NoLengthControl
from scalerl.rl.algo.loss import Cispo, Dapo, Decoupled, Grpo, Gspo, Kl, Reinforce
from scalerl.rl.algo.schedule import OffPolicy, PipelineRL
from scalerl.rl.config.optimiser import AdamW
from scalerl.rl.config.recipe import from_dict
from scalerl.rl.config.settings import BatchSize, Context, Lora

SWITCHES = {
    "schedule": [PipelineRL(k=2), PipelineRL(k=0), OffPolicy(k=2)],
    "loss": [
        Cispo(),
        Dapo(),
        Decoupled(updates=2),
        Grpo(),
        Gspo(),
        Gspo(length_normalised=False),
        Reinforce(),
    ],
    "averaging": [PromptAverage(), SampleAverage(), TokenAverage(), ConstantAverage()],
    "advantage": [BatchStd(), PromptStd(), NoStd(), LeaveOneOut()],
    "zero_variance": ["drop", "keep"],
    "truncated": ["drop", "keep"],
    "precision": ["float32", "bfloat16"],
    "fp32_logits": ["both", "generator", "trainer", "neither"],
    "curriculum": [NoPositiveResampling(), NoPositiveResampling(history="all"), Uniform()],
    "length": [
        ForcedInterruption(low=2, high=12, phrase="! </think>"),
        LengthPenalty(max_length=20, cache=12),
        NoLengthControl(),
    ],
    "kl": [Kl(), Kl(coefficient=0.1), Kl(coefficient=0.1, estimator="k2")],
    "lora": [Lora(), Lora(rank=2, alpha=4)],
    "temperature": [1.0, 0.7],
}


def covering_rows():
    """Rows of choices, by place in `SWITCHES`, until every pair has met: the best of some at random."""
    sizes = [len(options) for options in SWITCHES.values()]
    columns = list(combinations(range(len(sizes)), 2))
    left = {(i, j, a, b) for i, j in columns for a, b in product(range(sizes[i]), range(sizes[j]))}
    rng, rows = np.random.default_rng(0), []
    while left:
        i, j, a, b = min(left)
        trials = rng.integers(0, sizes, (200, len(sizes)))
        trials[:, i], trials[:, j] = a, b
        met = [left & {(i, j, row[i], row[j]) for i, j in columns} for row in trials.tolist()]
        best = max(range(len(met)), key=lambda n: len(met[n]))
        left -= met[best]
        rows.append(tuple(trials[best].tolist()))
    return rows


ROWS = covering_rows()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "".join(map(str, row)))
def test_every_pair_of_choices_trains(row, tiny_recipe, start_run):
    chosen = {name: options[n] for (name, options), n in zip(SWITCHES.items(), row, strict=True)}
    recipe = replace(
        tiny_recipe,
        batch=BatchSize(prompts=3, samples=4, micro=5),
        context=Context(prompt=8, thinking=12, answer=20),
        optimiser=AdamW(lr=1e-2, warmup_steps=0),
        decode_slots=40,
        **chosen,
    )
    assert from_dict(recipe.to_dict()) == recipe
    loop, generator, learner = start_run(recipe)
    before = arrays(learner.weights())
    steps = list(islice(loop, 3))
    assert [step.index for step in steps] == [1, 2, 3]
    for step in steps:
        staleness = (step.index - 1 - step.batch.version_NT)[step.batch.sampled_NT]
        assert staleness.max(initial=0) <= recipe.schedule.max_staleness
        assert math.isfinite(step.stats.loss) == bool(len(step.batch))
        assert math.isfinite(step.stats.kl) == bool(len(step.batch) and recipe.kl.coefficient)
    assert any(len(step.batch) for step in steps)
    moved = [float(np.abs(w - before[name]).max()) for name, w in arrays(learner.weights()).items()]
    assert all(map(math.isfinite, moved))
    assert max(moved) > 1e-4
    if recipe.schedule.publishes(3):  # what the generator has is what the learner has
        for name, parameter in generator.model.named_parameters():
            np.testing.assert_array_equal(parameter.detach().float().numpy(), arrays(learner.weights())[name])


def test_the_rows_hold_every_pair():
    sizes = [len(options) for options in SWITCHES.values()]
    for i, j in combinations(range(len(sizes)), 2):
        assert len({(row[i], row[j]) for row in ROWS}) == sizes[i] * sizes[j]
