"""Launch of vLLM workers, which run `scalerl.rl.engine.vllm.worker`: Python, environment and arguments on any
machine, GPUs on this one, and the reason for an exit."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from scalerl.errors import InputError
from scalerl.rl.config.devices import gpus_of_workers
from scalerl.rl.config.engine import Vllm
from scalerl.rl.engine.vllm.server_state import ServerState
from scalerl.rl.model.causal_lm import gpus_in_use
from scalerl.rl.sync.ipc_buffers import unshareable_memory
from scalerl.rl.sync.vllm_weights import VllmTransport
from scalerl.rl.workers.backend import Backend
from scalerl.rl.workers.processes import FreshPython

VENV = Path(".vllm-venv")
"""The environment that `make vllm` sets up."""
_ERROR = re.compile(r"\w*(?:Error: |Value error, ).+")


def find_python(settings: Vllm) -> str:
    """Return the Python of the environment that has vLLM.

    Raises:
        InputError: there is no such environment.
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
    """Return the variables that a worker's environment has beyond those of this process.

    A link in `folder` lets the worker import scalerl and nothing else: the trainer's site-packages also has
    packages whose versions differ from those of vLLM's environment.
    """
    folder.mkdir(exist_ok=True)
    with suppress(FileExistsError):
        (folder / "scalerl").symlink_to(Path(__file__).parents[3])
    found = {
        "PYTHONPATH": str(folder),
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the worker extension reads the requests of the V1 runner
        # vLLM's processes communicate over the loopback, which no other machine can reach.
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOOPBACK_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        # For handles to GPU memory, which only this process sends.
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1" if settings.transport == "ipc" else "0",
        "HF_HUB_OFFLINE": "1" if Path(model_folder).is_dir() else os.environ.get("HF_HUB_OFFLINE", "0"),
    }
    if gpus:
        return found
    return found | {
        "VLLM_CPU_KVCACHE_SPACE": str(settings.cpu_cache_gib),
        # Otherwise every worker binds its threads to the same first cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


class Servers(NamedTuple):
    """The servers of a generator, to be started or already running, and the backend that starts them."""

    settings: Vllm
    """The settings, with the transport that the servers use."""
    states: list[ServerState]
    backend: Backend
    gpus: Sequence[str] = ()
    """The names of this machine's GPUs, if the servers use them."""
    transport: Callable[[], VllmTransport] | None = None
    """Makes a transport that replaces that of the settings."""


Place = Callable[[Sequence[str], Path], Servers]
"""Returns workers with the given flags; their files are in the given folder."""


def workers_of(
    settings: Vllm, n: int, model_folder: str, flags: Sequence[str], logs: Path, gpus: bool
) -> list[ServerState]:
    """Return `n` workers with vLLM's arguments, for GPUs if `gpus`, else for CPUs."""
    arguments = ["--model", model_folder, *flags, "--tensor-parallel-size", str(settings.tensor_parallel)]
    # After a chunk of a prompt vLLM resets a seeded random generator, which CPU generators do not support.
    on_cpu = ["--enforce-eager", "--no-enable-chunked-prefill"]
    arguments += ["--gpu-memory-utilization", str(settings.gpu_memory)] if gpus else on_cpu
    if settings.transport != "file":
        arguments += ["--weight-transfer-config", json.dumps({"backend": settings.transport})]
    arguments += settings.arguments
    how: dict[str, Any] = {"start_timeout": settings.start_seconds, "arguments": arguments}
    log = FreshPython(logs=logs).log
    return [ServerState(f"vLLM worker {i}", i, log=log(i), **how) for i in range(n)]


def with_transport(settings: Vllm, gpus: Sequence[Any]) -> Vllm:
    """Return the settings with `auto` replaced by the transport to workers on these local `gpus`, if any."""
    auto = "ipc" if gpus and not unshareable_memory() else "file"
    return replace(settings, transport=auto) if settings.transport == "auto" else settings


def place_workers(
    settings: Vllm, n: int, trainers: int, model_folder: str, logs: Path, flags: Sequence[str], folder: Path
) -> Servers:
    """Return `n` workers on this machine, on GPUs that its `trainers` leave, if it has GPUs.

    Raises:
        InputError: there is no vLLM, or there are not enough GPUs.
    """
    names = [gpu.name for gpu in gpus_in_use()]
    devices = gpus_of_workers(settings, n, names, trainers)
    settings = with_transport(settings, names)
    around = environment(folder / "path", settings, model_folder, bool(names))
    of_each = [",".join(of_worker) or None for of_worker in devices]
    backend = FreshPython(find_python(settings), around, logs, of_each)
    states = workers_of(settings, n, model_folder, flags, logs, bool(names))
    return Servers(settings, states, backend, names)


def of_cache(n_bytes: int) -> list[str]:
    """Return the arguments for a KV cache of `n_bytes`, in place of one that vLLM sizes itself; none for 0.

    vLLM measures its memory by the GPU's free memory before and after loading. On a shared GPU this counts
    what the trainer allocates meanwhile, and fails if the trainer frees memory. Training waits for a first
    start, so neither happens then; a restart reuses the size of the first. Of repeated arguments vLLM takes
    the last.
    """
    if not n_bytes:
        return []
    # With a given size, utilisation only says how much must be free at the start. vLLM counts the trainer's
    # PyTorch cache, and CUDA modules loaded since, as not free.
    return ["--kv-cache-memory-bytes", str(n_bytes), "--gpu-memory-utilization", "0.01"]


def exit_reason(log: Path, start: int) -> str:
    """Return the first error in a log after its first `start` bytes, on one line."""
    try:
        with log.open("rb") as file:
            file.seek(start)
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return "it left no log"
    # The first error is the cause; later ones come from processes that waited for the failed one.
    found = (_ERROR.search(line) for line in lines if " WARNING " not in line)
    return next((words[0].strip() for words in found if words), "its log says nothing of why")
