"""A vLLM server that is started here: its command, environment, process and log.

It serves on a Unix socket in a folder that only this user can enter: vLLM's key guards its completions, but
not `/pause` or `/collective_rpc`. Its processes reach each other over the loopback. Its key is in its
environment, not in its arguments. However the trainer ends, the server ends with it (`launch`).
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scalerl.errors import InputError
from scalerl.rl.config.cluster import Vllm

_ERROR = re.compile(r"\w*(?:Error: |Value error, ).+")
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


def environment(folder: Path) -> dict[str, str]:
    """Return what any server needs in its environment.

    `folder` is made a place to import scalerl from, and nothing else: an installed package lies beside all
    others of the trainer's environment, which differ from those of vLLM's.
    """
    folder.mkdir(exist_ok=True)
    with suppress(FileExistsError):
        (folder / "scalerl").symlink_to(Path(__file__).parents[3])
    return {
        "VLLM_SERVER_DEV_MODE": "1",  # /pause, /resume and /collective_rpc
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the worker extension reads the requests of the first
        "PYTHONPATH": str(folder),
    }


@dataclass
class ServerProcess:
    """The process of a server; `start` may be called again after it has exited."""

    settings: Vllm
    model_folder: str
    arguments: list[str]
    folder: Path
    """The folder of its socket, which is removed with it."""
    log: Path
    key: str
    index: int = 0
    devices: tuple[str, ...] = ()
    """GPUs, as in CUDA_VISIBLE_DEVICES; without any it computes on the CPU."""
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _log_start: int = 0
    """Where the log of the running process starts."""

    @property
    def socket(self) -> str:
        """The path of its Unix socket."""
        return str(self.folder / f"{self.index}.sock")

    def start(self) -> None:
        """Start the process; it answers much later."""
        # A server that was killed leaves its socket, at which the next could not listen.
        Path(self.socket).unlink(missing_ok=True)
        command = [find_python(self.settings), "-m", "scalerl.rl.engine.vllm.launch", str(self.folder)]
        command += ["--model", self.model_folder, "--uds", self.socket, *self.arguments]
        command += ["--tensor-parallel-size", str(self.settings.tensor_parallel)]
        # At random: by one seed two servers, or one and its successor, would draw the same numbers.
        command += ["--seed", str(secrets.randbits(31))]
        if self.devices:
            command += ["--gpu-memory-utilization", str(self.settings.gpu_memory)]
            if self.settings.transport == "nccl":
                command += ["--weight-transfer-config", '{"backend": "nccl"}']
        else:
            command += ["--enforce-eager"]
        command += self.settings.arguments
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                command,
                # `launch` ends the server once this pipe is closed, which a killed trainer does too.
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment(self.folder / "path"), **self._own_environment()},
                start_new_session=True,
            )

    def _own_environment(self) -> dict[str, str]:
        is_local = Path(self.model_folder).is_dir()
        own = {
            "VLLM_API_KEY": self.key,
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_LOOPBACK_IP": "127.0.0.1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1" if is_local else os.environ.get("HF_HUB_OFFLINE", "0"),
        }
        if self.devices:
            return own | {"CUDA_VISIBLE_DEVICES": ",".join(self.devices)}
        return own | {
            "VLLM_CPU_KVCACHE_SPACE": str(self.settings.cpu_cache_gib),
            # Else every server binds its threads to the same first cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }

    @property
    def pid(self) -> int | None:
        """The id of the server's first process; None where that has exited."""
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    def exit_reason(self) -> str:
        """Return the first error of its log since its start, on one line."""
        try:
            with self.log.open("rb") as file:
                file.seek(self._log_start)
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return "it left no log"
        # The first error is the cause; those after it are of what waited for it.
        found = (_ERROR.search(line) for line in lines if " WARNING " not in line)
        return next((words[0].strip() for words in found if words), "its log says nothing of why")

    def stop(self) -> None:
        """Stop the server: first so that it can remove its shared memory, then with all of its processes."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)
        self.kill()

    def kill(self) -> None:
        """Kill it and all of its processes."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()


def place_servers(
    settings: Vllm, model_folder: str, arguments: list[str], folder: Path, logs: Path, key: str, gpus: int
) -> list[ServerProcess]:
    """Return the servers of `settings`, not started, each with GPUs of its own where there are any.

    They get the last ones: the trainer computes on the first.

    Raises:
        InputError: there are not enough GPUs.
    """
    each, nccl = settings.tensor_parallel, settings.transport == "nccl"
    if gpus and gpus < settings.servers * each + nccl:
        trainer = ", one for the trainer (NCCL wants them apart)" if nccl else ""
        raise InputError(
            f"{settings.servers} servers of {each} GPUs each{trainer}, and this machine has {gpus}"
        )
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names: list[Any] = named.split(",") if named else [str(i) for i in range(gpus)]
    names = names[gpus - settings.servers * each : gpus]
    return [
        ServerProcess(
            settings,
            model_folder,
            arguments,
            folder,
            logs / f"vllm-{index}.log",
            key,
            index,
            tuple(names[index * each : (index + 1) * each]) if gpus else (),
        )
        for index in range(settings.servers)
    ]
