"""Generators in processes of their own: ages, order and what happens when one dies."""

import multiprocessing.resource_tracker
import multiprocessing.spawn
import os
import pickle
import signal
import time
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import pytest
from weight_arrays import arrays

from scalerl.errors import WorkerError
from scalerl.rl.algo.curriculum import Uniform
from scalerl.rl.algo.loss import Cispo
from scalerl.rl.algo.schedule import OffPolicy, PipelineRL
from scalerl.rl.config.settings import Local, Timeouts
from scalerl.rl.learner.load import load_learner
from scalerl.rl.loop.pipeline import Pipeline
from scalerl.rl.loop.prompt_pool import PromptPool
from scalerl.rl.placement.rollouts import LocalGenerator
from scalerl.rl.tasks.chain import Chain
from scalerl.rl.workers import pool as worker_pool
from scalerl.rl.workers.processes import start_fork_server

P = 2  # groups a step of the recipe


@pytest.fixture(scope="module")
def recipe(tiny_recipe):
    return replace(tiny_recipe, curriculum=Uniform(), placement=Local(), decode_slots=16)


@pytest.fixture(scope="module")
def judge(judge_by, by_parity):
    return judge_by(by_parity)


@pytest.fixture
def start(judge):
    """A function that makes the loop of a recipe with generators aside; they end with the test."""
    made = []

    def make(recipe, processes=1):
        learner = load_learner(recipe, recipe.model)
        generator = LocalGenerator(recipe, recipe.model, learner.weights(), processes)
        made.append(generator)
        generator.wait_until_started()  # as a run does: the wait is no part of what is measured
        pool = PromptPool(recipe.task.prompts("train"), recipe.curriculum, 0)
        return Pipeline(recipe, pool, generator, learner, judge).steps(), generator, learner

    yield make
    for generator in made:
        generator.close()


def work(generator, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        generator.work()


def order_of_draws(recipe, n):
    pool = PromptPool(recipe.task.prompts("train"), recipe.curriculum, 0)
    return [(prompt.id, epoch) for prompt, epoch in filter(None, (pool.draw() for _ in range(n)))]


def drawn(steps):
    return [(g.prompt.id, g.rollouts[0].epoch) for step in steps for g in step.groups]


@pytest.mark.parametrize("schedule", [PipelineRL(k=8), PipelineRL(k=1), OffPolicy(k=3)])
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_no_token_is_older_than_the_schedule_allows(recipe, start, schedule, processes):
    recipe = replace(recipe, schedule=schedule)
    loop, generator, _ = start(recipe, processes)
    steps = list(islice(loop, 12))
    for step in steps:
        ages = step.index - 1 - np.concatenate([r.version_T for g in step.groups for r in g.rollouts])
        assert ages.min() >= 0
        assert ages.max() <= schedule.max_staleness
    assert drawn(steps) == order_of_draws(recipe, 12 * P)  # in the order of admission, each exactly once
    assert generator.counters.tokens >= sum(r.length for s in steps for g in s.groups for r in g.rollouts)
    assert generator.counters.seconds > 0
    assert len(generator.lost) == 0


def test_what_is_sampled_is_what_one_process_would_sample(recipe, start, start_run):
    """On-policy nothing is in flight across an update: the same completions, wherever they came from."""
    recipe = replace(recipe, schedule=PipelineRL(k=0))
    loop, _, learner = start(recipe, 2)
    steps = list(islice(loop, 4))
    loop, _, other = start_run(recipe)
    alone = list(islice(loop, 4))
    for step, expected in zip(steps, alone, strict=True):
        for group, like in zip(step.groups, expected.groups, strict=True):
            for rollout, twin in zip(group.rollouts, like.rollouts, strict=True):
                np.testing.assert_array_equal(rollout.token_T, twin.token_T)
    for name, weight in learner.weights():
        np.testing.assert_allclose(weight, arrays(other.weights())[name], atol=1e-4)


def test_a_resume_takes_the_version_that_was_published_not_the_one_that_was_installed(recipe, start):
    loop, generator, learner = start(recipe, 1)
    next(loop)
    os.kill(generator._workers[0].process.pid, signal.SIGSTOP)  # it lags behind
    try:
        generator.update(learner.weights(), 5)
        assert generator.installed < 5
        assert generator.state()["version"] == 5
    finally:
        os.kill(generator._workers[0].process.pid, signal.SIGCONT)


def test_what_is_installed_is_the_oldest_version_of_several_generators(recipe, start):
    """By the newest, admission would let a generator that lags behind sample with weights older than k."""
    _, generator, learner = start(recipe, 2)
    quick, slow = (worker.process.pid for worker in generator._workers)
    os.kill(slow, signal.SIGSTOP)
    try:
        generator.update(learner.weights(), 7)
        while generator._workers[0].installed < 7:
            generator.work()
        assert generator.installed == 0
    finally:
        os.kill(slow, signal.SIGCONT)
    while generator.installed < 7:
        generator.work()
    assert [quick, slow] == [worker.process.pid for worker in generator._workers]


def test_a_generator_that_is_killed_is_started_again_and_nothing_is_lost(recipe, start):
    loop, generator, _ = start(recipe, 2)
    steps = []
    for kill in range(3):
        while len(generator.lost) < kill:
            steps.append(next(loop))
        steps += islice(loop, 3)
        while not generator._workers[kill % 2].process:  # it is started again after a pause
            steps.append(next(loop))
        os.kill(generator._workers[kill % 2].process.pid, signal.SIGKILL)
    steps += islice(loop, 12)
    assert len(generator.lost) == 3
    assert drawn(steps) == order_of_draws(recipe, len(steps) * P)
    for step in steps:
        ages = step.index - 1 - np.concatenate([r.version_T for g in step.groups for r in g.rollouts])
        assert ages.min() >= 0
        assert ages.max() <= recipe.schedule.max_staleness


def test_a_generator_that_dies_before_it_has_read_anything_holds_nobody_up(recipe, monkeypatch):
    full = replace(recipe, task=Chain(k_max=6, train_per_length=300))
    full.task.prompts("train")
    assert len(pickle.dumps(full)) > 1 << 16  # more than a pipe takes when nobody reads
    learner = load_learner(recipe, recipe.model)
    start_fork_server()
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # which its fork server has not: it is started afresh
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", b"/bin/false")
    generator = LocalGenerator(full, recipe.model, learner.weights())
    with pytest.raises(WorkerError, match="exited with status 1, 6 times in a row"):
        work(generator)
    generator.close()


@dataclass(frozen=True)
class Unreadable(Cispo):
    """Pickled here, and nothing that can be made there."""

    def __reduce__(self):
        return int, ("no number",)


def test_a_recipe_that_the_generator_cannot_read_ends_the_run(recipe, monkeypatch):
    monkeypatch.setattr(worker_pool, "MOST_LOSSES", 0)
    learner = load_learner(recipe, recipe.model)
    generator = LocalGenerator(replace(recipe, loss=Unreadable()), recipe.model, learner.weights())
    with pytest.raises(WorkerError, match="is lost: its process exited with status 1"):
        generator.wait_until_started()
    generator.close()


def test_a_generator_that_cannot_start_ends_the_run_with_its_reason(recipe, tmp_path):
    learner = load_learner(recipe, recipe.model)
    generator = LocalGenerator(recipe, str(tmp_path / "nothing"), learner.weights())
    with pytest.raises(WorkerError, match="nothing cannot be loaded"):
        generator.wait_until_started()
    generator.close()


def test_a_generator_that_hangs_is_reported_and_replaced(recipe, start, caplog):
    """One that is stopped; the groups that it has are sampled by another process."""
    loop, generator, _ = start(replace(recipe, timeouts=Timeouts(generator=6)), 1)
    steps = list(islice(loop, 2))
    os.kill(generator._workers[0].process.pid, signal.SIGSTOP)
    steps += islice(loop, recipe.schedule.k + 4)  # more than it can have sampled ahead
    assert len(generator.lost) == 1
    assert drawn(steps) == order_of_draws(recipe, len(steps) * P)
    told = "\n".join(caplog.messages)
    assert "generator 0 has made no progress for 3 s; its process is replaced after 6 s" in told
    assert "generator 0 has made no progress for 6 s; it is started again" in told
    assert generator.counters.held >= 6  # a device that hangs is idle, and held
