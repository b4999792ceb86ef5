"""The table `[cluster]` of a recipe: which processes run as Ray actors, and with what."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from pydantic import Discriminator

from scalerl.errors import InputError
from scalerl.rl.config.engine import BUCKET_MIB, BUILT_IN, AnyEngine, Vllm
from scalerl.rl.config.settings import positive


@dataclass(frozen=True)
class OneProcess:
    """The learner in the process of the driver."""

    kind: Literal["one"] = "one"


@dataclass(frozen=True)
class Fsdp2:
    """The learner sharded by PyTorch FSDP2 over `trainers` actors; the table `[learner]` says how."""

    kind: Literal["fsdp2"] = "fsdp2"


@dataclass(frozen=True)
class Transport:
    """Transport of weights from the learner to the generators."""

    kind: Literal["object_store", "gloo", "nccl"] = "object_store"
    """Ray's object store (shared memory within a node), or a broadcast in a separate process group."""
    bucket_mib: float = BUCKET_MIB
    """Size of the buckets in which tensors are sent; a larger tensor is a bucket of its own."""

    def __post_init__(self) -> None:
        positive(bucket_mib=self.bucket_mib)


@dataclass(frozen=True)
class Resources:
    """The resource request of an actor."""

    cpus: float = 1.0
    gpus: float | Literal["auto"] = "auto"
    """`auto` is 1 on a cluster that has GPUs, but 0 for a verifier; a fraction such as 0.5 shares a GPU."""

    def __post_init__(self) -> None:
        gpus = self.gpus_or(0.0)
        if not 0 <= self.cpus < math.inf or not 0 <= gpus < math.inf or not self.cpus + gpus:
            raise ValueError("cpus and gpus must not be negative, and one of them positive")

    def gpus_or(self, auto: float) -> float:
        """Return the number of GPUs, with the argument in place of `auto`."""
        return auto if self.gpus == "auto" else self.gpus

    def bundle(self) -> dict[str, float]:
        """Return the request under Ray's names; `auto` counts as no GPU."""
        return {name: n for name, n in (("CPU", self.cpus), ("GPU", self.gpus_or(0.0))) if n}


@dataclass(frozen=True)
class ClusterTimeouts:
    """Seconds to wait for a process before it is killed and replaced."""

    start: float = 300.0
    """Seconds for the cluster to place a process, and for the process to load its model."""
    heartbeat: float = 60.0
    """Seconds without a heartbeat."""
    decode: float = 600.0
    """Seconds without progress of a generator that has work."""
    weights: float = 300.0
    """Seconds for a weight update."""
    step: float = 3600.0
    """Seconds for a step of the learner, or for a verifier's completions; evaluations have `timeouts`."""

    def __post_init__(self) -> None:
        positive(**vars(self))


@dataclass(frozen=True)
class Cluster:
    """A run whose parts are Ray actors; their placement has no effect on what is trained."""

    generators: int = 1
    """Actors that decode; each may run a vLLM worker."""
    trainers: int = 1
    verifiers: int = 0
    """Actors that verify, each with the processes of `task.limits`; 0 runs these beside the driver."""
    address: str = "auto"
    """`auto` joins the cluster of this machine, `local` starts one on this machine; or HOST:PORT."""
    learner: Annotated[OneProcess | Fsdp2, Discriminator("kind")] = field(default_factory=OneProcess)
    transport: Transport = field(default_factory=Transport)
    generator: Resources = field(default_factory=Resources)
    """Resources of each generator and of the evaluator; a vLLM worker has `engine.tensor_parallel` GPUs."""
    trainer: Resources = field(default_factory=Resources)
    """Resources of each process of a sharded learner."""
    verifier: Resources = field(default_factory=Resources)
    """Resources of each verifier, including its processes."""
    timeouts: ClusterTimeouts = field(default_factory=ClusterTimeouts)

    def __post_init__(self) -> None:
        if self.generators < 1 or self.trainers < 1:
            raise ValueError("generators and trainers must be at least 1")
        if self.verifiers < 0:
            raise ValueError("verifiers must not be negative")
        if self.address not in ("auto", "local") and not re.fullmatch(r".+:\d+", self.address):
            raise ValueError('address must be "auto", "local" or HOST:PORT')
        if self.learner.kind == "one" and self.trainers > 1:
            raise ValueError('learner.kind "one" is one trainer; "fsdp2" shards it over more')
        if self.trainers > 1 and 0 < self.trainer.gpus_or(1.0) < 1:
            raise ValueError("trainer.gpus must be 1 for several trainers: NCCL takes no two on one GPU")
        if self.transport.kind == "nccl":
            for name in ("generator", *["trainer"] * (self.learner.kind != "one")):
                if getattr(self, name).gpus_or(1.0) < 1:
                    raise ValueError(
                        f'transport.kind "nccl" needs a GPU for each: {name}.gpus = 1, or another kind'
                    )

    def check_vllm(self, engine: Vllm) -> None:
        """Raise a ValueError unless these settings allow placing vLLM workers and sending them weights."""
        if self.transport.kind != "object_store":
            raise ValueError("cluster.transport is the built-in engine's; vLLM has engine.transport")
        if self.generator.gpus not in ("auto", 0, engine.tensor_parallel):
            raise ValueError("cluster.generator.gpus: vLLM's workers have engine.tensor_parallel")
        if engine.transport == "ipc" and self.address != "local":
            raise ValueError(
                'engine.transport "ipc" needs workers on this machine, and Ray places them on any node: '
                'leave it out, or set cluster.address to "local"'
            )

    @property
    def beside_ray(self) -> int:
        """GPUs of the driver's machine that its learner uses; actors get them only if there are no others."""
        return int(self.learner.kind == "one")

    def shares_gpu(self, engine: AnyEngine, here: float) -> bool:
        """Whether a learner in the driver and a vLLM worker share the machine's only GPU (`here` = 1)."""
        own = isinstance(engine, Vllm) and engine.shares_gpu and not engine.urls
        return own and self.address == "local" and here == self.generators == self.beside_ray == 1

    def with_gpus(self, there: float, engine: AnyEngine = BUILT_IN) -> Cluster:
        """Return a copy with a number in place of every `auto`, for a cluster of `there` GPUs.

        Raises:
            InputError: the cluster has no GPUs, and the transport needs them.
        """
        auto = 1.0 if there else 0.0
        each = engine.tensor_parallel if isinstance(engine, Vllm) else 1

        def of(resources: Resources, n: float) -> Resources:
            return replace(resources, gpus=resources.gpus_or(n))

        fixed = {"generator": of(self.generator, auto * each), "trainer": of(self.trainer, auto)}
        try:
            return replace(self, **fixed, verifier=of(self.verifier, 0.0))
        except ValueError as error:
            raise InputError(f"[cluster] requires GPUs, and this cluster has none ({error})") from error

    def evaluates_beside(self, there: float) -> bool:
        """Return whether the built-in engine's evaluation takes half of the last generator's GPU, because
        none of the `there` GPUs is left."""
        if not there or self.generator.gpus != "auto":
            return False
        fixed = self.with_gpus(there)
        taken = self.generators * fixed.generator.gpus_or(1.0) + self.verifiers * fixed.verifier.gpus_or(0.0)
        if self.learner.kind != "one":
            taken += self.trainers * fixed.trainer.gpus_or(1.0)
        return there < taken + 1

    def split(self, generators: int, trainers: int) -> Cluster:
        """Return a copy with other numbers of generators and trainers."""
        learner = Fsdp2() if trainers > 1 else self.learner
        return replace(self, generators=generators, trainers=trainers, learner=learner)
