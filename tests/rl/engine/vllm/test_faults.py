"""Servers that are slow, full, dead or not what they should be: a peer over HTTP that is so on purpose."""

import re
import resource
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from faulty_server import (
    DIGIT,
    PROMPTS,
    TOKENS,
    FaultyServer,
    after,
    collect,
    drop,
    first,
    slow,
    status,
    submit,
)
from ray.exceptions import ActorDiedError
from safetensors.torch import load_file

from scalerl.errors import InputError, LearnerLostError, WorkerError
from scalerl.rl.config.engine import Vllm
from scalerl.rl.engine.vllm import server_pool
from scalerl.rl.engine.vllm.http_client import HttpServer
from scalerl.rl.engine.vllm.launch import Servers, environment, find_python
from scalerl.rl.engine.vllm.server_state import ServerState
from scalerl.rl.model.causal_lm import load_model
from scalerl.rl.model.weights import weights_of
from scalerl.rl.sync import vllm_weights
from scalerl.rl.workers.backend import Backend
from scalerl.rl.workers.ray.backend import RayActors
from scalerl.rl.workers.timeline import Timeline


def refusal(generator):
    """What the generator says once it cannot go on; it says it again."""
    with pytest.raises(WorkerError) as refused:
        collect(generator, 1)
    with pytest.raises(WorkerError) as again:
        generator.installed  # noqa: B018
    assert str(again.value) == str(refused.value)
    return str(refused.value)


def test_groups_come_back_in_order_with_what_was_sampled(peer, connect):
    generator = connect(peer)
    submit(generator)
    assert generator.in_flight == 4
    groups = collect(generator, 4)
    assert [group[0].prompt.id for group in groups] == ["p/0", "p/1", "p/2", "p/3"]
    assert [rollout.sample for group in groups for rollout in group] == [0, 1] * 4
    for rollout in (rollout for group in groups for rollout in group):
        assert rollout.token_T.tolist() == TOKENS
        assert not rollout.interrupted
        assert not rollout.truncated
    assert generator.in_flight == 0
    assert generator.counters.tokens == 8 * len(TOKENS)
    assert not any("seed" in body for body in peer.bodies)


@pytest.mark.parametrize(
    ("path", "fault", "says"),
    [
        ("/v1/models", status(401, {"error": "Unauthorized"}), r"refuses the API key \(401\): set \$SCALERL"),
        (
            "/v1/models",
            status(200, "<html>It works!</html>"),
            r"no JSON \('<html>It works!</html>'\): is it vLLM",
        ),
        ("/v1/models", status(200, {"models": []}), "not a vLLM server"),
        ("/v1/models", status(404, "Not Found"), "has no /v1/models .*: not vLLM, or without"),
        ("/tokenize", status(200, {"tokens": [0, 0]}), "served has another tokenizer"),
        ("/is_paused", status(404, {"detail": "Not Found"}), "has no /is_paused .*VLLM_SERVER_DEV_MODE=1"),
        (
            "/collective_rpc",
            status(500, {"error": {"message": "no such name"}}),
            "no such name: start it with --worker-ext",
        ),
        (
            "/collective_rpc",
            status(200, {"results": "yes"}),
            "'yes'.* from /collective_rpc: not our extension",
        ),
        ("/v1/completions", status(400, {"error": {"message": "too hot"}}), r"refuses .* \(400\): too hot"),
        (
            "/v1/completions",
            status(404, {"error": {"message": "no model"}}),
            "has no /v1/completions .no model",
        ),
        ("/v1/completions", status(200, "{"), "no JSON"),
        ("/v1/completions", status(200, {"choices": []}), "no tokens in its answer"),
        ("/v1/completions", drop, "the server failed"),
    ],
)
def test_a_server_that_is_not_what_it_should_be_is_named_with_what_is_wrong(peer, connect, path, fault, says):
    peer.faults[path] = fault
    generator = connect(peer)
    submit(generator)
    text = refusal(generator)
    assert text.startswith(f"vLLM at {peer.url}")
    assert re.search(says, text)


def test_a_server_whose_weights_fail_is_not_left_paused(peer, connect):
    peer.faults["/collective_rpc"] = after(1, status(500, "boom"))
    assert re.search("boom.*could not be installed", refusal(connect(peer)))
    assert peer.asked["/pause"] == peer.asked["/resume"] == 1


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("dtype", "bfloat16", "--dtype float32 (it has bfloat16)"),
        ("head_dtype", "bfloat16", '--hf-overrides \'{"head_dtype": "float32"}\''),
        ("logprobs_mode", "raw_logprobs", "--logprobs-mode processed_logprobs"),
        ("max_num_seqs", 7, "--max-num-seqs 8 (it has 7)"),
        ("v2_model_runner", True, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ("length_control", False, "--logits-processors scalerl.rl.engine.vllm.served:LengthProcessor"),
        (
            "data_parallel",
            2,
            "--data-parallel-size 1 (a server for each instead: an update pauses one engine)",
        ),
    ],
)
def test_a_server_that_was_started_otherwise_is_told_how(peer, connect, flag, value, says):
    peer.flags[flag] = value
    assert refusal(connect(peer)) == f"vLLM at {peer.url}: start it with {says}"


def test_a_server_of_another_model_is_refused_before_it_is_touched(peer, connect):
    peer.flags["shape"] = {"hidden_size": 32, "num_hidden_layers": 3}
    text = refusal(connect(peer))
    assert "serves another model ({'num_hidden_layers': 3}, and {'num_hidden_layers': 2} here)" in text
    assert not peer.asked["/pause"]


def test_a_model_that_is_too_short(peer, connect):
    peer.longest = 30
    assert "takes 30 tokens, the recipe needs 66" in refusal(connect(peer))


def test_a_server_without_the_length_control_is_found_out(peer, connect):
    peer.tokens = [DIGIT] * 45
    generator = connect(peer)
    submit(generator)
    assert "--logits-processors" in refusal(generator)


def test_a_server_that_is_full_is_asked_again(peer, connect):
    peer.faults["/v1/completions"] = first(5, status(429, "full"))
    peer.faults["/pause"] = first(2, status(503, "starting"))
    generator = connect(peer)
    submit(generator)
    assert len(collect(generator, 4)) == 4
    assert peer.asked["/v1/completions"] == 13
    assert peer.asked["/pause"] == 3
    assert generator.counters.restarted == 0


def test_a_server_that_stays_full_is_given_up(peer, connect):
    peer.faults["/v1/completions"] = status(503, "full")
    generator = connect(peer, request_seconds=0.5)
    submit(generator)
    assert "full for 0.5 s (503)" in refusal(generator)


def test_a_server_that_is_too_slow_is_given_up_by_the_time_it_had(peer, connect):
    peer.faults["/v1/completions"] = slow(1.0)
    generator = connect(peer, request_seconds=0.2)
    submit(generator)
    assert "/v1/completions took longer than 0.2 s" in refusal(generator)


def test_a_dropped_connection_to_a_server_that_is_well_costs_nothing(peer, connect):
    peer.faults["/v1/completions"] = first(3, drop)
    generator = connect(peer)
    submit(generator)
    assert len(collect(generator, 4)) == 4
    assert (generator.restarts, generator.counters.restarted) == (0, 0)


def test_two_servers_of_one_seed_are_refused_where_completions_have_none_of_their_own(
    peer, connect, tokenizer
):
    """Their first completions would be the same."""
    twin = FaultyServer(tokenizer, TOKENS)
    try:
        twin.flags["seed"] = peer.flags["seed"]
        assert re.search(
            f"has the --seed of vLLM at .* .{twin.flags['seed']}.: start each with another",
            refusal(connect(peer, twin)),
        )
        generator = connect(peer, twin, request_seeds=True)
        submit(generator)
        collect(generator, 4)
        seeds = [body["seed"] for body in [*peer.bodies, *twin.bodies]]
        assert len(set(seeds)) == 8
        assert all(isinstance(seed, int) for seed in seeds)
    finally:
        twin.close()


@contextmanager
def died(peer, generator, tokenizer):
    """The server has ended, which the generator knows, and another is in its place."""
    peer.close()
    while generator.installed != -1:
        generator.work()
    revived = FaultyServer(tokenizer, TOKENS, peer.port)
    try:
        yield revived
    finally:
        revived.close()


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


def test_a_server_that_dies_before_its_first_completion_is_waited_for_once(peer, connect, tokenizer):
    generator = connect(peer, slots=2)
    peer.held.clear()
    submit(generator, PROMPTS[:1])
    while len(peer.bodies) < 2:
        pass
    with died(peer, generator, tokenizer):
        assert [group[0].prompt.id for group in collect(generator, 1)] == ["p/0"]
    assert generator.restarts == 1


class DyingNode(Backend):
    """Servers on nodes; after the first is lost, an actor is placed on its node, which is gone."""

    elsewhere = True

    def __init__(self, settings):
        self._settings, self._numbers = settings, count()
        self._actors = RayActors(cast(Any, None), "generators", 20.0)

    def spawn(self, name, number, target, *arguments):
        if next(self._numbers) == 1:
            return self._actors.process(name, Gone())
        return HttpServer(name, self._settings.urls[number], self._settings)


class Gone:
    """An actor whose calls fail."""

    def __getattr__(self, name):
        return self

    def remote(self, *args):
        return self

    def future(self):
        failed = Future()
        failed.set_exception(ActorDiedError())
        return failed


def test_a_node_that_dies_before_the_first_completion_is_one_loss(peer, connect, tokenizer):
    """The next actor may be placed on it as well, before Ray has noticed."""
    generator = connect(
        peer,
        slots=2,
        place=lambda settings, flags, folder: Servers(
            settings, [ServerState("vLLM worker 0", 0)], DyingNode(settings)
        ),
    )
    peer.held.clear()
    submit(generator, PROMPTS[:1])
    while len(peer.bodies) < 2:
        pass
    with died(peer, generator, tokenizer):
        assert [group[0].prompt.id for group in collect(generator, 1)] == ["p/0"]
    assert generator.restarts == 2


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


def test_a_resume_begins_again_what_was_in_flight(peer, connect):
    generator = connect(peer, slots=4)
    submit(generator, PROMPTS[:2])
    while generator.ready < 2:
        generator.work()
    peer.held.clear()
    submit(generator, PROMPTS[2:])
    state = generator.state()
    peer.held.set()
    resumed = connect(peer, slots=4)
    resumed.restore(state)
    assert (resumed.ready, resumed.in_flight) == (2, 4)
    groups = collect(resumed, 4)
    assert [group[0].prompt.id for group in groups] == [prompt.id for prompt in PROMPTS]
    assert resumed.counters.restarted == 2
    np.testing.assert_array_equal(groups[0][0].token_T, TOKENS)


def test_more_connections_than_a_shell_allows_are_made_room_for(peer, connect):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    peer.flags["max_num_seqs"] = 1000
    try:
        generator = connect(peer, slots=1000)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(2024, before[1])
        submit(generator)
        assert len(collect(generator, 4)) == 4
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_no_key_and_nobody_there(connect, peer, monkeypatch):
    monkeypatch.setenv("SCALERL_VLLM_API_KEY", "wrong")
    assert "refuses the API key (401): set $SCALERL_VLLM_API_KEY" in refusal(connect(peer))
    peer.close()
    generator = connect(peer, start_seconds=0.2)
    assert "were waited for it" in refusal(generator)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"urls": ("localhost:8000",)}, "urls must begin with http"),
        ({"urls": ("http:///v1",)}, "urls must begin with http"),
        ({"urls": ("http://a:8000", "http://a:8000/v1/")}, "urls must be of different servers"),
        ({"urls": ("http://a:8000",), "transport": "ipc"}, "ipc. is for workers on this machine"),
        ({"tensor_parallel": 0}, "tensor_parallel must be at least 1"),
        ({"gpu_memory": 1.5}, "gpu_memory"),
        ({"request_seconds": 0}, "request_seconds"),
    ],
)
def test_settings_out_of_range(changes, says):
    with pytest.raises(ValueError, match=says):
        Vllm(**changes)


def test_the_address_of_a_server_may_be_that_of_its_interface(peer, connect):
    """As other clients of such servers are given it: with /v1."""
    peer.url += "/v1/"
    generator = connect(peer)
    submit(generator)
    assert len(collect(generator, 4)) == 4


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


def test_a_worker_finds_scalerl_and_nothing_else_of_the_environment(tmp_path):
    """Installed beside torch and transformers, it would bring the trainer's along."""
    path, again = (environment(tmp_path / "path", Vllm(), "m", gpus=False)["PYTHONPATH"] for _ in range(2))
    assert [child.name for child in Path(path).iterdir()] == ["scalerl"]
    assert again == path
    code = "import scalerl.rl.engine.vllm.worker, sys; print(scalerl.__file__)"
    code += "; assert not {'torch', 'pydantic', 'transformers'} & set(sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert found.stdout.startswith(path)


def test_without_vllm_it_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SCALERL_VLLM_PYTHON", raising=False)
    with pytest.raises(InputError, match="make vllm"):
        find_python(Vllm())
    with pytest.raises(InputError, match="nowhere"):
        find_python(Vllm(python="/nowhere/bin/python"))


def test_an_error_in_the_task_of_a_completion_ends_the_run(peer, connect, monkeypatch):
    def completed_of(*args):
        raise ZeroDivisionError("nobody has thought of this")

    monkeypatch.setattr(server_pool, "completed_of", completed_of)
    generator = connect(peer)
    generator.submit(PROMPTS[0], 0, 1)
    with pytest.raises(WorkerError, match="cannot go on: ZeroDivisionError: nobody has thought of this"):
        collect(generator, 1)
