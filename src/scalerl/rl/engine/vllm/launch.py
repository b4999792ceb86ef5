"""Workers of vLLM that are started on this machine (`scalerl.rl.engine.vllm.worker` runs in them): their
Python, environment, arguments and GPUs; and the calls to them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from scalerl.errors import InputError, WorkerError
from scalerl.rl.config.devices import gpus_of_workers
from scalerl.rl.config.engine import Vllm
from scalerl.rl.engine.vllm.worker import serve
from scalerl.rl.model.causal_lm import gpus_in_use
from scalerl.rl.sync.ipc_buffers import unshareable_memory
from scalerl.rl.sync.vllm_client import ServerLostError, VllmClient
from scalerl.rl.workers.backend import CLOSING, STARTING, WorkerLostError
from scalerl.rl.workers.processes import ChildProcess, FreshPython

VENV = Path(".vllm-venv")
"""Where `make vllm` puts it."""
_ERROR = re.compile(r"\w*(?:Error: |Value error, ).+")


def find_python(settings: Vllm) -> str:
    """Return the Python of the environment that has vLLM.

    Raises:
        InputError: there is none.
    """
    named = settings.python or os.environ.get("SCALERL_VLLM_PYTHON", "")
    python = Path(named).expanduser() if named else VENV / "bin" / "python"
    if not named and not python.exists() and find_spec("vllm"):
        return sys.executable
    if not os.access(python, os.X_OK):
        raise InputError(
            f'no vLLM: {python} is no Python (make vllm sets up .vllm-venv; python = "..." in the engine\'s '
            "settings, or $SCALERL_VLLM_PYTHON, names another environment)"
        )
    return str(python.absolute())


def environment(folder: Path, settings: Vllm, model_folder: str, gpus: bool) -> dict[str, str]:
    """Return what a worker has in its environment besides what this process has.

    `folder` is made a place to import scalerl from, and nothing else: an installed package lies beside all
    others of the trainer's environment, which differ from those of vLLM's.
    """
    folder.mkdir(exist_ok=True)
    with suppress(FileExistsError):
        (folder / "scalerl").symlink_to(Path(__file__).parents[3])
    found = {
        "PYTHONPATH": str(folder),
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the worker extension reads the requests of the first
        # Its processes talk over the loopback, which no other machine reaches.
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOOPBACK_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        # Of handles to memory of a GPU, which come from this process alone.
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1" if settings.transport == "ipc" else "0",
        "HF_HUB_OFFLINE": "1" if Path(model_folder).is_dir() else os.environ.get("HF_HUB_OFFLINE", "0"),
    }
    if gpus:
        return found
    return found | {
        "VLLM_CPU_KVCACHE_SPACE": str(settings.cpu_cache_gib),
        # Else every worker binds its threads to the same first cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def place_workers(
    settings: Vllm, n: int, trainers: int, model_folder: str, flags: Sequence[str], folder: Path, logs: Path
) -> tuple[Vllm, list[WorkerClient]]:
    """Return `n` workers of `settings`, not started, each with GPUs of its own where there are any beside
    those of `trainers` here; and the settings with the transport that they take.

    Raises:
        InputError: there is no vLLM, or there are not enough GPUs.
    """
    names = [gpu.name for gpu in gpus_in_use()]
    devices = gpus_of_workers(settings, n, names, trainers)
    if settings.transport == "auto":
        settings = replace(settings, transport="ipc" if names and not unshareable_memory() else "file")
    python, path = find_python(settings), folder / "path"
    backend = FreshPython(
        python,
        environment(path, settings, model_folder, bool(names)),
        logs,
        [",".join(of_worker) or None for of_worker in devices],
    )
    arguments = ["--model", model_folder, *flags, "--tensor-parallel-size", str(settings.tensor_parallel)]
    arguments += ["--gpu-memory-utilization", str(settings.gpu_memory)] if names else ["--enforce-eager"]
    if settings.transport != "file":
        arguments += ["--weight-transfer-config", json.dumps({"backend": settings.transport})]
    arguments += settings.arguments
    own = [[names.index(name) for name in of_worker] for of_worker in devices]
    return settings, [WorkerClient(number, backend, folder, arguments, own[number]) for number in range(n)]


def of_cache(n_bytes: int) -> list[str]:
    """Return the arguments for a KV cache of so many bytes, in place of the share of a GPU that is left; none
    for 0.

    vLLM measures what it takes by what is free before and after, and so counts what the trainer takes of a
    shared GPU meanwhile, and fails where that gives some back. At a first start, which training waits for,
    neither happens; a restart has the size that was found then. Of an argument that is there twice vLLM takes
    the last.
    """
    if not n_bytes:
        return []
    # With a size the share says only what has to be free at the start, in which vLLM counts what PyTorch has
    # cached in the trainer, and modules of CUDA that were loaded since.
    return ["--kv-cache-memory-bytes", str(n_bytes), "--gpu-memory-utilization", "0.01"]


class WorkerClient(VllmClient):
    """Worker `number`, which `backend` starts with these arguments of vLLM's command."""

    def __init__(
        self,
        number: int,
        backend: FreshPython,
        folder: Path,
        arguments: Sequence[str],
        gpus: Sequence[int] = (),
    ) -> None:
        self.name, self._number = f"vLLM worker {number}", number
        self.log = self._log = backend.log(number)
        self._backend, self._folder, self._arguments = backend, str(folder), arguments
        self.gpus = tuple(gpus)
        self._sized: list[str] | None = None
        """The arguments of a restart beside the first ones; None before the first start."""
        self._process: ChildProcess | None = None
        self._started, self._log_start = False, 0
        self._numbers = count(1)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        """Those without an answer yet; 0 is the start."""
        self._lost: ServerLostError | None = None

    async def reach(self, seconds: float) -> None:
        """See `VllmClient`."""
        loop = asyncio.get_running_loop()
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        self._calls, self._lost, self._started = {0: loop.create_future()}, None, False
        # At random: by one seed two workers, or one and its successor, would draw the same numbers.
        seed = ["--seed", str(secrets.randbits(31))]
        arguments = [*seed, *self._arguments, *(self._sized or ())]
        self._process = await asyncio.to_thread(
            self._backend.spawn, self.name, self._number, serve, self._folder, arguments
        )
        self.pid = self._process.pid
        for fd in self._process.watched():
            loop.add_reader(fd, self._receive, self._process)
        await self._answer(0, "its start", seconds)
        self._started = True
        if self._sized is None and self.gpus:
            self._sized = of_cache(await self.call("cache_bytes", seconds=seconds))

    def _receive(self, process: ChildProcess) -> None:
        """Give the calls their answers; where the process is lost, all the loss."""
        try:
            for kind, value, _ in process.receive():
                if kind in ("lost", "failed"):
                    raise process.lost(str(value))
                if kind == "started":
                    self._settle(0, None)
                elif kind == "answer":
                    self._settle(*value)
                else:
                    number, why, again = value
                    self._settle(number, (ServerLostError if again else WorkerError)(f"{self.name}: {why}"))
        except (WorkerLostError, OSError) as error:
            self._ignore(process)
            self._lost, self.pid = ServerLostError(str(error)), None
            for number in self._calls:
                self._settle(number, ServerLostError(str(error)))

    def _ignore(self, process: ChildProcess) -> None:
        for fd in process.watched():
            asyncio.get_running_loop().remove_reader(fd)

    def _settle(self, number: int, value: Any) -> None:
        call = self._calls.get(number)
        if call is None or call.done():  # it was given up
            return
        if isinstance(value, Exception):
            call.set_exception(value)
        else:
            call.set_result(value)

    async def call(self, method: str, *arguments: Any, seconds: float) -> Any:
        """See `VllmClient`."""
        if self._lost or self._process is None:
            raise self._lost or ServerLostError(f"{self.name} is not started")
        number = next(self._numbers)
        self._calls[number] = asyncio.get_running_loop().create_future()
        self._process.send((number, method, arguments))
        return await self._answer(number, method, seconds)

    async def _answer(self, number: int, what: str, seconds: float) -> Any:
        try:
            # Not wait_for, which in Python 3.11 drops a cancellation where the call is settled already.
            async with asyncio.timeout(seconds):
                return await self._calls[number]
        except TimeoutError as error:
            raise ServerLostError(f"{self.name}: {what} took longer than {seconds:g} s") from error
        finally:
            self._calls.pop(number, None)

    def exit_reason(self) -> str:
        """Return the first error of its log since its start, on one line."""
        try:
            with self._log.open("rb") as file:
                file.seek(self._log_start)
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return "it left no log"
        # The first error is the cause; those after it are of what waited for it.
        found = (_ERROR.search(line) for line in lines if " WARNING " not in line)
        return next((words[0].strip() for words in found if words), "its log says nothing of why")

    def kill(self) -> None:
        """See `VllmClient`."""
        process, self._process, self.pid = self._process, None, None
        if process:
            self._ignore(process)
            process.kill()

    async def close(self) -> None:
        """See `VllmClient`."""
        process, self._process = self._process, None
        if process:
            self._ignore(process)
            process.close(CLOSING if self._started else STARTING)
            await asyncio.to_thread(process.join)
        self.pid = None
