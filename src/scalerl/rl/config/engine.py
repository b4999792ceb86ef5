"""The table `[engine]` of a recipe: what samples completions, in training and in evaluations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from scalerl.rl.config.settings import at_least, positive

BUCKET_MIB = 64.0
"""The size of a bucket of weights, unless a recipe has another; a larger tensor is one of its own."""


EngineKind = Literal["auto", "kernels", "transformers"]


@dataclass(frozen=True)
class BuiltInEngine:
    """What computes the model in the built-in generator, and in a trainer that is not sharded.

    `kernels` is this package's C code: Llama, Mistral, Qwen2 and Qwen3 in float32 on a CPU. `transformers` is
    the model's own modules, on any device. `auto` takes the kernels where they fit.
    """

    kind: EngineKind = "auto"


@dataclass(frozen=True)
class Vllm:
    """Completions are sampled by vLLM: in workers that are started on this machine, or by Ray on any node, as
    many as `generators`; or by the servers at `urls`."""

    urls: tuple[str, ...] = ()
    """Servers that others have started (docs/howto/vllm.md): http://, https:// (with /v1 or without), or unix://
    and a socket. Each is one engine: no balancer in front of several."""
    python: str = ""
    """The Python of the environment that has vLLM, on every node; else $SCALERL_VLLM_PYTHON, else .vllm-venv
    (make vllm), else the one that is running."""
    api_key_env: str = "SCALERL_VLLM_API_KEY"
    """The environment variable with the key of the servers at `urls`."""
    tensor_parallel: int = 1
    """GPUs of each, as GPU-hours count them. Workers get the last of the machine, as the trainer has the
    first, and one worker shares the only GPU with it; from Ray each gets those of one node. The servers at
    `urls` must have as many."""
    gpu_memory: float = 0.85
    """The share of a GPU's memory that a worker takes. On a shared GPU the rest is the trainer's: where that
    is too little, an error says what share fits."""
    cpu_cache_gib: int = 1
    """GiB of KV cache of a worker that computes on CPUs."""
    arguments: tuple[str, ...] = ()
    """More arguments for the workers, as those of `vllm serve`."""
    request_seeds: bool = False
    """Whether completions of training have a seed each, so that one that is sampled again by the same weights
    is the same: on GPUs a kernel launch for each and every token. Those of evaluations always have."""
    transport: Literal["auto", "file", "ipc", "nccl"] = "auto"
    """How weights get there: safetensors files in the memory of the worker's node (on a cluster, out of Ray's
    object store), or vLLM's own transfer, by CUDA IPC to workers on the GPUs of this machine, or by NCCL,
    which was never run. `auto` is `ipc` where workers are on GPUs of this machine whose memory PyTorch can
    share, else `file`."""
    weights_folder: str = "/dev/shm"
    """Folder of those files, on every node; for servers at `urls`, one that they can read."""
    start_seconds: float = 600.0
    """How long a worker may take to start, or a server at `urls` to come back."""
    request_seconds: float = 3600.0
    """How long one completion may take."""
    answer_seconds: float = 120.0
    """How long anything else may take that a server is asked for."""
    kind: Literal["vllm"] = "vllm"

    def __post_init__(self) -> None:
        at_least(1, tensor_parallel=self.tensor_parallel, cpu_cache_gib=self.cpu_cache_gib)
        positive(start_seconds=self.start_seconds, request_seconds=self.request_seconds)
        positive(answer_seconds=self.answer_seconds)
        if not 0 < self.gpu_memory <= 1:
            raise ValueError("gpu_memory must be a share between 0 and 1")
        if bad := [url for url in self.urls if not _is_server(url)]:
            raise ValueError(f"urls must begin with http://, https:// or unix:///, found {bad[0]!r}")
        if self.urls and self.transport == "ipc":
            raise ValueError('transport "ipc" is for workers on this machine; "file" and "nccl" are for urls')
        if len({url.rstrip("/").removesuffix("/v1") for url in self.urls}) < len(self.urls):
            raise ValueError("urls must be of different servers")

    @property
    def shares_gpu(self) -> bool:
        """Whether a worker can have a part of the only GPU of a machine, and the trainer the rest."""
        return self.tensor_parallel == 1 and self.transport != "nccl"  # which needs two


def _is_server(url: str) -> bool:
    parts = urlsplit(url)
    return bool(parts.hostname) if parts.scheme in ("http", "https") else url.startswith("unix:///")


BUILT_IN = BuiltInEngine()
AnyEngine = BuiltInEngine | Vllm
"""The engines that a recipe can name."""
