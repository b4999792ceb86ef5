"""Servers that die, alone or with their node: what was in flight is begun again, and counted."""

import time
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest
from actor_handles import ActorHandle
from faulty_server import (
    PROMPTS,
    TOKENS,
    FaultyServer,
    collect,
    died,
    first,
    slow,
    submit,
)
from ray.exceptions import ActorDiedError

from scalerl.rl.engine.vllm.http_client import HttpServer
from scalerl.rl.engine.vllm.launch import Servers
from scalerl.rl.engine.vllm.server_state import ServerState
from scalerl.rl.workers.backend import Backend
from scalerl.rl.workers.ray.backend import RayActors
from scalerl.rl.workers.timeline import Timeline


def test_a_server_that_dies_is_waited_for_and_has_its_completions_begun_again(peer, connect, tokenizer):
    generator = connect(peer, slots=3, request_seeds=True)
    submit(generator, PROMPTS[:1])
    collect(generator, 1)
    peer.held.clear()
    submit(generator, PROMPTS[1:])
    while len(peer.bodies) < 5:
        pass
    with died(peer, generator, tokenizer) as revived:
        groups = collect(generator, 3)
    assert [group[0].prompt.id for group in groups] == ["p/1", "p/2", "p/3"]
    assert len(revived.loaded) == 1  # the weights of the day, before anything else
    assert generator.restarts == 1
    assert generator.counters.restarted == 2  # three slots held completions of two groups
    again = {body["seed"] for body in revived.bodies}
    assert {body["seed"] for body in peer.bodies[2:]} <= again  # what is begun again draws the same


class DyingNode(Backend):
    """Servers on nodes; after the first is lost, an actor is placed on its node, which is gone."""

    elsewhere = True

    def __init__(self, settings):
        self._settings, self._numbers = settings, count()
        self._actors = RayActors(cast(Any, None), "generators", 20.0)

    def spawn(self, name, number, target, *arguments):
        if next(self._numbers) == 1:
            return self._actors.process(name, ActorHandle(failed))
        return HttpServer(name, self._settings.urls[number], self._settings)


def failed():
    """What a call of an actor on such a node comes to."""
    call = Future()
    call.set_exception(ActorDiedError())
    return call


@pytest.mark.parametrize(
    ("place", "restarts"),
    [
        (None, 1),
        (
            lambda settings, flags, folder: Servers(
                settings, [ServerState("vLLM worker 0", 0)], DyingNode(settings)
            ),
            2,
        ),
    ],
    ids=["server", "node"],
)
def test_what_dies_before_its_first_completion_is_waited_for_as_one_loss(
    peer, connect, tokenizer, place, restarts
):
    """Where a node has died the next actor may be placed on it as well, before Ray has noticed."""
    generator = connect(peer, slots=2, place=place)
    peer.held.clear()
    submit(generator, PROMPTS[:1])
    while len(peer.bodies) < 2:
        pass
    with died(peer, generator, tokenizer):
        assert [group[0].prompt.id for group in collect(generator, 1)] == ["p/0"]
    assert generator.restarts == restarts


def test_where_a_server_dies_the_others_go_on_and_it_comes_back_with_the_newest_weights(
    peer, connect, tokenizer, weights
):
    other = FaultyServer(tokenizer, TOKENS)
    generator = connect(peer, other, slots=2)
    while generator.installed < 0:
        generator.work()
    submit(generator)
    collect(generator, 4)
    other.close()
    while not generator.restarts:
        generator.work()
    generator.update(weights, 1)
    while generator.installed < 1:  # of those that are there
        generator.work()
    submit(generator)
    collect(generator, 4)
    assert generator.alive == 1
    revived = FaultyServer(tokenizer, TOKENS, other.port)
    try:
        revived.faults["/resume"] = first(1, slow(0.5))
        while not revived.loaded:
            time.sleep(0.01)
        generator.update(weights, 2)  # before that server is up to date: it must not sample by version 1
        while generator.installed < 2:
            generator.work()
        submit(generator)
        collect(generator, 4)
        while generator.alive < 2:
            generator.work()
        submit(generator)
        collect(generator, 4)
    finally:
        revived.close()
    assert [Path(path).name for path in revived.loaded] == ["version-1", "version-2"]
    assert len(revived.bodies) >= 2
    assert {body["cache_salt"].rpartition("-")[2] for body in revived.bodies} == {"2"}


def test_tokens_that_were_lost_with_a_server_are_counted_as_far_as_they_were_seen(
    peer, connect, tokenizer, weights
):
    lines = Timeline()
    generator = connect(peer, slots=2, timeline=lines)
    submit(generator, PROMPTS[:1])
    collect(generator, 1)
    tokens, flops = generator.counters.tokens, generator.counters.flops
    peer.held.clear()
    submit(generator, PROMPTS[1:2])
    while len(peer.bodies) < 4:
        pass
    peer.begun = {f"cmpl-{peer.bodies[2]['request_id']}-0": 3}
    asked = peer.asked["/collective_rpc"]
    while peer.asked["/collective_rpc"] < asked + 2:  # one look after another
        time.sleep(0.01)
    assert generator.counters.tokens == tokens
    with died(peer, generator, tokenizer):
        assert generator.counters.tokens == tokens + 3
        assert generator.counters.flops > flops
        collect(generator, 1)
    assert generator.counters.tokens == 3 + 4 * len(TOKENS)
    assert (len(generator.update_seconds), generator.counters.restarted) == (2, 1)
    came, lost, again, span, _ = lines.lines(1, 0.0, 0.0)
    assert came["event"] == again["event"] == f"vLLM at {peer.url} takes part from version 0"
    assert lost["event"].startswith(f"vLLM at {peer.url} is lost: ")
    assert [line["kind"] for line in (came, lost, again)] == ["arrived", "lost", "arrived"]
    assert {(line["role"], line["who"], line["node"]) for line in (came, lost)} == {
        ("generate", f"vLLM at {peer.url}", "127.0.0.1")
    }
    assert (span["who"], span["node"]) == (f"vLLM at {peer.url}", "127.0.0.1")
    assert 0 < span["busy"] <= span["ended"] - span["began"] + 1e-3
