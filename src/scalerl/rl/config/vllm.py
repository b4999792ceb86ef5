"""The settings of generation by vLLM, as a recipe's `[cluster]` table names them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from scalerl.rl.config.bounds import at_least, positive


@dataclass(frozen=True)
class Vllm:
    """Completions are sampled by servers of vLLM: our own, or those at `urls`."""

    urls: tuple[str, ...] = ()
    """Servers that others have started, as docs/vllm.md says: http://, https:// (with /v1 or without), or
    unix:// and a socket. Each is one engine: no balancer in front of several."""
    servers: int = 1
    """Servers to start on this machine, where there are no `urls`."""
    python: str = ""
    """The Python of the environment that has vLLM; else $SCALERL_VLLM_PYTHON, else .vllm-venv (make vllm)."""
    api_key_env: str = "SCALERL_VLLM_API_KEY"
    """The environment variable with the key of the servers at `urls`; our own have a random one."""
    tensor_parallel: int = 1
    """GPUs of each server that is started here: the last of the machine, as the trainer has the first."""
    gpu_memory: float = 0.85
    """The share of a GPU's memory that a server started here takes."""
    cpu_cache_gib: int = 1
    """Of KV cache, where a server started here computes on CPUs."""
    arguments: tuple[str, ...] = ()
    """More arguments for the servers that are started here."""
    transport: Literal["file", "nccl"] = "file"
    """How weights get there: safetensors files in memory that server and trainer both see, or NCCL."""
    weights_folder: str = "/dev/shm"
    """Where those files and the servers' sockets are; for servers at `urls`, a folder that they can read."""
    start_seconds: float = 600.0
    """How long a server may take to start, or one at `urls` to come back."""
    request_seconds: float = 3600.0
    """How long one completion may take."""
    answer_seconds: float = 120.0
    """How long anything else may take that a server is asked for."""
    kind: Literal["vllm"] = "vllm"

    def __post_init__(self) -> None:
        at_least(1, servers=self.servers, tensor_parallel=self.tensor_parallel)
        at_least(1, cpu_cache_gib=self.cpu_cache_gib)
        positive(start_seconds=self.start_seconds, request_seconds=self.request_seconds)
        positive(answer_seconds=self.answer_seconds)
        if not 0 < self.gpu_memory <= 1:
            raise ValueError("gpu_memory must be a share between 0 and 1")
        if bad := [url for url in self.urls if not _is_one(url)]:
            raise ValueError(f"urls must begin with http://, https:// or unix:///, found {bad[0]!r}")
        if len({url.rstrip("/").removesuffix("/v1") for url in self.urls}) < len(self.urls):
            raise ValueError("urls must be of different servers")


def _is_one(url: str) -> bool:
    parts = urlsplit(url)
    return bool(parts.hostname) if parts.scheme in ("http", "https") else url.startswith("unix:///")
