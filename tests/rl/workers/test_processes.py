"""Workers in a Python of their own: what they are sent, and how they and what they have started end."""

import gc
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import echoing
import pytest
from echoing import ended, is_running

import scalerl
from scalerl.rl.workers.backend import WorkerLostError
from scalerl.rl.workers.processes import FreshPython, _GroupLeader

PATHS = Path(scalerl.__file__).parents[1], Path(echoing.__file__).parent


@pytest.fixture
def backend(tmp_path):
    environment = {"PYTHONPATH": os.pathsep.join(map(str, PATHS))}
    return FreshPython(sys.executable, environment, tmp_path, ["0,1", None])


def receive(backend, process):
    until = time.monotonic() + 60
    while time.monotonic() < until:
        backend.wait([process], 0.1)
        if found := process.receive():
            return [(kind, value) for kind, value, _ in found]
    raise AssertionError("it sends nothing")


def test_it_is_sent_messages_and_sends_some(backend, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for number, devices in enumerate(["0,1", None]):
        process = backend.spawn("echo", number, echoing.echo, "hello")
        assert receive(backend, process) == [("started", ("hello", sys.executable, devices))]
        process.send({"a": [1, 2]})
        assert receive(backend, process) == [("echo", {"a": [1, 2]})]
        process.close()
        process.join()
        assert ended(process.pid)


@pytest.mark.parametrize("linux", ["5.3", "4.18"])
@pytest.mark.parametrize("how", ["kill", "close"])
def test_what_it_has_started_ends_with_it(backend, how, linux, monkeypatch):
    if linux == "4.18":
        monkeypatch.delattr(os, "pidfd_open")
    process = backend.spawn("echo", 0, echoing.echo, "hello")
    receive(backend, process)
    process.send("sleep")
    ((_, child),) = receive(backend, process)
    assert is_running(child)
    getattr(process, how)()
    process.join()
    assert ended(child)


def test_one_that_does_not_end_by_itself_is_killed(backend):
    process = backend.spawn("stay", 0, echoing.stay)
    receive(backend, process)
    process.close(0.2)
    process.join()
    assert ended(process.pid)


@pytest.mark.parametrize(("message", "says"), [("exit", "exited with status 3"), (None, "killed by SIGKILL")])
def test_a_lost_one_says_how_it_ended_and_the_next_is_not_concerned(backend, message, says):
    process = backend.spawn("echo", 0, echoing.echo, "hello")
    receive(backend, process)
    if message:
        process.send(message)
    else:
        os.killpg(process.pid, signal.SIGKILL)
    with pytest.raises(WorkerLostError, match=says):
        receive(backend, process)
    process.kill()
    following = backend.spawn("echo", 0, echoing.echo, "again")
    del process
    gc.collect()  # which closes what the first had open
    time.sleep(0.5)
    assert receive(backend, following)[0][0] == "started"
    following.send("here")
    assert receive(backend, following) == [("echo", "here")]
    following.kill()


def test_an_error_is_in_its_log_and_reported(backend, tmp_path):
    process = backend.spawn("echo", 1, echoing.echo, "hello")
    receive(backend, process)
    process.send("fail")
    ((kind, why),) = receive(backend, process)
    assert (kind, why) == ("lost", "ValueError: as asked")
    process.kill()
    assert "ValueError: as asked" in (tmp_path / "vllm-1.log").read_text()


def test_threads_may_ask_at_once_whether_it_has_ended():
    """One of them waits for the process, and the others find it gone."""
    for _ in range(60):
        leader = _GroupLeader(subprocess.Popen(["true"], start_new_session=True))
        with ThreadPoolExecutor(4) as threads:
            asked = [threads.submit(leader.join) for _ in range(4)]
        assert [one.result() for one in asked] == [None] * 4
        assert leader.exitcode == 0
