"""Calls to a worker of vLLM: their answers, and what becomes of them where it refuses, exits or hangs."""

import asyncio
import os
import sys
from pathlib import Path

import echoing
import pytest
from echoing import ended, is_running

import scalerl
from scalerl.errors import WorkerError
from scalerl.rl.engine.vllm.launch import WorkerClient
from scalerl.rl.sync.vllm_client import ServerLostError
from scalerl.rl.workers.processes import FreshPython

PATHS = Path(scalerl.__file__).parents[1], Path(echoing.__file__).parent
LONG = 60.0


class WithoutVllm(FreshPython):
    """Starts a worker that does something else."""

    def __init__(self, target, logs):
        super().__init__(sys.executable, {"PYTHONPATH": os.pathsep.join(map(str, PATHS))}, logs)
        self._instead = target

    def spawn(self, name, number, target, *arguments):
        return super().spawn(name, number, self._instead, *arguments)


def client_of(target, folder, gpus=()):
    backend = WithoutVllm(target, folder)
    return WorkerClient(0, backend, folder, ["--one"], gpus)


def test_calls_are_answered_refused_and_lost_with_their_worker(tmp_path):
    async def main():
        client = client_of(echoing.answer, tmp_path)
        await client.reach(LONG)
        first = client.pid
        answers = [client.call("square", n, seconds=LONG) for n in range(3)]
        assert await asyncio.gather(*answers) == [("square", n, str(tmp_path), ["--one"]) for n in range(3)]
        with pytest.raises(WorkerError, match="vLLM worker 0: as asked"):
            await client.call("refuse", False, seconds=LONG)
        with pytest.raises(ServerLostError, match="vLLM worker 0: as asked"):
            await client.call("refuse", True, seconds=LONG)
        with pytest.raises(ServerLostError, match=r"ignore took longer than 0.1 s"):
            await client.call("ignore", seconds=0.1)
        calls = [client.call(method, seconds=LONG) for method in ("ignore", "exit", "ignore")]
        lost = await asyncio.gather(*calls, return_exceptions=True)
        assert ["status 3" in str(error) for error in lost] == [True] * 3
        assert client.pid is None
        with pytest.raises(ServerLostError, match="status 3"):
            await client.call("square", 1, seconds=LONG)
        client.kill()
        await client.reach(LONG)
        assert (await client.call("square", 4, seconds=LONG))[1] == 4
        second = client.pid
        await client.close()
        assert ended(first)
        assert ended(second)

    asyncio.run(main())


def test_a_restart_has_the_cache_that_the_first_start_has_measured(tmp_path):
    """What the trainer takes of the GPU by then is not measured as the worker's."""
    sized = ["--kv-cache-memory-bytes", str(echoing.CACHE), "--gpu-memory-utilization", "0.01"]

    async def main():
        client = client_of(echoing.answer, tmp_path, gpus=(0,))
        for more in ([], sized, sized):
            await client.reach(LONG)
            assert (await client.call("square", 2, seconds=LONG))[3] == ["--one", *more]
            client.kill()

    asyncio.run(main())


def test_one_that_never_starts_is_given_up_and_killed(tmp_path):
    async def main():
        client = client_of(echoing.load, tmp_path)
        with pytest.raises(ServerLostError, match="vLLM worker 0: its start took longer"):
            await client.reach(0.5)
        pid = client.pid
        assert is_running(pid)
        await client.close()
        assert ended(pid)

    asyncio.run(main())


def test_a_call_that_is_cancelled_as_its_answer_arrives_is_cancelled(tmp_path):
    """Who cancels it has dealt with the loss: its task must not report that once more."""

    async def main():
        client = client_of(echoing.answer, tmp_path)
        await client.reach(LONG)
        call = asyncio.create_task(client.call("ignore", seconds=LONG))
        await asyncio.sleep(0)
        number = next(reversed(client._calls))
        client._calls[number].set_exception(ServerLostError("lost"))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await client.close()

    asyncio.run(main())
