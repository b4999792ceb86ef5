"""Workers of vLLM (`scalerl.rl.engine.vllm.worker` runs in them): their Python, environment and arguments, on
any machine; their place on this one; and why one has exited."""

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


class Servers(NamedTuple):
    """Servers that are to be started, or that others have started, and what starts them."""

    settings: Vllm
    """With the transport that they take."""
    states: list[ServerState]
    backend: Backend
    gpus: Sequence[str] = ()
    """The names of this machine's, where they are among these."""
    transport: Callable[[], VllmTransport] | None = None
    """Makes another transport than that of the settings."""


Place = Callable[[Sequence[str], Path], Servers]
"""Returns workers that have these flags, whose files are in this folder."""


def workers_of(
    settings: Vllm, n: int, model_folder: str, flags: Sequence[str], logs: Path, gpus: bool
) -> list[ServerState]:
    """Return `n` workers with the arguments that vLLM has on `gpus`, or on CPUs."""
    arguments = ["--model", model_folder, *flags, "--tensor-parallel-size", str(settings.tensor_parallel)]
    # After part of a prompt that has a seed vLLM sets back its generator, which those of CPUs refuse.
    on_cpu = ["--enforce-eager", "--no-enable-chunked-prefill"]
    arguments += ["--gpu-memory-utilization", str(settings.gpu_memory)] if gpus else on_cpu
    if settings.transport != "file":
        arguments += ["--weight-transfer-config", json.dumps({"backend": settings.transport})]
    arguments += settings.arguments
    how: dict[str, Any] = {"start_timeout": settings.start_seconds, "arguments": arguments}
    log = FreshPython(logs=logs).log
    return [ServerState(f"vLLM worker {i}", i, log=log(i), **how) for i in range(n)]


def with_transport(settings: Vllm, gpus: Sequence[Any]) -> Vllm:
    """Return the settings with the transport to workers on these `gpus` of this machine, if there are any."""
    auto = "ipc" if gpus and not unshareable_memory() else "file"
    return replace(settings, transport=auto) if settings.transport == "auto" else settings


def place_workers(
    settings: Vllm, n: int, trainers: int, model_folder: str, logs: Path, flags: Sequence[str], folder: Path
) -> Servers:
    """Return `n` workers on this machine, each with GPUs of its own where there are any beside those of
    `trainers` here.

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


def exit_reason(log: Path, start: int) -> str:
    """Return the first error that a log has behind its first `start` bytes, on one line."""
    try:
        with log.open("rb") as file:
            file.seek(start)
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return "it left no log"
    # The first error is the cause; those after it are of what waited for it.
    found = (_ERROR.search(line) for line in lines if " WARNING " not in line)
    return next((words[0].strip() for words in found if words), "its log says nothing of why")
