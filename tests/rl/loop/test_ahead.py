"""A learner that is elsewhere: what the loop does while it steps. Here it is a thread.

A step ends only once what is asked of the loop has happened meanwhile, or after so long that the test fails.
"""

import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty_parts import Fault, FaultyCurriculum

from scalerl.errors import OwnCodeError
from scalerl.rl.algo.curriculum import Uniform
from scalerl.rl.algo.schedule import OffPolicy, PipelineRL
from scalerl.rl.config.settings import Local
from scalerl.rl.learner.load import load_learner
from scalerl.rl.loop.pipeline import Pipeline
from scalerl.rl.loop.prompt_pool import PromptPool
from scalerl.rl.model.causal_lm import load_tokenizer
from scalerl.rl.placement.rollouts import LocalGenerator
from scalerl.rl.tasks.dataset import Dataset
from scalerl.rl.tasks.verifiers import Function
from scalerl.rl.types import FAILED, Done, Limits, Reward
from scalerl.rl.verify.verifier import PoolVerifier

P = 2  # groups a step of the recipe
SECONDS = 120.0


class Stepping:
    """A step of another thread; see `scalerl.rl.types.Pending`."""

    def __init__(self, future):
        self.future = future

    def wait(self, seconds):
        return bool(wait([self.future], seconds).done)

    def result(self):
        return self.future.result()


class Elsewhere:
    """A learner that steps in a thread of its own, once `ready` holds."""

    def __init__(self, learner, ready=lambda: True):
        self._learner, self.ready = learner, ready
        self._thread = ThreadPoolExecutor(1)
        self.gone = threading.Event()

    def __getattr__(self, name):
        return getattr(self._learner, name)

    def begin(self, batch):
        return Stepping(self._thread.submit(self._step, batch))

    def _step(self, batch):
        ends = time.monotonic() + SECONDS
        while not self.ready():
            assert not self.gone.wait(0.002)
            assert time.monotonic() < ends, "the loop did not do what it was to do during the step"
        return self._learner.step(batch)

    def close(self):
        self.gone.set()
        self._thread.shutdown()


class Run:
    """The loop of a recipe with its parts."""

    def __init__(self, recipe, judge, state=None):
        learner = load_learner(recipe, recipe.model)
        if state:
            learner.restore(state["folder"])
        elsewhere: Any = Elsewhere(learner)
        self.recipe, self.learner = recipe, elsewhere
        self.generator = LocalGenerator(recipe, recipe.model, learner.weights(), 1, learner.version)
        self.pool = PromptPool(recipe.task.prompts("train"), recipe.curriculum, 0)
        self.pipeline = Pipeline(recipe, self.pool, self.generator, self.learner, judge)
        if state:
            for name in ("generator", "pipeline", "pool"):
                getattr(self, name).restore(state[name])
        self.loop = self.pipeline.steps()

    def state(self):
        folder = Path(tempfile.mkdtemp())
        self.learner.saver(folder)(folder)
        parts = {name: getattr(self, name).state() for name in ("generator", "pipeline", "pool")}
        return {"folder": folder, **parts}

    def wait_for_the_next(self):
        """Let a step end once all that may be admitted is, and the groups of the next are verified."""
        self.learner.ready = self._next_is_there

    def _next_is_there(self):
        allowed = (self.learner.version + self.recipe.schedule.k + 1) * P
        assert self.pipeline.queue()["verified"] <= P  # those of one step ahead, and no more
        return self.pipeline.admitted == allowed and self.pipeline.queue()["verified"] == P

    def close(self):
        self.learner.close()
        self.generator.close()


@pytest.fixture(scope="module")
def recipe(tiny_recipe):
    return replace(
        tiny_recipe, curriculum=Uniform(), placement=Local(), decode_slots=16, schedule=PipelineRL(k=1)
    )


@pytest.fixture
def start(judge_by, by_parity):
    """A function that makes the loop of a recipe; what it starts ends with the test."""
    made = []

    def make(recipe, judge=None, state=None):
        made.append(Run(recipe, judge or judge_by(by_parity), state))
        return made[-1]

    yield make
    for run in made:
        run.close()


def take(run, n_steps):
    """So many steps, each of them checked."""
    steps = []
    for step in run.loop:
        steps.append(step)
        ledger = run.pipeline.ledger({"consumed": step.index * P})
        assert ledger["admitted"] == ledger["consumed"] + ledger["in_flight"]
        assert sum(run.pipeline.queue().values()) == ledger["in_flight"]
        if len(steps) == n_steps:
            return steps
    raise AssertionError(f"it ended after {len(steps)} steps")


def ages_of(steps):
    return [s.index - 1 - np.concatenate([r.version_T for g in s.groups for r in g.rollouts]) for s in steps]


def draws_of(steps):
    return [(group.prompt.id, group.rollouts[0].epoch) for step in steps for group in step.groups]


def sampled(steps):
    """Tokens, and the versions that sampled them."""
    rollouts = [rollout for step in steps for group in step.groups for rollout in group.rollouts]
    return [(rollout.token_T.tolist(), rollout.version_T.tolist()) for rollout in rollouts]


def expected_draws(recipe, n):
    pool = PromptPool(recipe.task.prompts("train"), recipe.curriculum, 0)
    return [(prompt.id, epoch) for prompt, epoch in filter(None, (pool.draw() for _ in range(n)))]


def test_groups_are_admitted_and_verified_while_the_learner_steps(start, recipe):
    run = start(recipe)
    run.wait_for_the_next()
    steps = take(run, 4)
    assert draws_of(steps) == expected_draws(recipe, 4 * P)
    # Admitted during the step before theirs, by weights that were new then: the lead is k, and not k - 1.
    assert [(int(age.min()), int(age.max())) for age in ages_of(steps)] == [(0, 0)] + [(1, 1)] * 3
    assert all(step.waited_seconds == 0 for step in steps[1:])
    assert steps[0].waited_seconds > 0


@pytest.mark.parametrize("schedule", [PipelineRL(k=3), OffPolicy(k=2)])
def test_no_token_is_too_old_whenever_a_step_ends(start, recipe, schedule):
    recipe = replace(recipe, schedule=schedule)
    run = start(recipe)
    steps = take(run, 5)
    assert draws_of(steps) == expected_draws(recipe, 5 * P)
    assert all(age.min() >= 0 and age.max() <= schedule.max_staleness for age in ages_of(steps))


def test_a_run_goes_on_from_between_two_steps_as_if_it_had_not_been_cut(start, recipe):
    whole = start(recipe)
    whole.wait_for_the_next()
    take(whole, 3)
    state = whole.state()
    assert len(state["pipeline"]["verified"]["rollouts"]["sizes"]) == P
    expected = take(whole, 3)
    whole.close()
    again = start(recipe, state=state)
    again.wait_for_the_next()
    steps = take(again, 3)
    assert sampled(steps) == sampled(expected)
    # Which completions shared a pass of the model is left to chance, and so is the rounding.
    losses = [[step.stats.loss for step in run] for run in (steps, expected)]
    np.testing.assert_allclose(*losses, rtol=1e-3)


VERIFIER = '''
import os, time

def judge(prompt, text):
    """Not before the file is there."""
    while not os.path.exists({path!r}):
        time.sleep(0.002)
    return len(text) % 2 == 0
'''


@pytest.fixture
def held_back(tmp_path, recipe):
    """A verifier in processes of its own that judges nothing before a file is there, and that file."""
    free, code = tmp_path / "free", tmp_path / "code.py"
    code.write_text(VERIFIER.format(path=str(free)))
    task = Dataset("unread", verifier=Function(f"{code}:judge"))
    verifier = PoolVerifier(task, load_tokenizer(recipe.model), Limits(seconds=SECONDS, workers=2))
    yield verifier, free
    verifier.close()


def judging(start, recipe, held_back):
    """A run whose next step ends while groups are being verified, which go on once a file is there: this."""
    verifier, free = held_back
    run = start(recipe, verifier.start)
    free.touch()
    run.wait_for_the_next()
    take(run, 1)
    free.unlink()
    run.learner.ready = lambda: run.pipeline._verifying is not None
    return run, free


def test_a_step_ends_and_weights_are_published_while_groups_are_being_verified(start, recipe, held_back):
    run, free = judging(start, recipe, held_back)
    step = next(run.loop)
    assert run.pipeline.queue()["verified"] == 0
    assert run.generator.version == step.index == 2
    run.learner.ready = lambda: True
    admitted = []
    watch = threading.Thread(target=lambda: admitted.append(until_admitted(run, 4 * P, free)))
    watch.start()
    steps = take(run, 2)
    watch.join()
    assert admitted == [True]
    assert draws_of(steps) == expected_draws(recipe, 4 * P)[2 * P :]


def until_admitted(run, n, free):
    """Let the verifier go on once so many groups are admitted, though none is verified."""
    ends = time.monotonic() + SECONDS
    while run.pipeline.admitted < n and time.monotonic() < ends:
        time.sleep(0.002)
    found = run.pipeline.admitted >= n
    free.touch()
    return found


def test_a_checkpoint_has_the_groups_that_are_being_verified_and_a_resume_verifies_them(
    start, recipe, held_back
):
    run, free = judging(start, recipe, held_back)
    next(run.loop)
    state = run.state()  # the verifier judges nothing yet: a wait for it would not end
    assert len(state["pipeline"]["verifying"]["sizes"]) == P
    assert sum(h["n"] for h in state["pool"]["history"].values()) == 2 * P * recipe.batch.samples
    run.close()
    free.touch()
    resumed = start(recipe, held_back[0].start, state)
    resumed.learner.ready = lambda: True
    assert draws_of(take(resumed, 2)) == expected_draws(recipe, 4 * P)[2 * P :]


def test_an_error_during_a_step_is_raised_though_the_step_goes_on(start, recipe):
    left = True

    def judge(groups):
        if not left:
            raise RuntimeError("nobody is left")
        return Done([[FAILED, *[Reward(1.0, True)] * (len(group) - 1)] for group in groups])

    run = start(recipe, judge)
    next(run.loop)
    left = False
    run.learner.ready = lambda: False
    with pytest.raises(RuntimeError, match="nobody is left"):
        for _ in run.loop:
            pass


def test_what_a_step_raises_is_raised(start, recipe):
    run = start(recipe)
    next(run.loop)

    def fail():
        raise ValueError("it cannot go on")

    run.learner.ready = fail
    with pytest.raises(ValueError, match="it cannot go on"):
        next(run.loop)
    assert run.learner.version == 1


def test_a_choice_that_raises_during_a_step_ends_the_loop_after_it_with_all_groups(recipe, start):
    recipe = replace(recipe, curriculum=FaultyCurriculum())
    run = start(recipe)
    Fault.calls, Fault.at = {}, {"curriculum": P + 2}  # the second group of the next batch
    run.learner.ready = lambda: Fault.calls.get("curriculum", 0) > P + 1
    assert next(run.loop).index == 1
    with pytest.raises(OwnCodeError, match=r"^curriculum: FaultyCurriculum: retires raised an error \(Key"):
        next(run.loop)
    assert run.pipeline.ledger({"trained": P})["in_flight"] == run.pipeline.admitted - P
    assert run.pipeline.queue()["verified"] == 1
    state, Fault.at = run.state(), {}
    again = start(recipe, state=state)
    consumed = [group.prompt.id for _ in range(2) for group in next(again.loop).groups]
    order = PromptPool(recipe.task.prompts("train"), Uniform(), 0)
    drawn = [order.draw() for _ in range(3 * P)]
    assert consumed == [one[0].id for one in drawn[P:] if one]
