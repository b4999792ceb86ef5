import multiprocessing.resource_tracker
import multiprocessing.spawn
import os
import pickle
import signal
import threading
import time
from concurrent.futures import CancelledError
from dataclasses import fields, replace

import numpy as np
import pytest
from weight_arrays import arrays, stream

from scalerl.errors import WorkerError
from scalerl.rl.algo.length import ForcedInterruption
from scalerl.rl.config.engine import BuiltInEngine
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.config.settings import Context, Evaluation, Steps, Suite, Timeouts
from scalerl.rl.engine.build import load_generator
from scalerl.rl.model.causal_lm import load_model
from scalerl.rl.model.demo_base import BaseModel, build_base
from scalerl.rl.model.weights import WeightStream, weights_of
from scalerl.rl.placement.evaluate import Evaluator, prompts_of
from scalerl.rl.placement.evaluate_aside import EvaluatorAside
from scalerl.rl.tasks.chain import Chain, Demonstrations
from scalerl.rl.workers.processes import Processes, start_fork_server

OTHER = Suite("other", Chain(k_max=2, heldout_per_length=8, train_per_length=1, seed=3), samples=2)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A model of a hundred steps of training: it knows the form of an answer, and guesses."""
    task = Chain(k_max=2, heldout_per_length=15, train_per_length=20)
    spec = BaseModel(Demonstrations(task, 6), hidden_size=32, max_careful_steps=80, imperfect_steps=20)
    return Recipe(
        model=str(build_base(spec, tmp_path_factory.mktemp("base"))),
        task=task,
        budget=Steps(1),
        context=Context(prompt=8, thinking=6, answer=4),
        length=ForcedInterruption(low=3, high=6, phrase="! </think>"),
        evaluation=Evaluation(samples=6, decode_slots=32, downstream=(OTHER,)),
    )


def other_weights(recipe):
    rng = np.random.default_rng(0)
    weights = weights_of(load_model(recipe.model))
    away = {n: w + rng.normal(0, 0.1, w.shape).astype(np.float32) for n, w in arrays(weights).items()}
    return weights, stream(away)


def same(a, b):
    return all(
        np.array_equal(getattr(a, f.name), getattr(b, f.name))
        for f in fields(a)
        if f.name not in ("seconds", "startup", "downstream")
    )


@pytest.fixture
def aside():
    """A function that makes what evaluates a recipe in a process; it ends with the test."""
    made = []

    def make(recipe, **timeouts):
        arguments = recipe.without_prompts(), recipe.model, prompts_of(recipe)
        made.append(EvaluatorAside(Processes(), arguments, Timeouts(**timeouts)))
        return made[-1]

    yield make
    for evaluate in made:
        evaluate.close()


def process(besides=()):
    """The process that evaluates, waited for, which is none of `besides`."""
    ends = time.monotonic() + 100
    while time.monotonic() < ends:
        for found in multiprocessing.active_children():
            if found.name == "evaluation" and found.pid and found.pid not in besides:
                return found.pid
        time.sleep(0.02)
    raise AssertionError("there is no such process")


def test_a_process_of_its_own_gives_the_same_evaluation(recipe, aside):
    first, second = other_weights(recipe)
    here, there = Evaluator(recipe, recipe.model), aside(recipe)
    queued = [there(first, 0), there(second, 3, ["other"]), there(first, 4)]
    outcomes = [future.result(timeout=100) for future in queued]
    assert outcomes[0].startup > 0  # of one process, once
    assert outcomes[1].startup == outcomes[2].startup == 0
    assert [outcome.version for outcome in outcomes] == [0, 3, 4]
    assert same(outcomes[0], here(first, 0).result())
    expected = here(second, 3, ["other"]).result()
    assert same(outcomes[1], expected)
    assert same(outcomes[1].downstream["other"], expected.downstream["other"])
    assert len(expected.downstream["other"].correct_P) == 8 * 2
    assert not outcomes[0].downstream
    assert not np.array_equal(outcomes[0].correct_P, outcomes[1].correct_P)
    assert np.array_equal(outcomes[0].correct_P, outcomes[2].correct_P)  # the same seed at every evaluation


def test_an_evaluation_whose_process_is_killed_is_made_again(recipe, aside, caplog):
    """At its start, in the middle, and while it waits."""
    weights, _ = other_weights(recipe)
    expected = Evaluator(recipe, recipe.model)(weights, 0).result()
    there = aside(recipe)
    first, killed = there(weights, 0), [process()]
    os.kill(killed[0], signal.SIGKILL)
    killed.append(process(killed))  # another, while it starts
    os.kill(killed[1], signal.SIGKILL)
    assert same(first.result(timeout=100), expected)
    killed.append(process(killed))
    os.kill(killed[2], signal.SIGKILL)
    second = there(weights, 1).result(timeout=100)
    assert np.array_equal(second.correct_P, expected.correct_P)
    lost = [text for text in caplog.messages if "killed by SIGKILL (out of memory?); a new" in text]
    assert [text[-17:] for text in lost] == ["step 0 made again"] * 2 + ["step 1 made again"]


def test_an_evaluation_that_hangs_is_reported_and_its_process_replaced(recipe, aside, caplog):
    weights, _ = other_weights(recipe)
    there = aside(recipe, evaluation=6)
    expected = there(weights, 0).result(timeout=100)
    os.kill(process(), signal.SIGSTOP)
    assert np.array_equal(there(weights, 7).result(timeout=100).correct_P, expected.correct_P)
    said = [text for text in caplog.messages if "evaluation at step 7 has made no progress for" in text]
    assert "for 3 s" in said[0]
    assert "for 6 s; a new process is started" in said[1]


@pytest.mark.slow
def test_an_evaluation_that_is_slow_is_left_to_its_work(recipe, aside, caplog):
    """Longer than its timeout, though it makes progress all the while."""
    slow = replace(recipe, evaluation=replace(recipe.evaluation, samples=1500, decode_slots=8))
    weights, _ = other_weights(recipe)
    there = aside(slow, evaluation=8)
    outcome = there(weights, 0).result(timeout=400)
    assert outcome.seconds > 10
    assert not [text for text in caplog.messages if "made again" in text]


def test_a_process_that_dies_before_it_has_read_anything_holds_nobody_up(recipe, monkeypatch, aside):
    full = replace(recipe, task=Chain(k_max=6, train_per_length=300))
    full.task.prompts("train")
    assert len(pickle.dumps(full)) > 1 << 16  # more than a pipe takes when nobody reads
    start_fork_server()
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # which its fork server has not: it is started afresh
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", b"/bin/false")
    evaluate = aside(full)
    with pytest.raises(WorkerError, match=r"evaluation at step 0: .* exited with status 1, 3 times in a row"):
        evaluate({}, 0).result(timeout=60)


def test_a_process_that_cannot_be_started_is_an_error_of_each_evaluation():
    class Broken(Processes):
        def spawn(self, name, number, target, *arguments):
            raise RuntimeError("an attempt has been made")  # of multiprocessing, in a script without a guard

    evaluate = EvaluatorAside(Broken(), (), Timeouts())
    for step in (0, 1):
        with pytest.raises(RuntimeError, match="an attempt has been made"):
            evaluate(WeightStream.of({}), step).result(timeout=60)
    evaluate.close()


def test_an_evaluation_that_has_hardly_begun_holds_up_no_end(recipe, aside):
    endless = replace(recipe, evaluation=replace(recipe.evaluation, samples=100_000))
    first, _ = other_weights(recipe)
    evaluate = aside(endless)
    futures = [evaluate(first, 0), evaluate(first, 1)]
    evaluate.close()
    for future in futures:
        with pytest.raises(CancelledError):
            future.result(timeout=10)


def test_a_process_that_starts_as_the_run_ends_is_ended_too(recipe):
    started, made = [], threading.Event()

    class Slow(Processes):
        def spawn(self, name, number, target, *arguments):
            made.wait(60)
            closing.start()
            time.sleep(0.3)  # the run ends meanwhile
            started.append(super().spawn(name, number, target, *arguments))
            return started[0]

    closing = threading.Thread(target=lambda: evaluate.close())
    evaluate = EvaluatorAside(Slow(), (recipe.without_prompts(), recipe.model, {}), Timeouts())
    made.set()
    future = evaluate(WeightStream.of({}), 0)
    with pytest.raises(CancelledError):
        future.result(timeout=60)
    closing.join(60)
    assert len(started) == 1
    assert not [child for child in multiprocessing.active_children() if child.name == "evaluation"]


def test_an_evaluation_says_what_its_completions_say(recipe):
    weights, _ = other_weights(recipe)
    outcome = Evaluator(recipe, recipe.model).evaluate(weights, 7)
    # The same completions once more, from a generator with other rows, judged here by hand.
    generator = load_generator(recipe, recipe.model, recipe.evaluation.seed, n_slots=5)
    prompts = recipe.task.prompts("heldout")
    for prompt in prompts:
        generator.submit(prompt, 0, 6)
    groups = generator.collect(len(prompts))
    rollouts = [rollout for group in groups for rollout in group]

    def right(rollout):
        text = generator.tokenizer.decode(rollout.token_T)
        return text.endswith(f"</think>{rollout.prompt.answer}<eos>") and text.count("</think>") == 1

    assert outcome.version == 7
    assert outcome.correct_P.tolist() == [sum(map(right, group)) for group in groups]
    assert 0 < outcome.correct_P.sum() < 30 * 6
    assert outcome.truncated == np.mean([r.truncated for r in rollouts])
    assert outcome.interrupted == np.mean([r.interrupted for r in rollouts])
    assert 0 < outcome.truncated < 1
    assert 0 < outcome.interrupted < 1
    assert outcome.mean_length == np.mean([r.length for r in rollouts])
    logps = np.concatenate([r.logp_T[r.sampled_T] for r in rollouts])
    assert outcome.entropy == pytest.approx(-logps.mean(), abs=1e-5)


@pytest.mark.parametrize("kind", ["auto", "transformers"])
def test_an_evaluation_on_the_engine_of_training_is_the_same_and_leaves_no_trace(recipe, kind):
    """Completions in flight go on with their KV cache, and the generator with its weights."""
    recipe = replace(recipe, engine=BuiltInEngine(kind), decode_slots=32)
    weights, others = other_weights(recipe)

    def training():
        generator = load_generator(recipe, recipe.model, recipe.seed, recipe.decode_slots)
        generator.start(weights, 3)
        for prompt in recipe.task.prompts("train")[:10]:  # more than there are slots for
            generator.submit(prompt, 0, 6)
        for _ in range(4):
            generator.work()
        return generator

    alone, lender = training(), training()
    lent, own = Evaluator(recipe, recipe.model, lender=lender), Evaluator(recipe, recipe.model)
    try:
        assert same(lent.evaluate(others, 5), own.evaluate(others, 5))
        assert same(lent.evaluate(weights, 5), own.evaluate(weights, 5))
    finally:
        lent.close()
        own.close()
    assert lender.version == 3
    for one, other in zip(lender.collect(10), alone.collect(10), strict=True):
        for mine, theirs in zip(one, other, strict=True):
            assert np.array_equal(mine.token_T, theirs.token_T)
            assert np.array_equal(mine.logp_T, theirs.logp_T)
            assert np.array_equal(mine.version_T, theirs.version_T)
