"""Workers of vLLM that tests start on this machine, and the base model that they serve."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from scalerl.rl.config.engine import Vllm
from scalerl.rl.engine.vllm.launch import VENV, Servers
from scalerl.rl.engine.vllm.server_state import ServerState
from scalerl.rl.model.demo_base import BaseModel, build_base
from scalerl.rl.sync.vllm_client import VllmClient
from scalerl.rl.tasks.chain import Chain, Demonstrations
from scalerl.rl.workers.backend import Backend, WorkerProcess, message

PYTHON = Path(__file__).parents[2] / VENV / "bin" / "python"
SETTINGS = Vllm(python=str(PYTHON), arguments=("--block-size", "32"))
POSITIONS = 384
needs_vllm = [
    pytest.mark.slow,
    # A connection that is cut off as its server is killed may be left to the garbage collector to close.
    pytest.mark.filterwarnings("ignore:Exception ignored in.*socket:pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: make vllm"),
]


class Borrowed(Backend):
    """The worker of another generator, which starts and stops it, and in whose loop its calls are."""

    def __init__(self, generator):
        self._server, self._loop = generator._servers[0], generator._pool._loop

    def place(self, flags, folder):
        """See `scalerl.rl.engine.vllm.launch.Place`."""
        return Servers(replace(SETTINGS, request_seeds=True), [ServerState(self._server.name, 0)], self)

    def spawn(self, name, number, target, *arguments):
        """Take it as it is."""
        return BorrowedWorker(self._server, self._loop)


class BorrowedWorker(WorkerProcess, VllmClient):
    """See `Borrowed`."""

    def __init__(self, server, loop):
        self.name, self._server, self._loop, self._came = server.name, server, loop, [message("started")]

    async def call(self, method, *arguments, seconds):
        """As the worker's own generator would."""
        called = self._server.call(method, *arguments, seconds=seconds)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(called, self._loop))

    def send(self, message):
        """It is called instead."""

    def receive(self):
        """It is there."""
        came, self._came = self._came, []
        return came

    def kill(self):
        """It goes on."""


def build(folder):
    """The base model of the demonstration, but for two heads of 32: vLLM's CPU kernels have none of 16."""
    spec = BaseModel(
        Demonstrations(Chain(k_max=2, heldout_per_length=40), 4),
        heads=2,
        positions=POSITIONS,
        max_careful_steps=400,
        imperfect_steps=60,
        careful_loss=0.1,
    )
    return str(build_base(spec, folder))
