"""Groups without signal are replaced by further ones: which, how many, and how old what is trained may be."""

from collections import deque
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
from cut_runs import CutError, cut_at, lines, recipe_of, record_and_weights, run
from record_checker import check

from scalerl.rl.algo.curriculum import NoPositiveResampling, Uniform
from scalerl.rl.algo.schedule import OffPolicy, PipelineRL
from scalerl.rl.config.settings import BatchSize
from scalerl.rl.learner.batch import StepStats, make_batch
from scalerl.rl.loop.pipeline import Pipeline
from scalerl.rl.loop.prompt_pool import PromptPool
from scalerl.rl.model.weights import WeightStream
from scalerl.rl.types import Counters, Done, Reward

P = 2  # groups a step of the recipe
SCHEDULES = [PipelineRL(k=0), PipelineRL(k=1), PipelineRL(k=4), OffPolicy(k=1), OffPolicy(k=3)]


@pytest.fixture(scope="module")
def recipe(tiny_recipe):
    return replace(tiny_recipe, zero_variance="resample", truncated="keep")


class Generator:
    """Completions at once, by the version that is installed: the newest one, or one that is `lag` older."""

    def __init__(self, make_rollout, lag):
        self._make, self._lag, self._groups = make_rollout, lag, deque()
        self.installed = self.newest = self.submitted = 0
        self.counters = Counters()

    def submit(self, prompt, epoch, n_samples):
        made = self._make(version=self.installed, prompt=str(self.submitted))
        self._groups.append(tuple(replace(made, sample=i, epoch=epoch) for i in range(n_samples)))
        self.submitted += 1

    @property
    def ready(self):
        return len(self._groups)

    in_flight = ready

    def take(self, n):
        return [self._groups.popleft() for _ in range(n)]

    def work(self):
        assert self.installed < self.newest, "nothing to wait for: the loop would never end"
        self.installed += 1

    def update(self, weights, version):
        self.newest = version
        self.installed = max(self.installed, version - self._lag)


class Learner:
    """Counts versions, and trains nothing."""

    def __init__(self):
        self.version = 0

    def check_life(self):
        pass

    def weights(self):
        return WeightStream.of({})

    def begin(self, batch):
        self.version += 1
        return Done(StepStats())


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_no_token_is_older_than_the_schedule_allows_and_no_batch_waits_for_ever(
    recipe, make_rollout, schedule, seed
):
    """Whatever signal groups have, at any limit, with weights that are installed late."""
    rng = np.random.default_rng(seed)
    prompts, most, with_signal = int(rng.integers(1, 5)), int(rng.integers(1, 5)), rng.random() ** 2
    batch = BatchSize(prompts=prompts, samples=2, max_gen_batches=most)
    recipe = replace(recipe, schedule=schedule, batch=batch, curriculum=Uniform())
    generator = Generator(make_rollout, lag=int(rng.integers(0, 3)))
    pool = PromptPool(recipe.task.prompts("train"), recipe.curriculum, seed)

    def verify(groups):
        return Done([[Reward(1.0, True), Reward(float(rng.random() >= with_signal), True)] for _ in groups])

    learner: Any = Learner()
    decoding: Any = generator
    steps = list(islice(Pipeline(recipe, pool, decoding, learner, verify).steps(), 40))
    consumed = []
    for step in steps:
        used = step.batch.groups_used
        assert used == prompts or len(step.groups) == prompts * most
        assert len(step.groups) <= prompts * most
        assert used < prompts or step.batch.fates[-1] == "trained"  # no more than it takes
        consumed += [int(group.prompt.id) for group in step.groups]
        oldest = min(rollout.first_version for group in step.groups for rollout in group.rollouts)
        assert step.index - 1 - oldest <= schedule.max_staleness
    assert consumed == list(range(len(consumed)))  # in order of admission, each once
    assert len(steps) == 40


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_batch_is_full_of_groups_with_signal(start_run, recipe, by_parity, schedule):
    def sparse(rollout):
        """Of two prompts in three all completions are right."""
        return by_parity(rollout) if sum(rollout.prompt.id.encode()) % 3 == 0 else Reward(1.0, True)

    loop, _, _ = start_run(replace(recipe, schedule=schedule, curriculum=Uniform()), sparse)
    steps = list(islice(loop, 8))
    assert [step.batch.groups_used for step in steps] == [P] * 8
    assert sum(len(step.groups) for step in steps) > 8 * 2 * P
    for step in steps:
        ages = step.index - 1 - step.batch.version_NT[step.batch.sampled_NT]
        assert ages.min() >= 0
        assert ages.max() <= schedule.max_staleness
        # What was replaced has no part in advantages and averages.
        kept = [g for g, fate in zip(step.groups, step.batch.fates, strict=True) if fate == "trained"]
        settings = recipe.advantage, recipe.averaging, recipe.context.sampled
        alone = make_batch(kept, *settings, keep_truncated=True)
        np.testing.assert_array_equal(alone.weight_NT, step.batch.weight_NT)
        np.testing.assert_array_equal(alone.advantage_N, step.batch.advantage_N)


@pytest.mark.parametrize("most", [1, 3])
def test_a_step_goes_on_with_what_it_has_after_so_many_batches(start_run, recipe, most):
    recipe = replace(recipe, batch=replace(recipe.batch, max_gen_batches=most), curriculum=Uniform())
    loop, _, learner = start_run(recipe, lambda rollout: Reward(1.0, True))
    steps = list(islice(loop, 3))
    assert [len(step.groups) for step in steps] == [most * P] * 3
    assert [len(step.batch) for step in steps] == [0] * 3
    assert learner.version == 3


def test_a_pool_that_runs_dry_ends_the_run_with_its_last_full_batch(start_run, recipe, by_parity):
    recipe = replace(recipe, curriculum=NoPositiveResampling(threshold=0.01))
    loop, _, _ = start_run(recipe, by_parity)
    steps = list(loop)
    assert steps
    assert all(step.batch.groups_used == P or len(step.groups) == 10 * P for step in steps)


def test_a_run_counts_what_it_drops_and_resumes_as_if_never_cut(guesser, tmp_path):
    recipe = replace(recipe_of(guesser), zero_variance="resample")
    run(recipe, tmp_path / "whole")
    for n, step in enumerate((2, 5)):
        with pytest.raises(CutError):
            run(recipe, tmp_path / "cut", resume=n > 0, progress=cut_at(step))
    run(recipe, tmp_path / "cut", resume=True)
    assert record_and_weights(tmp_path / "cut") == record_and_weights(tmp_path / "whole")
    assert check(tmp_path / "whole") == []
    rows, evals = lines(tmp_path / "whole" / "steps.jsonl"), lines(tmp_path / "whole" / "evals.jsonl")
    assert all(row["groups_used"] == 2 for row in rows)
    assert not any(row["skipped"] for row in rows)
    groups = sum(row["groups"] for row in rows)
    assert groups > 2 * len(rows)
    assert evals[-1]["samples"] == 4 * groups
    dropped = run(replace(recipe, zero_variance="drop"), tmp_path / "dropped")
    assert rows[-1]["flops"]["generate"] > lines(dropped.path / "steps.jsonl")[-1]["flops"]["generate"]
