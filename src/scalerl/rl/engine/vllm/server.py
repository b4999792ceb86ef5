"""A vLLM server of our own: its command, its process, its end.

It listens on a Unix socket in a folder that only this user can enter: vLLM's key guards its completions, but
not `/pause` or `/collective_rpc`. What its processes say to each other goes over the loopback. Its key is in
its environment, not in its arguments. When the trainer dies, however it does, so does the server (`launch`).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scalerl.errors import InputError
from scalerl.rl.config.cluster import Vllm
from scalerl.rl.engine.vllm.protocol import LENGTH_CONTROL, WORKER

_ERROR = re.compile(r"\w*(?:Error: |Value error, ).+")
VENV = Path(".vllm-venv")
"""Where `make vllm` puts it."""


def find_python(settings: Vllm) -> str:
    """The Python of the environment that has vLLM.

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


def flags(precision: str, fp32_logits: bool, rows: int, positions: int) -> list[str]:
    """What any server must be started with, our own and others'."""
    head = {"head_dtype": "float32"} if fp32_logits else {}
    return [
        *("--dtype", precision),
        *("--max-num-seqs", str(rows), "--max-model-len", str(positions)),
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *("--worker-extension-cls", WORKER, "--logits-processors", LENGTH_CONTROL),
        # The weights change between two steps: none is under way then, and every token is counted.
        "--no-async-scheduling",
        "--enable-prompt-tokens-details",
        *(("--hf-overrides", json.dumps(head)) if head else ()),
    ]


def environment(folder: Path) -> dict[str, str]:
    """The same, in the environment. `folder` is made a place to import scalerl from, and nothing else: beside
    an installed package are all others of the trainer's environment, which are not those of vLLM's."""
    folder.mkdir(exist_ok=True)
    with suppress(FileExistsError):
        (folder / "scalerl").symlink_to(Path(__file__).parents[3])
    return {
        "VLLM_SERVER_DEV_MODE": "1",  # /pause, /resume and /collective_rpc
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # whose requests the worker extension knows
        "PYTHONPATH": str(folder),
    }


@dataclass
class Server:
    """The process; `start` again after its death."""

    settings: Vllm
    model_folder: str
    arguments: list[str]
    folder: Path
    """Its socket; removed with it."""
    log: Path
    key: str
    index: int = 0
    devices: tuple[str, ...] = ()
    """GPUs, as CUDA_VISIBLE_DEVICES wants them; without any it computes on the CPU."""
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _log_start: int = 0
    """Where this life of it begins in the log."""

    @property
    def socket(self) -> str:
        """Where it listens."""
        return str(self.folder / f"{self.index}.sock")

    def start(self) -> None:
        """Start it; it answers much later."""
        Path(self.socket).unlink(missing_ok=True)
        command = [find_python(self.settings), "-m", "scalerl.rl.engine.vllm.launch", str(self.folder)]
        command += ["--model", self.model_folder, "--uds", self.socket, *self.arguments]
        command += ["--tensor-parallel-size", str(self.settings.tensor_parallel)]
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
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment(self.folder / "path"), **self._own_environment()},
                start_new_session=True,
            )

    def _own_environment(self) -> Mapping[str, str]:
        own = {
            "VLLM_API_KEY": self.key,
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_LOOPBACK_IP": "127.0.0.1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1"
            if Path(self.model_folder).is_dir()
            else os.environ.get("HF_HUB_OFFLINE", "0"),
        }
        if self.devices:
            return own | {"CUDA_VISIBLE_DEVICES": ",".join(self.devices)}
        return own | {
            "VLLM_CPU_KVCACHE_SPACE": str(self.settings.cpu_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }

    @property
    def pid(self) -> int | None:
        """Of the server's first process, while that lives."""
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    def last_words(self) -> str:
        """What its log says of why it died, on one line."""
        try:
            with self.log.open("rb") as file:
                file.seek(self._log_start)
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return "it left no log"
        # The first error is the cause; those after it are of what waited for it.
        found = (_ERROR.search(line) for line in lines if " WARNING " not in line)
        return next((words[0].strip() for words in found if words), "its log says nothing of why")

    def end(self) -> None:
        """Let it tidy up, and end it."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)
        self.kill()

    def kill(self) -> None:
        """End it and all of its processes now."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()


def place_servers(
    settings: Vllm, model_folder: str, arguments: list[str], folder: Path, logs: Path, key: str, gpus: int
) -> list[Server]:
    """The servers of `settings`, not started, each with GPUs of its own where there are any.

    They have the last ones: the trainer computes on the first.

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
        Server(
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
