"""The table `[cluster]` of a recipe: which processes run as Ray actors, and with what."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Discriminator

from scalerl.errors import InputError
from scalerl.rl.config.settings import at_least, positive

BUCKET_MIB = 64.0
"""The size of a bucket of weights, unless a recipe has another; a larger tensor is one of its own."""


@dataclass(frozen=True)
class OneProcess:
    """The learner in the process of the driver."""

    kind: Literal["one"] = "one"


@dataclass(frozen=True)
class Torch:
    """The built-in generator, one in each actor."""

    kind: Literal["torch"] = "torch"


@dataclass(frozen=True)
class Fsdp2:
    """The learner sharded by PyTorch FSDP2 over `trainers` actors; the table `[learner]` says how."""

    kind: Literal["fsdp2"] = "fsdp2"


@dataclass(frozen=True)
class Vllm:
    """Completions are sampled by vLLM: in workers that are started here, or by the servers at `urls`."""

    urls: tuple[str, ...] = ()
    """Servers that others have started (docs/howto/vllm.md): http://, https:// (with /v1 or without), or unix://
    and a socket. Each is one engine: no balancer in front of several."""
    servers: int = 1
    """Workers to start on this machine, where there are no `urls`."""
    python: str = ""
    """The Python of the environment that has vLLM; else $SCALERL_VLLM_PYTHON, else .vllm-venv (make vllm)."""
    api_key_env: str = "SCALERL_VLLM_API_KEY"
    """The environment variable with the key of the servers at `urls`."""
    tensor_parallel: int = 1
    """GPUs of each, as GPU-hours count them. Workers get the last of the machine, as the trainer has the
    first, and one worker shares the only GPU with it; the servers at `urls` must have as many."""
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
    transport: Literal["file", "ipc", "nccl"] = "file"
    """How weights get there: safetensors files in memory that both see, or vLLM's own transfer, by CUDA IPC
    to workers on the GPUs of this machine, or by NCCL, which was never run."""
    weights_folder: str = "/dev/shm"
    """Folder of those files; for servers at `urls`, one that they can read."""
    start_seconds: float = 600.0
    """How long a worker may take to start, or a server at `urls` to come back."""
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
        if bad := [url for url in self.urls if not _is_server(url)]:
            raise ValueError(f"urls must begin with http://, https:// or unix:///, found {bad[0]!r}")
        if self.urls and self.transport == "ipc":
            raise ValueError('transport "ipc" is for workers on this machine; "file" and "nccl" are for urls')
        if len({url.rstrip("/").removesuffix("/v1") for url in self.urls}) < len(self.urls):
            raise ValueError("urls must be of different servers")


def _is_server(url: str) -> bool:
    parts = urlsplit(url)
    return bool(parts.hostname) if parts.scheme in ("http", "https") else url.startswith("unix:///")


@dataclass(frozen=True)
class Transport:
    """The transport of weights from the learner to the generators."""

    kind: Literal["object_store", "gloo", "nccl"] = "object_store"
    """Ray's object store (shared memory within a node), or a broadcast in a process group of its own."""
    bucket_mib: float = BUCKET_MIB
    """Tensors are sent in buckets of this size; a larger tensor is one of its own."""

    def __post_init__(self) -> None:
        positive(bucket_mib=self.bucket_mib)


@dataclass(frozen=True)
class Resources:
    """The resource request of an actor."""

    cpus: float = 1.0
    gpus: float | Literal["auto"] = "auto"
    """`auto`: 1 on a cluster that has GPUs, but 0 for a verifier; a part, such as 0.5, shares a GPU."""

    def __post_init__(self) -> None:
        gpus = self.gpus_or(0.0)
        if not 0 <= self.cpus < math.inf or not 0 <= gpus < math.inf or not self.cpus + gpus:
            raise ValueError("cpus and gpus must not be negative, and one of them positive")

    def gpus_or(self, auto: float) -> float:
        """Return the number of GPUs, where `auto` stands for so many."""
        return auto if self.gpus == "auto" else self.gpus

    def bundle(self) -> dict[str, float]:
        """Return the request by the names of Ray, without GPUs where `auto` is not replaced by a number."""
        return {name: n for name, n in (("CPU", self.cpus), ("GPU", self.gpus_or(0.0))) if n}


@dataclass(frozen=True)
class ClusterTimeouts:
    """Seconds to wait for a process, before it is killed and replaced."""

    start: float = 300.0
    """Seconds for room on the cluster, and for a process to load its model."""
    heartbeat: float = 60.0
    """Seconds without a heartbeat."""
    decode: float = 600.0
    """Seconds without progress of a generator that has something to sample."""
    weights: float = 300.0
    """Seconds for a weight update."""
    step: float = 3600.0
    """Seconds for a step of the learner, or a verifier's completions. Evaluations have `timeouts`."""

    def __post_init__(self) -> None:
        positive(**vars(self))


@dataclass(frozen=True)
class Cluster:
    """A run whose parts are Ray actors; nothing that is trained depends on where they are."""

    generators: int = 1
    trainers: int = 1
    verifiers: int = 0
    """Actors that verify, each with the processes of `task.limits`; 0: those processes beside the driver."""
    address: str = "auto"
    """`auto` joins the cluster that runs here, `local` starts one on this machine; or HOST:PORT."""
    engine: Annotated[Torch | Vllm, Discriminator("kind")] = field(default_factory=Torch)
    """What samples: `generators` actors, or servers of vLLM, which Ray does not place."""
    learner: Annotated[OneProcess | Fsdp2, Discriminator("kind")] = field(default_factory=OneProcess)
    transport: Transport = field(default_factory=Transport)
    generator: Resources = field(default_factory=Resources)
    """Resources of each generator, and of the evaluator."""
    trainer: Resources = field(default_factory=Resources)
    """Resources of each process of a sharded learner."""
    verifier: Resources = field(default_factory=Resources)
    """Resources of each verifier, its processes included."""
    timeouts: ClusterTimeouts = field(default_factory=ClusterTimeouts)

    def __post_init__(self) -> None:
        if self.generators < 1 or self.trainers < 1:
            raise ValueError("generators and trainers must be at least 1")
        if self.verifiers < 0:
            raise ValueError("verifiers must not be negative")
        if self.learner.kind == "one" and self.trainers > 1:
            raise ValueError('learner.kind "one" is one trainer; "fsdp2" shards it over more')
        if self.trainers > 1 and 0 < self.trainer.gpus_or(1.0) < 1:
            raise ValueError("trainer.gpus must be 1 for several trainers: NCCL takes no two on one GPU")
        if isinstance(self.engine, Vllm):
            if self.generators > 1:
                raise ValueError(
                    "generators are the built-in engine's; vLLM has engine.servers or engine.urls"
                )
            if self.transport.kind != "object_store":
                raise ValueError("transport is the built-in engine's; vLLM has engine.transport")
        if self.transport.kind == "nccl":
            for name in ("generator", *["trainer"] * (self.learner.kind != "one")):
                if getattr(self, name).gpus_or(1.0) < 1:
                    raise ValueError(
                        f'transport.kind "nccl" needs a GPU for each: {name}.gpus = 1, or another kind'
                    )

    @property
    def processes(self) -> int:
        """Processes that decode."""
        if isinstance(self.engine, Vllm):
            return len(self.engine.urls) or self.engine.servers
        return self.generators

    @property
    def beside_ray(self) -> tuple[int, int]:
        """GPUs of the driver's machine that no actor may have: so many of the first, for a learner in the
        driver, and so many of the last, for the servers of vLLM that are started there."""
        engine, last = self.engine, 0
        if isinstance(engine, Vllm) and not engine.urls:
            last = engine.servers * engine.tensor_parallel
        return int(self.learner.kind == "one"), last

    def shares_gpu(self, here: float) -> bool:
        """Return whether a learner in the driver and a worker of vLLM share the only one of `here` GPUs."""
        nccl = isinstance(self.engine, Vllm) and self.engine.transport == "nccl"  # which needs two
        return here == 1 and self.beside_ray == (1, 1) and not nccl

    def with_gpus(self, there: float) -> Cluster:
        """Return the same with a number in place of every `auto`, on a cluster of `there` GPUs.

        Raises:
            InputError: there is none, and the transport needs them.
        """
        auto = 1.0 if there else 0.0

        def of(resources: Resources, n: float) -> Resources:
            return replace(resources, gpus=resources.gpus_or(n))

        fixed = {"generator": of(self.generator, auto), "trainer": of(self.trainer, auto)}
        try:
            return replace(self, **fixed, verifier=of(self.verifier, 0.0))
        except ValueError as error:
            raise InputError(f"[cluster] counts on GPUs, and there is none on this one ({error})") from error

    def evaluates_beside(self, there: float) -> bool:
        """Return whether the evaluation has half of the last generator's GPU, as none is left of `there`."""
        if not there or self.generator.gpus != "auto" or isinstance(self.engine, Vllm):
            return False
        fixed = self.with_gpus(there)
        taken = self.generators * fixed.generator.gpus_or(1.0) + self.verifiers * fixed.verifier.gpus_or(0.0)
        if self.learner.kind != "one":
            taken += self.trainers * fixed.trainer.gpus_or(1.0)
        return there < taken + 1

    def split(self, generators: int, trainers: int) -> Cluster:
        """Return the same with so many generators, or servers of vLLM, and trainers."""
        learner = Fsdp2() if trainers > 1 else self.learner
        if isinstance(self.engine, Vllm):
            engine = replace(self.engine, servers=generators)
            return replace(self, engine=engine, trainers=trainers, learner=learner)
        return replace(self, generators=generators, trainers=trainers, learner=learner)
