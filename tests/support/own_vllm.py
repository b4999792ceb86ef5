"""Workers of vLLM that tests start on this machine, and the base model that they serve."""

import asyncio
from pathlib import Path

import pytest

from scalerl.rl.config.engine import Vllm
from scalerl.rl.engine.vllm.launch import VENV
from scalerl.rl.model.demo_base import BaseModel, build_base
from scalerl.rl.sync.vllm_client import VllmClient
from scalerl.rl.tasks.chain import Chain, Demonstrations

PYTHON = Path(__file__).parents[2] / VENV / "bin" / "python"
SETTINGS = Vllm(python=str(PYTHON), arguments=("--block-size", "32"))
POSITIONS = 384
needs_vllm = [
    pytest.mark.slow,
    # A connection that is cut off as its server is killed may be left to the garbage collector to close.
    pytest.mark.filterwarnings("ignore:Exception ignored in.*socket:pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: make vllm"),
]


class Borrowed(VllmClient):
    """The worker of another generator, which starts and stops it, and in whose loop its calls are."""

    def __init__(self, generator):
        self._client, self._loop = generator._servers[0].client, generator._pool._loop
        self.name, self.pid = self._client.name, self._client.pid

    async def call(self, method, *arguments, seconds):
        """As the worker's own generator would."""
        called = self._client.call(method, *arguments, seconds=seconds)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(called, self._loop))

    async def reach(self, seconds):
        """It is there."""

    async def close(self):
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
