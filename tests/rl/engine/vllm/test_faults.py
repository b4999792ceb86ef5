"""Servers that are slow, full, dead or not what they should be: a peer over HTTP that is so on purpose."""

import re
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
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

from scalerl.errors import InputError, WorkerError
from scalerl.rl.config.engine import Vllm
from scalerl.rl.engine.vllm import server_pool
from scalerl.rl.engine.vllm.launch import environment, find_python


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
