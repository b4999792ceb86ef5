"""The table `[engine]` of a recipe: the engine that samples completions, in training and evaluations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from scalerl.rl.config.settings import at_least, positive

BUCKET_MIB = 64.0
"""Default size of a bucket of weights; a larger tensor is a bucket of its own."""


EngineKind = Literal["auto", "kernels", "transformers"]


@dataclass(frozen=True)
class BuiltInEngine:
    """The code that computes the model in the built-in generator and in an unsharded trainer.

    `kernels` is this package's C code: Llama, Mistral, Qwen2 and Qwen3 in float32 on a CPU. `transformers` is
    the model's own modules, on any device. `auto` uses the kernels where they support the model.
    """

    kind: EngineKind = "auto"


@dataclass(frozen=True)
class Vllm:
    """vLLM samples the completions: in `generators` workers, which the run starts on this machine or Ray on
    any node, or in the servers at `urls`."""

    urls: tuple[str, ...] = ()
    """Servers started elsewhere (docs/howto/vllm.md): http:// or https:// (with /v1 or without), or unix://
    and a socket. Each must be one engine, not a load balancer in front of several."""
    python: str = ""
    """The Python of the environment with vLLM, on every node. Defaults to $SCALERL_VLLM_PYTHON, else
    .vllm-venv (make vllm), else the current Python."""
    api_key_env: str = "SCALERL_VLLM_API_KEY"
    """The environment variable with the key of the servers at `urls`."""
    tensor_parallel: int = 1
    """GPUs per worker or server, which GPU-hours count; servers at `urls` must have this many. Workers get
    the last GPUs of the machine, as the trainer has the first; a single GPU is shared by one worker and the
    trainer. Ray gives each worker GPUs of one node."""
    gpu_memory: float = 0.85
    """Share of a GPU's memory that a worker takes. On a shared GPU the trainer has the rest; if that is too
    little, an error says what share fits."""
    cpu_cache_gib: int = 1
    """GiB of KV cache of a worker that runs on CPUs."""
    arguments: tuple[str, ...] = ()
    """More arguments for the workers, as for `vllm serve`."""
    request_seeds: bool = False
    """Whether each training completion has its own seed, so that resampling it with the same weights gives
    the same tokens. On GPUs this costs a kernel launch per token. Evaluations always use seeds."""
    transport: Literal["auto", "file", "ipc", "nccl"] = "auto"
    """How weights are sent: `file` by safetensors files in the memory of the worker's node (on a cluster,
    from Ray's object store); `ipc` and `nccl` by vLLM's own transfer, over CUDA IPC to workers on GPUs of
    this machine, or over NCCL (never run so far). `auto` is `ipc` for workers on GPUs of this machine whose
    memory PyTorch can share, else `file`."""
    weights_folder: str = "/dev/shm"
    """Folder of those files, on every node; servers at `urls` must be able to read it."""
    start_seconds: float = 600.0
    """Longest time for a worker to start, or for a server at `urls` to come back."""
    request_seconds: float = 3600.0
    """Longest time for one completion."""
    answer_seconds: float = 120.0
    """Longest time for a server to answer any other request."""
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
        """Whether a worker can share the only GPU of a machine with the trainer."""
        return self.tensor_parallel == 1 and self.transport != "nccl"  # NCCL needs two GPUs


def _is_server(url: str) -> bool:
    parts = urlsplit(url)
    return bool(parts.hostname) if parts.scheme in ("http", "https") else url.startswith("unix:///")


BUILT_IN = BuiltInEngine()
AnyEngine = BuiltInEngine | Vllm
"""The engines that a recipe can name."""
