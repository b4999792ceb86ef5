"""Completions of several turns over servers: each turn is a request, and a lost one costs the turn alone."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from answering import Answering
from faulty_server import PROMPTS, TOKENS, FaultyServer, collect, drop, first, submit

from scalerl.errors import WorkerError
from scalerl.rl.algo.length import LengthRule, Marker
from scalerl.rl.engine.sampling import RequestFactory
from scalerl.rl.engine.vllm.turns import TurnsThread
from scalerl.rl.verify.environment import TaskEnvironment

RULE = LengthRule(40, 10, Marker((2,)))
ANSWERED = [replace(prompt, answer="1 + 2") for prompt in PROMPTS]
"""Every turn is answered by `1 + 2 =`, with as many `=` as there have been turns."""


@pytest.fixture
def environment(tokenizer):
    made = TaskEnvironment(Answering(), tokenizer)
    yield made
    made.close()


@pytest.fixture
def other(tokenizer):
    server = FaultyServer(tokenizer, TOKENS)
    yield server
    server.close()


def read(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def wait_for(condition, seconds=20.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_turn_goes_on_behind_its_answer_as_a_request_of_its_own(peer, connect, environment, tokenizer):
    generator = connect(peer, length=RULE, environment=environment, request_seeds=True)
    submit(generator, ANSWERED[:1])
    ((one, two),) = collect(generator, 1)
    answers = [read(tokenizer, "1 + 2 =" + " =" * n) for n in range(2)]
    for r in (one, two):
        assert r.token_T.tolist() == [*TOKENS, *answers[0], *TOKENS, *answers[1], *TOKENS]
        assert [turn_T.tolist() for turn_T in r.turns] == [TOKENS] * 3
        assert (r.length, r.truncated, r.interrupted, r.first_version) == (12, False, False, 0)
        np.testing.assert_array_equal(r.logp_T, np.where(r.sampled_T, -1, 0))
        assert set(r.version_T.tolist()) == {0}
    bodies = [body for body in peer.bodies if body["prompt"][: len(one.prompt_T)] == one.prompt_T.tolist()]
    prompt, given = one.prompt_T.tolist(), one.token_T.tolist()
    before = [0, 4 + len(answers[0]), 8 + len(answers[0] + answers[1])]
    assert sorted(body["prompt"] for body in bodies) == sorted(2 * [prompt + given[:n] for n in before])
    assert {body["max_tokens"] for body in bodies} == {50 - n for n in before}
    assert len({body["cache_salt"] for body in bodies}) == 1
    assert len({body["seed"] for body in bodies}) == len({body["request_id"] for body in bodies}) == 6
    assert generator.counters.tokens == 24
    one_pass = generator._flop_count.forward
    spent = sum(one_pass(n - 1 + 4, (n + 4) * (n + 3) / 2) for n in (len(prompt) + m for m in before))
    assert generator.counters.flops == pytest.approx(2 * spent)


def test_turns_are_limited_in_number_and_by_what_fits_and_may_fail(peer, connect, environment):
    long, ends, fails = " ".join("9" * 45), "ends", "raises"
    generator = connect(peer, length=RULE, environment=environment)
    submit(generator, [replace(p, answer=a) for p, a in zip(PROMPTS, (long, ends, fails), strict=False)])
    groups = collect(generator, 3)
    assert [[r.truncated for r in group] for group in groups] == [[True] * 2, [False] * 2, [True] * 2]
    assert all(r.token_T.tolist() == TOKENS for group in groups for r in group)
    # The last turn is truncated where its budget ends.
    peer.tokens = [TOKENS[0]] * 50
    submit(generator, ANSWERED[:1], samples=1)
    ((r,),) = collect(generator, 1)
    assert r.truncated
    assert len(r.token_T) == 50


def test_a_turn_that_waits_leaves_its_slot_to_others(peer, connect, environment):
    """Of one slot: the second prompt is complete while the first has its answer under way."""
    generator = connect(peer, slots=1, length=RULE, environment=environment)
    held = threading.Event()
    ask = environment.ask

    def late(prompt, turns):
        answer = ask(prompt, turns)
        if prompt.id != "p/0":
            return answer
        return _Late(answer, held)

    environment.ask = late
    submit(generator, ANSWERED[:2], samples=1)
    while len(generator._complete) < 1:
        generator.work()
    assert list(generator._complete) == [1]
    assert generator.ready == 0
    held.set()
    assert [len(r.turns) for group in collect(generator, 2) for r in group] == [3, 3]


class _Late:
    """An answer that is there once it may be."""

    def __init__(self, answer, held):
        self._answer, self._held = answer, held

    def result(self):
        return self._answer.result()

    @property
    def done(self):
        return self._held.is_set() and self._answer.done


def test_a_lost_server_costs_the_turn_and_no_turn_before_it(peer, other, connect, environment):
    """It dies with second turns, and the other server goes on with these: their first ones stay."""
    generator = connect(peer, other, slots=4, length=RULE, environment=environment)
    while generator.alive < 2:
        generator.work()
    other.held.clear()
    submit(generator, ANSWERED[:2])
    wait_for(lambda: len(other.bodies) == 2)
    other.faults["/v1/completions"] = lambda handler: other.held.clear()
    other.held.set()
    wait_for(lambda: len(other.bodies) == 4)  # the second turns of its two, which it does not complete
    other.close()
    groups = collect(generator, 2)
    assert [[len(r.turns) for r in group] for group in groups] == [[3, 3]] * 2
    fresh = [
        body for body in [*peer.bodies, *other.bodies] if len(body["prompt"]) == len(groups[0][0].prompt_T)
    ]
    assert len(fresh) == 4
    assert len(peer.bodies) == 10  # what it began, and two turns of the other's two
    assert {body["cache_salt"] for body in peer.bodies} == {peer.bodies[0]["cache_salt"]}


def test_turns_of_one_completion_go_to_the_server_that_has_the_first(peer, other, connect, environment):
    generator = connect(peer, other, slots=4, length=RULE, environment=environment)
    while generator.alive < 2:
        generator.work()
    submit(generator, ANSWERED)
    assert [len(r.turns) for group in collect(generator, 4) for r in group] == [3] * 8
    assert len(peer.bodies) == len(other.bodies) == 12


def test_versions_never_fall_within_a_completion(peer, other, connect, environment, tokenizer, weights):
    """What the new weights have sampled does not go on where an evaluation keeps the old ones."""
    generator = connect(peer, other, slots=2, length=RULE, environment=environment)
    while generator.alive < 2:
        generator.work()
    done = threading.Event()
    other.faults["/v1/completions"] = first(1, lambda handler: not done.wait())
    factory = RequestFactory(tokenizer, generator.sampling)
    found = generator.evaluate([factory.requests(i, (PROMPTS[i], 0, 1))[0] for i in range(2)], weights, 0)
    wait_for(lambda: other.asked["/v1/completions"] and peer.bodies)
    generator.update(weights, 1)
    wait_for(lambda: len(peer.loaded) == 2)
    submit(generator, ANSWERED, samples=8)
    rollouts = [r for group in collect(generator, 4) for r in group]
    done.set()
    found.result(20)
    assert {r.first_version for r in rollouts} == {0, 1}
    assert all((np.diff(r.version_T) >= 0).all() for r in rollouts)


def test_a_resume_begins_again_what_waits_for_an_answer(peer, connect, environment):
    first = connect(peer, length=RULE, environment=environment)
    environment.ask = lambda prompt, turns: _Late(None, threading.Event())
    submit(first, ANSWERED)
    wait_for(lambda: len(peer.bodies) == 8 and not first._servers[0].in_flight)
    state = first.state()
    first.close()
    second = connect(peer, length=RULE, environment=TaskEnvironment(Answering(), first.tokenizer))
    second.restore(state)
    assert [len(r.turns) for group in collect(second, 4) for r in group] == [3] * 8
    assert second.counters.restarted == 4


def test_an_evaluation_is_of_one_version_though_its_turns_wait(
    peer, connect, environment, tokenizer, weights
):
    """No server goes on to newer weights while an answer is under way."""
    generator = connect(peer, length=RULE)
    turns = TurnsThread(environment, generator.sampling)
    while generator.installed < 0:
        generator.work()
    held, ask = threading.Event(), environment.ask
    environment.ask = lambda prompt, turns: _Late(ask(prompt, turns), held)
    factory = RequestFactory(tokenizer, replace(generator.sampling, seed=7))
    requests = [r for i, prompt in enumerate(ANSWERED) for r in factory.requests(i, (prompt, 0, 2))]
    found = generator.evaluate(requests, weights, 0, turns)
    wait_for(lambda: len(peer.bodies) == 8 and not generator._servers[0].in_flight)
    generator.update(weights, 1)
    submit(generator, PROMPTS[:1])
    collect(generator, 1)  # of training, beside it
    held.set()
    groups = found.result(20)
    assert [[len(r.turns) for r in group] for group in groups] == [[3, 3]] * 4
    assert {v for group in groups for r in group for v in r.version_T.tolist()} == {0}
    while generator.installed < 1:
        generator.work()
    assert [path.rpartition("/")[2] for path in peer.loaded] == ["version-0", "version-1"]
    seeds = [body["seed"] for body in peer.bodies if body["cache_salt"].startswith("evaluation-")]
    assert len(set(seeds)) == 24
    turns.close()


def test_a_dropped_turn_is_sent_again(peer, connect, environment):
    generator = connect(peer, length=RULE, environment=environment)
    peer.faults["/v1/completions"] = first(3, drop)
    submit(generator, ANSWERED[:1])
    assert [len(r.turns) for group in collect(generator, 1) for r in group] == [3, 3]
    assert generator.restarts == 0


def test_an_environment_whose_processes_do_not_start_ends_the_run(peer, connect, environment):
    def fail(seconds):
        raise WorkerError("the processes that verify do not start")

    generator = connect(peer, length=RULE, environment=environment)
    environment.poll = fail
    submit(generator, ANSWERED[:1])
    with pytest.raises(WorkerError, match="do not start"):
        collect(generator, 1)
