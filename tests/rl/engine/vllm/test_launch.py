"""Calls to a worker of vLLM: their answers, and what becomes of them where it refuses, exits or hangs."""

import asyncio
import os
import queue
import sys
import time
from pathlib import Path

import echoing
import pytest
from echoing import ended, is_running

import scalerl
from scalerl.errors import WorkerError
from scalerl.rl.config.engine import Vllm
from scalerl.rl.engine.generator import Sampling
from scalerl.rl.engine.vllm import server_pool
from scalerl.rl.engine.vllm.launch import Servers
from scalerl.rl.engine.vllm.requirements import Requirements
from scalerl.rl.engine.vllm.server_pool import ServerPool
from scalerl.rl.engine.vllm.server_state import Installed, Restarted, ServerState
from scalerl.rl.workers.backend import WorkerLostError
from scalerl.rl.workers.processes import FreshPython

PATHS = Path(scalerl.__file__).parents[1], Path(echoing.__file__).parent
LONG = 60.0


class WithoutVllm(FreshPython):
    """Starts a worker that does something else."""

    def __init__(self, target, logs, gpus):
        super().__init__(sys.executable, {"PYTHONPATH": os.pathsep.join(map(str, PATHS))}, logs, gpus)
        self._instead = target

    def spawn(self, name, number, target, *arguments):
        return super().spawn(name, number, self._instead, *arguments)


class Kept:
    """A worker that a pool keeps."""

    def __init__(self, target, folder, weights, rule, gpus, start_seconds):
        backend, self.events = WithoutVllm(target, folder, gpus), queue.SimpleQueue()
        self.server = ServerState(
            "vLLM worker 0",
            0,
            start_timeout=start_seconds,
            log=backend.log(0),
            arguments=["--one"],
        )
        self.pool = ServerPool(
            Servers(Vllm(), [self.server], backend, gpus),
            Sampling(1.0, True, 0, 24, rule, 1),
            Requirements(None, (), {}, 66, "float32", True, 8),
            "train",
            folder,
            weights,
            0,
            self.events.put,
        )

    @property
    def pid(self):
        return self.server.process.pid if self.server.process else None

    def next(self, kind):
        """The next event, which is of this kind."""
        event = self.events.get(timeout=LONG)
        assert isinstance(event, kind), event
        return event

    def begin(self, method, *arguments, seconds=LONG):
        called = self.server.call(method, *arguments, seconds=seconds)
        return asyncio.run_coroutine_threadsafe(called, self.pool._loop)

    def call(self, method, *arguments, seconds=LONG):
        return self.begin(method, *arguments, seconds=seconds).result(LONG)


@pytest.fixture
def keep(weights, rule, tmp_path, monkeypatch):
    """A function that has a worker kept; it ends with the test."""
    kept = []

    async def check_server(*wanted):
        return 0

    monkeypatch.setattr(server_pool, "check_server", check_server)

    def make(target, gpus=(), start_seconds=LONG):
        kept.append(Kept(target, tmp_path, weights, rule, gpus, start_seconds))
        return kept[-1]

    yield make
    for one in kept:
        one.pool.close()
        assert not one.pool._thread.is_alive()


def test_calls_are_answered_refused_and_lost_with_their_worker(keep, tmp_path):
    kept = keep(echoing.answer)
    kept.next(Installed)
    first = kept.pid
    answers = [kept.begin("square", n) for n in range(3)]
    assert [one.result(LONG) for one in answers] == [
        ("square", n, str(tmp_path), ["--one"]) for n in range(3)
    ]
    with pytest.raises(WorkerError, match="vLLM worker 0: as asked") as refused:
        kept.call("refuse", False)
    assert not isinstance(refused.value, WorkerLostError)
    with pytest.raises(WorkerLostError, match="vLLM worker 0: as asked"):
        kept.call("refuse", True)
    with pytest.raises(WorkerLostError, match=r"ignore took longer than 0.1 s"):
        kept.call("ignore", seconds=0.1)
    calls = [kept.begin(method) for method in ("ignore", "exit", "ignore")]
    assert ["status 3" in str(call.exception(LONG)) for call in calls] == [True] * 3
    assert kept.pid is None
    with pytest.raises(WorkerLostError, match="vLLM worker 0 is not started"):
        kept.call("square", 1)
    assert "status 3 (its log says nothing of why)" in kept.next(Restarted).why
    kept.next(Installed)
    assert kept.call("square", 4)[1] == 4
    second = kept.pid
    kept.pool.close()
    assert ended(first)
    assert ended(second)


def test_a_restart_has_the_cache_that_the_first_start_has_measured(keep):
    """What the trainer takes of the GPU by then is not measured as the worker's."""
    sized = ["--kv-cache-memory-bytes", str(echoing.CACHE), "--gpu-memory-utilization", "0.01"]
    kept = keep(echoing.answer, gpus=("5",))
    kept.server.proven = True
    for more in ([], sized, sized):
        kept.next(Installed)
        assert kept.server.gpus == (0,)
        assert kept.call("square", 2)[3] == ["--one", *more]
        kept.begin("exit")
        kept.next(Restarted)


def test_one_that_never_starts_is_given_up_and_killed(keep, tmp_path):
    kept = keep(echoing.load, start_seconds=1.0)
    while (pid := kept.pid) is None:
        time.sleep(0.01)
    assert is_running(pid)
    assert str(kept.next(WorkerError)) == (
        "vLLM worker 0 is lost: it has not started within 1 s (its log says nothing of why): the server "
        f"failed; its log is {tmp_path / 'vllm-0.log'}"
    )
    assert ended(pid)


def test_one_that_is_lost_again_before_it_has_completed_anything_ends_the_run(keep):
    kept = keep(echoing.answer)
    kept.next(Installed)
    kept.begin("exit")
    kept.next(Restarted)
    kept.next(Installed)
    kept.begin("exit")
    assert "status 3 (its log says nothing of why): the server failed 2 times in a row; its log is" in str(
        kept.next(WorkerError)
    )
    assert kept.pid is None


def test_a_call_that_is_cancelled_as_its_answer_arrives_is_cancelled(keep):
    """Who cancels it has dealt with the loss: its task must not report that once more."""
    kept = keep(echoing.answer)
    kept.next(Installed)
    server, found = kept.server, []

    async def main():
        call = asyncio.create_task(server.call("ignore", seconds=LONG))
        await asyncio.sleep(0)
        server.settle(next(reversed(server.calls)), WorkerLostError("lost"))
        call.cancel()
        found.extend(await asyncio.gather(call, return_exceptions=True))

    asyncio.run_coroutine_threadsafe(main(), kept.pool._loop).result(LONG)
    assert isinstance(found[0], asyncio.CancelledError)
