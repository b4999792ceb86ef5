import multiprocessing.resource_tracker
import multiprocessing.spawn
import pickle
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import fields, replace

import numpy as np
import pytest

from scalerl.rl.base import BaseModel, build_base
from scalerl.rl.evaluate import EvaluationProcess, Evaluator
from scalerl.rl.length import ForcedInterruption
from scalerl.rl.model import copy_weights, load_model
from scalerl.rl.recipe import Context, Evaluation, Recipe, Steps
from scalerl.rl.setup import load_generator
from scalerl.rl.tasks.chain import Chain, Demonstrations


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
        evaluation=Evaluation(samples=6, rows=32),
    )


def other_weights(recipe):
    rng = np.random.default_rng(0)
    weights = copy_weights(load_model(recipe.model))
    return weights, {n: w + rng.normal(0, 0.1, w.shape).astype(np.float32) for n, w in weights.items()}


def same(a, b):
    return all(
        np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(a) if f.name != "seconds"
    )


def test_a_process_of_its_own_gives_the_same_evaluation(recipe):
    first, second = other_weights(recipe)
    here, there = Evaluator(recipe, recipe.model), EvaluationProcess(recipe, recipe.model)
    try:
        queued = [there(first, 0), there(second, 3), there(first, 4)]
        outcomes = [future.result(timeout=60) for future in queued]
    finally:
        there.close()
    assert [outcome.version for outcome in outcomes] == [0, 3, 4]
    assert same(outcomes[0], here(first, 0).result())
    assert same(outcomes[1], here(second, 3).result())
    assert not np.array_equal(outcomes[0].correct_P, outcomes[1].correct_P)
    assert np.array_equal(outcomes[0].correct_P, outcomes[2].correct_P)  # the same seed at every evaluation


def test_a_process_that_dies_before_it_has_read_anything_holds_nobody_up(recipe, monkeypatch):
    full = replace(recipe, task=Chain(k_max=6, train_per_length=300))
    full.task.prompts("train")
    assert len(pickle.dumps(full)) > 1 << 16  # more than a pipe takes when nobody reads
    multiprocessing.resource_tracker.ensure_running()
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", b"/bin/false")
    evaluate = EvaluationProcess(full, recipe.model)
    with pytest.raises(BrokenProcessPool):
        evaluate({}, 0).result(timeout=60)
    evaluate.close()


def test_an_evaluation_that_has_hardly_begun_holds_up_no_end(recipe):
    endless = replace(recipe, evaluation=replace(recipe.evaluation, samples=100_000))
    first, _ = other_weights(recipe)
    evaluate = EvaluationProcess(endless, recipe.model)
    asked = evaluate(first, 0)
    evaluate.close()
    with pytest.raises((BrokenProcessPool, CancelledError)):
        asked.result()


def test_an_evaluation_says_what_its_completions_say(recipe):
    weights, _ = other_weights(recipe)
    outcome = Evaluator(recipe, recipe.model).evaluate(weights, 7)
    # The same completions once more, from a generator with other rows, judged here by hand.
    generator = load_generator(recipe, recipe.model, recipe.evaluation.seed, rows=5)
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
