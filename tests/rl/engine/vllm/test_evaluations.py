"""Evaluations by the servers of training: all by one version, whatever training does meanwhile."""

import time
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from faulty_server import PROMPTS, TOKENS, FaultyServer, collect, drop, first, slow, status, submit

from scalerl.errors import WorkerError
from scalerl.rl.config.recipe import load_recipe
from scalerl.rl.config.settings import Suite
from scalerl.rl.engine.sampling import RequestFactory
from scalerl.rl.placement.vllm import ServedEvaluator
from scalerl.rl.tasks.chain import Chain
from scalerl.rl.types import as_reward

HELD_OUT = [replace(prompt, id=f"held-out/{i}") for i, prompt in enumerate(PROMPTS)]


def requests(generator, samples=2):
    factory = RequestFactory(generator.tokenizer, replace(generator.sampling, seed=7))
    return [r for i, prompt in enumerate(HELD_OUT) for r in factory.requests(i, (prompt, 0, samples))]


def start(generator):
    while generator.installed < 0:
        generator.work()


def wait_for(condition, seconds=20.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def evaluated(*peers):
    """The requests of evaluations that servers got."""
    return [body for peer in peers for body in peer.bodies if body["cache_salt"].startswith("evaluation-")]


def versions(bodies):
    return {body["cache_salt"].rpartition("-")[2] for body in bodies}


def names(peer):
    return [path.rpartition("/")[2] for path in peer.loaded]


@pytest.fixture
def other(tokenizer):
    server = FaultyServer(tokenizer, TOKENS)
    yield server
    server.close()


def test_all_servers_sample_an_evaluation_by_its_version_though_there_are_newer_weights(
    peer, other, connect, weights
):
    generator = connect(peer, other, slots=2)
    start(generator)
    peer.held.clear()
    other.held.clear()
    found = generator.evaluate(requests(generator), weights, 0)
    wait_for(lambda: len(evaluated(peer, other)) == 4)  # all slots
    for version in (1, 2):
        generator.update(weights, version)
    submit(generator, PROMPTS[:1])
    time.sleep(0.2)
    assert generator.installed == 0
    peer.held.set()
    other.held.set()
    groups = found.result(20)
    assert [[r.prompt.id for r in group] for group in groups] == [[p.id] * 2 for p in HELD_OUT]
    assert [[r.sample for r in group] for group in groups] == [[0, 1]] * 4
    assert {v for group in groups for r in group for v in r.version_T.tolist()} == {0}
    while generator.installed < 2:
        generator.work()
    collect(generator, 1)
    assert versions(evaluated(peer, other)) == {"0"}
    assert len(evaluated(peer)) >= 2
    assert len(evaluated(other)) >= 2
    assert names(peer)[-1] == names(other)[-1] == "version-2"


def test_evaluations_are_made_in_order_on_the_way_to_the_newest_weights(peer, connect, weights):
    generator = connect(peer)
    start(generator)
    peer.held.clear()
    found = []
    for version in range(4):
        if version:
            generator.update(weights, version)
        if version < 3:
            found.append(generator.evaluate(requests(generator), weights, version))
    peer.held.set()
    for version, future in enumerate(found):
        assert {r.first_version for group in future.result(20) for r in group} == {version}
    while generator.installed < 3:
        generator.work()
    assert names(peer) == [f"version-{version}" for version in range(4)]
    assert len({body["cache_salt"] for body in evaluated(peer)}) == 3
    seeds = [body["seed"] for body in evaluated(peer)]
    assert len(set(seeds)) == 8  # those of each completion are the same every time
    assert sorted(seeds) == sorted(3 * seeds[:8])


def test_older_weights_are_evaluated_once_training_has_nothing_there(peer, connect, weights, tmp_path):
    """As after a resume. No token of training is sampled by them, and they are not left behind."""
    generator = connect(peer)
    start(generator)
    generator.update(weights, 5)
    while generator.installed < 5:
        generator.work()
    peer.held.clear()
    submit(generator, PROMPTS[:1])
    wait_for(lambda: len(peer.bodies) == 2)
    found = generator.evaluate(requests(generator), weights, 3)
    submit(generator, PROMPTS[1:2])
    time.sleep(0.2)
    assert names(peer)[-1] == "version-5"
    assert not evaluated(peer)
    peer.held.set()
    assert {r.first_version for group in found.result(20) for r in group} == {3}
    rollouts = [r for group in collect(generator, 2) for r in group]
    assert {v for r in rollouts for v in r.version_T.tolist()} == {5}
    assert generator.installed == 5
    assert names(peer)[1:] == ["version-5", "version-3", "version-5"]
    wait_for(lambda: [path.name for path in tmp_path.rglob("version-*")] == ["version-5"])


def test_weights_that_training_does_not_sample_by_are_evaluated_apart(peer, connect, weights):
    """Of a schedule that publishes every few steps: version 2 is no step's behaviour policy."""
    generator = connect(peer)
    start(generator)
    peer.held.clear()
    submit(generator, PROMPTS[:1])
    wait_for(lambda: len(peer.bodies) == 2)
    found = generator.evaluate(requests(generator), weights, 2)
    submit(generator, PROMPTS[1:])
    peer.held.set()
    assert {r.first_version for group in found.result(20) for r in group} == {2}
    assert {v for group in collect(generator, 4) for r in group for v in r.version_T.tolist()} == {0}
    assert names(peer) == ["version-0", "version-2", "version-0"]


def test_what_a_lost_server_had_is_sampled_by_another_at_the_same_version(
    peer, other, connect, tokenizer, weights
):
    generator = connect(peer, other, slots=4)
    start(generator)
    other.held.clear()
    found = generator.evaluate(requests(generator), weights, 0)
    wait_for(lambda: len(evaluated(other)) == 4 and len(evaluated(peer)) == 4)
    generator.update(weights, 1)
    other.close()
    groups = found.result(20)
    assert {v for group in groups for r in group for v in r.version_T.tolist()} == {0}
    assert len(evaluated(peer)) == 8
    while generator.installed < 1:
        generator.work()
    submit(generator)
    assert {r.first_version for group in collect(generator, 4) for r in group} == {1}
    assert generator.counters.restarted == 0  # no group of training was lost


def test_an_evaluation_costs_training_neither_tokens_nor_time(peer, connect, weights):
    generator = connect(peer)
    start(generator)
    submit(generator)
    collect(generator, 4)
    peer.faults["/v1/completions"] = slow(0.5)
    before = generator.counters
    began = time.perf_counter()
    generator.evaluate(requests(generator), weights, 0).result(20)
    seconds, after = time.perf_counter() - began, generator.counters
    assert (after.tokens, after.flops) == (before.tokens, before.flops)
    assert generator.evaluated_seconds >= 0.5
    # Held, and not evaluating: before the first completion and after the last.
    assert after.held - before.held <= seconds - generator.evaluated_seconds + 0.1
    assert after.seconds == pytest.approx(before.seconds, abs=0.1)


def test_the_result_is_that_of_all_held_out_prompts(peer, connect, weights):
    small = ["task.k_max=2", "task.heldout_per_length=20", "evaluation.samples=3"]
    recipe = load_recipe("demo", small)
    suite = Suite("other", replace(cast(Chain, recipe.task), heldout_per_length=5, seed=9), samples=2)
    recipe = replace(recipe, evaluation=replace(recipe.evaluation, downstream=(suite,)))
    generator = connect(peer)
    evaluator = ServedEvaluator(recipe, generator)
    try:
        result = evaluator(weights, 0, ["other"]).result(60)
        again = evaluator(weights, 0).result(60)
    finally:
        evaluator.close()
    prompts = recipe.task.prompts("heldout")
    correct = [3 * as_reward(recipe.task.verify(prompt, "7 </think> 7")).correct for prompt in prompts]
    np.testing.assert_array_equal(result.correct_P, correct)
    others = [
        2 * as_reward(suite.task.verify(p, "7 </think> 7")).correct for p in suite.task.prompts("heldout")
    ]
    np.testing.assert_array_equal(result.downstream["other"].correct_P, others)
    assert not again.downstream
    assert 0 < sum(correct) < 3 * len(prompts)
    assert (result.version, result.mean_length, result.truncated, result.failed) == (0, 4, 0, 0)
    assert result.entropy == pytest.approx(1.0, abs=0.5)  # of what the server says
    assert len(result.samples) == recipe.samples.evaluation
    assert result.seconds > 0
    assert result.seconds + again.seconds == pytest.approx(generator.evaluated_seconds)
    assert len(evaluated(peer)) == 2 * 3 * len(prompts) + 2 * len(others)


def test_an_evaluation_ends_with_its_generator(peer, connect, weights):
    generator = connect(peer)
    start(generator)
    peer.held.clear()
    cancelled, failed = (generator.evaluate(requests(generator), weights, 0) for _ in range(2))
    assert cancelled.cancel()
    generator.close()
    with pytest.raises(CancelledError):
        cancelled.result(20)
    with pytest.raises(WorkerError, match="was stopped"):
        failed.result(20)
    with pytest.raises(WorkerError, match="was stopped"):
        generator.evaluate(requests(generator), weights, 0).result(20)


def test_an_error_of_a_server_fails_the_evaluation_too(peer, connect, weights):
    generator = connect(peer)
    start(generator)
    peer.faults["/v1/completions"] = status(400, {"error": {"message": "too hot"}})
    with pytest.raises(WorkerError, match="too hot"):
        generator.evaluate(requests(generator), weights, 0).result(20)
    with pytest.raises(WorkerError, match="too hot"):
        collect(generator, 1)


def test_a_completion_of_an_evaluation_that_is_dropped_is_sampled_again(peer, connect, weights):
    generator = connect(peer)
    start(generator)
    peer.faults["/v1/completions"] = first(2, drop)
    groups = generator.evaluate(requests(generator), weights, 0).result(20)
    np.testing.assert_array_equal([len(group) for group in groups], [2] * 4)
    assert generator.restarts == 0
