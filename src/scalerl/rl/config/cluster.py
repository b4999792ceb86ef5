"""What a recipe may say of a cluster: the table `[cluster]`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Discriminator

from scalerl.rl.config.bounds import positive
from scalerl.rl.config.fsdp import Fsdp2
from scalerl.rl.config.vllm import Vllm


@dataclass(frozen=True)
class OneProcess:
    """The learner of one process, in that of the driver."""

    kind: Literal["one"] = "one"


@dataclass(frozen=True)
class Torch:
    """The built-in generator, one for each actor."""

    kind: Literal["torch"] = "torch"


@dataclass(frozen=True)
class Transport:
    """How weights get from the learner to the generators."""

    kind: Literal["object_store", "gloo", "nccl"] = "object_store"
    """Ray's object store (shared memory within a node), or a broadcast in a process group of its own."""
    bucket_mib: float = 64.0
    """Tensors are sent in buckets of this size; a larger tensor is one of its own."""

    def __post_init__(self) -> None:
        positive(bucket_mib=self.bucket_mib)


@dataclass(frozen=True)
class Resources:
    """What a process is given of its node."""

    cpus: float = 1.0
    gpus: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.cpus < math.inf or not 0 <= self.gpus < math.inf or not self.cpus + self.gpus:
            raise ValueError("cpus and gpus must not be negative, and one of them positive")

    def bundle(self) -> dict[str, float]:
        """The same in the words of Ray."""
        return {name: n for name, n in (("CPU", self.cpus), ("GPU", self.gpus)) if n}


@dataclass(frozen=True)
class ClusterTimeouts:
    """Seconds after which what is waited for is given up: a process is then killed, and replaced."""

    start: float = 300.0
    """For room on the cluster, and for a process that loads its model."""
    heartbeat: float = 60.0
    """For a heartbeat."""
    decode: float = 600.0
    """For a generator that has something to sample to get on with it."""
    weights: float = 300.0
    """For weights on their way."""
    step: float = 3600.0
    """For a step of the learner, or a verifier's share of the completions. Evaluations have `timeouts`."""

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
    """What samples: `generators` actors, or servers of vLLM, which are not Ray's to place."""
    learner: Annotated[OneProcess | Fsdp2, Discriminator("kind")] = field(default_factory=OneProcess)
    transport: Transport = field(default_factory=Transport)
    generator: Resources = field(default_factory=Resources)
    """Of every generator, and of the evaluations, which have a process of their own."""
    trainer: Resources = field(default_factory=Resources)
    """Of every process of a learner that is sharded."""
    verifier: Resources = field(default_factory=Resources)
    """Of every verifier, its processes included."""
    timeouts: ClusterTimeouts = field(default_factory=ClusterTimeouts)

    def __post_init__(self) -> None:
        if self.generators < 1 or self.trainers < 1:
            raise ValueError("generators and trainers must be at least 1")
        if self.verifiers < 0:
            raise ValueError("verifiers must not be negative")
        if self.learner.kind == "one" and self.trainers > 1:
            raise ValueError('learner.kind "one" is one trainer; "fsdp2" shards it over more')
        if isinstance(self.engine, Vllm):
            if self.generators > 1:
                raise ValueError(
                    "generators are the built-in engine's; vLLM has engine.servers or engine.urls"
                )
            if self.transport.kind != "object_store":
                raise ValueError("transport is the built-in engine's; vLLM has engine.transport")
        if self.transport.kind == "nccl":
            without = [name for name in self._receivers_and_senders() if getattr(self, name).gpus < 1]
            if without:
                raise ValueError(
                    f'transport.kind "nccl" needs a GPU for each: {without[0]}.gpus = 1, or another kind'
                )

    def _receivers_and_senders(self) -> list[str]:
        return ["generator", *["trainer"] * (self.learner.kind != "one")]

    @property
    def processes(self) -> int:
        """Processes that decode."""
        if isinstance(self.engine, Vllm):
            return len(self.engine.urls) or self.engine.servers
        return self.generators

    @property
    def devices(self) -> int:
        """Devices whose time is counted: the generators and the trainers."""
        return self.processes + self.trainers

    @property
    def apart(self) -> bool:
        """Whether generators have devices of their own."""
        return True
