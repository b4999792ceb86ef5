"""Workers of vLLM that are started on this machine: their Python, environment, arguments and GPUs."""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from scalerl.errors import InputError
from scalerl.rl.config.cluster import Vllm
from scalerl.rl.engine.vllm.worker_client import WorkerClient
from scalerl.rl.workers.processes import FreshPython

VENV = Path(".vllm-venv")
"""Where `make vllm` puts it."""


def find_python(settings: Vllm) -> str:
    """Return the Python of the environment that has vLLM.

    Raises:
        InputError: there is none.
    """
    named = settings.python or os.environ.get("SCALERL_VLLM_PYTHON", "")
    python = Path(named).expanduser() if named else VENV / "bin" / "python"
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
    settings: Vllm, model_folder: str, flags: Sequence[str], folder: Path, logs: Path, gpus: int
) -> list[WorkerClient]:
    """Return the workers of `settings`, not started, each with GPUs of its own where there are any.

    Raises:
        InputError: there is no vLLM, or there are not enough GPUs.
    """
    devices = gpus_of_workers(settings, gpus)
    python, path = find_python(settings), folder / "path"
    backend = FreshPython(python, environment(path, settings, model_folder, gpus > 0), logs, devices)
    arguments = ["--model", model_folder, *flags, "--tensor-parallel-size", str(settings.tensor_parallel)]
    arguments += ["--gpu-memory-utilization", str(settings.gpu_memory)] if gpus else ["--enforce-eager"]
    if settings.transport != "file":
        arguments += ["--weight-transfer-config", json.dumps({"backend": settings.transport})]
    arguments += settings.arguments
    each, first = settings.tensor_parallel, gpus - settings.servers * settings.tensor_parallel
    own = [range(first + n * each, first + (n + 1) * each) if gpus else () for n in range(settings.servers)]
    return [
        WorkerClient(number, backend, backend.log(number), folder, arguments, own[number])
        for number in range(settings.servers)
    ]


def gpus_of_workers(settings: Vllm, gpus: int) -> list[str | None]:
    """Return the GPUs of each worker, as in CUDA_VISIBLE_DEVICES; None where the machine has none.

    They get the last ones: the trainer computes on the first. Where that is the only one, a worker shares it.

    Raises:
        InputError: there are not enough.
    """
    each, nccl = settings.tensor_parallel, settings.transport == "nccl"
    if not gpus:
        return [None] * settings.servers
    if gpus < settings.servers * each + nccl:
        trainer = ", one for the trainer (NCCL requires them apart)" if nccl else ""
        raise InputError(
            f"{settings.servers} workers of {each} GPUs each{trainer}, and this machine has {gpus}"
        )
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = named.split(",") if named else [str(i) for i in range(gpus)]
    names = names[gpus - settings.servers * each : gpus]
    return [",".join(names[i * each : (i + 1) * each]) for i in range(settings.servers)]
