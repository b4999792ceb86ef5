"""Weights that servers install: their versions, their buckets, and those that are lost on the way."""

import threading
import time
from itertools import islice
from pathlib import Path

import pytest
import torch
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
from safetensors.torch import load_file

from scalerl.errors import LearnerLostError
from scalerl.rl.model.causal_lm import load_model
from scalerl.rl.model.weights import weights_of
from scalerl.rl.sync import vllm_weights


def test_an_update_marks_what_had_begun_and_calls_back_what_had_not(peer, connect, weights):
    generator = connect(peer, slots=2, request_seeds=True)
    peer.held.clear()
    submit(generator, PROMPTS[:1])
    while len(peer.bodies) < 2:
        pass
    begun, other = (body["request_id"] for body in peer.bodies)
    peer.begun = {f"cmpl-{begun}-0-1a2b3c4d": 3}
    generator.update(weights, 1)
    while generator.installed < 1:
        generator.work()
    peer.held.set()
    ((*rollouts,),) = collect(generator, 1)
    by_name = {body["request_id"]: body for body in peer.bodies}
    assert peer.aborted == {f"cmpl-{other}-0"}
    (again,) = by_name.keys() - {begun, other}
    assert by_name[again]["seed"] == by_name[other]["seed"]
    assert by_name[again]["cache_salt"] != by_name[other]["cache_salt"] == by_name[begun]["cache_salt"]
    marked = {r.first_version: r.version_T.tolist() for r in rollouts}
    assert marked == {0: [0, 0, 0, 1], 1: [1, 1, 1, 1]}
    assert generator.counters.restarted == 0


def test_versions_that_are_overtaken_are_passed_over_and_their_files_removed(
    peer, connect, weights, tmp_path
):
    peer.faults["/collective_rpc"] = first(2, slow(0.3))
    generator = connect(peer)
    for version in (1, 2, 3):
        generator.update(weights, version)
    while generator.installed < 3:
        generator.work()
    assert len(peer.loaded) <= 3
    assert peer.loaded[-1].endswith("version-3")
    submit(generator)
    collect(generator, 4)
    assert [path.name for path in tmp_path.rglob("version-*")] == ["version-3"]


def test_two_servers_share_the_work_and_the_slower_one_bounds_the_version(peer, connect, tokenizer, weights):
    other = FaultyServer(tokenizer, TOKENS)
    try:
        generator = connect(peer, other, slots=2)
        while generator.installed < 0:
            generator.work()
        submit(generator)
        collect(generator, 4)
        assert len(peer.bodies) + len(other.bodies) == 8
        assert min(len(peer.bodies), len(other.bodies)) >= 2
        other.faults["/pause"] = first(1, slow(0.5))
        generator.update(weights, 1)
        seen = set()
        while 1 not in seen:
            seen.add(generator.installed)
        assert seen == {0, 1}
    finally:
        other.close()


class OnLoan:
    """Weights that are elsewhere: so many of them can be had."""

    def __init__(self, weights, left):
        self.plan, self._weights, self._left = weights.plan, weights, left

    def __iter__(self):
        yield from islice(self._weights, self._left)
        if self._left < len(self.plan):
            raise LearnerLostError("the process that put them has died")


def test_weights_travel_bucket_by_bucket_in_their_own_dtype(
    peer, connect, llama_folder, tmp_path, monkeypatch
):
    weights = weights_of(load_model(llama_folder, torch.bfloat16))
    first, second, *_ = (weight.nbytes for _, weight in weights)
    whole = vllm_weights.in_buckets
    monkeypatch.setattr(vllm_weights, "in_buckets", lambda w: whole(w, (first + second) / 2**20))
    generator = connect(peer)
    generator.update(weights, 1)
    while generator.installed < 1:
        generator.work()
    (folder,) = tmp_path.rglob("version-1")
    parts = [load_file(path) for path in sorted(folder.iterdir())]
    assert len(parts) > 1
    assert len(parts[0]) == 2
    found = {name: weight for part in parts for name, weight in part.items()}
    assert len(found) == sum(map(len, parts)) == len(weights.plan)
    for name, weight in weights:
        assert found[name].dtype == torch.bfloat16
        assert torch.equal(found[name], weight)
    assert "_weights" not in vars(generator._pool._queue.weights)  # they are let go of


def test_a_server_that_dies_as_its_weights_are_written_finds_them_written_once(
    peer, connect, tokenizer, weights, tmp_path, monkeypatch
):
    generator = connect(peer, slots=2)
    submit(generator, PROMPTS[:1])
    collect(generator, 1)
    peer.held.clear()
    submit(generator, PROMPTS[1:2])
    while len(peer.bodies) < 4:
        pass
    writing, written, whole = threading.Event(), [], vllm_weights.in_buckets

    def slowly(weights):
        writing.set()
        time.sleep(2.0)
        written.append(weights)
        return whole(weights)

    monkeypatch.setattr(vllm_weights, "in_buckets", slowly)
    generator.update(weights, 1)
    assert writing.wait(20)
    with died(peer, generator, tokenizer) as revived:
        assert not written
        (group,) = collect(generator, 1)
        assert {rollout.first_version for rollout in group} == {1}
        assert [Path(path).name for path in revived.loaded] == ["version-1"]
    assert len(written) == generator.restarts == 1


def test_weights_are_those_of_their_version_though_the_learner_goes_on(peer, connect, weights, tmp_path):
    generator = connect(peer)
    before = {name: weight.clone() for name, weight in weights}
    busy = threading.Event()
    generator._pool._loop.call_soon_threadsafe(busy.wait)  # with an answer of a server, say
    generator.update(weights, 1)
    for _, weight in weights:
        weight.add_(1.0)
    busy.set()
    while generator.installed < 1:
        generator.work()
    (folder,) = tmp_path.rglob("version-1")
    found = {name: weight for path in folder.iterdir() for name, weight in load_file(path).items()}
    assert all(torch.equal(found[name], weight) for name, weight in before.items())


def test_weights_that_went_with_their_learner_send_the_run_back_to_its_checkpoint(peer, connect, weights):
    generator = connect(peer)
    while generator.installed < 0:
        generator.work()
    generator.update(OnLoan(weights, 1), 1)
    with pytest.raises(LearnerLostError, match="that put them has died"):
        collect(generator, 1)
