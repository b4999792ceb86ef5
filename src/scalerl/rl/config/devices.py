"""Devices: those of a machine, their assignment to the processes of a run, and what GPU-hours count.

A device is a GPU. On a machine without GPUs, and on a cluster whose actors request none, it is a process.

    visible_gpus          the GPUs of this machine, without torch; free_of_gpus: their free memory
    assign                the devices of every process of a run on one machine
    Assignment.held       the devices that GPU-hours count (docs/reference/definitions.md)

A process gets its devices through CUDA_VISIBLE_DEVICES when it starts. The trainers have the first devices,
the generators the next, and evaluations a spare one, or else that of the last generator. If there are too
few, generators share: with each other, or with the trainer on a single device. vLLM workers have the last
devices, share only a single device, with the trainer, and also evaluate. On a cluster, Ray assigns devices.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from scalerl.errors import InputError, counted
from scalerl.rl.config.cluster import Cluster
from scalerl.rl.config.engine import BUILT_IN, AnyEngine, Vllm
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.config.settings import Local

VISIBLE = "CUDA_VISIBLE_DEVICES"
ASSUMED = "SCALERL_GPUS"
"""The environment variable that simulates the GPUs of another machine: `8x80` is eight of 80 GiB."""
_ASSUMED = re.compile(r"(\d+)x(\d+(?:\.\d+)?)")
_QUERY = ("--query-gpu=index,uuid,memory.total,memory.free", "--format=csv,noheader,nounits")


@dataclass(frozen=True)
class Gpu:
    """A GPU: its name in CUDA_VISIBLE_DEVICES, its memory and its free memory in bytes."""

    name: str
    memory: int
    free: int


@dataclass(frozen=True)
class HeldDevices:
    """Devices that GPU-hours count for one process of each role: all its own, or its part of a shared one.

    If vLLM servers evaluate too, the evaluator is all of them: their evaluations do not count as generation.
    """

    generator: float = 1.0
    trainer: float = 1.0
    evaluator: float = 1.0
    apart: float = 0.0
    """GPUs used only by evaluations or verifiers, in total: they are held even while idle."""

    @classmethod
    def of_vllm(
        cls, engine: Vllm, n: int, shared: bool, trainer: float = 1.0, apart: float = 0.0
    ) -> HeldDevices:
        """Return the devices held with `n` vLLM servers, one of which may share its GPU with the trainer."""
        if shared:
            return cls(generator=0.5, trainer=0.5, evaluator=0.5, apart=apart)
        each = float(engine.tensor_parallel)
        return cls(each, trainer, each * n, apart)

    @classmethod
    def on_cluster(
        cls, cluster: Cluster, engine: AnyEngine = BUILT_IN, here: int = 0, there: float = 0.0
    ) -> HeldDevices:
        """Return the devices held by actors, from their resource requests, and by vLLM servers.

        The driver's machine has `here` GPUs; the cluster has `there` for its actors.
        """
        sharded = cluster.learner.kind != "one"
        trainer = (cluster.trainer.gpus_or(1.0) or 1.0) if sharded else 1.0
        apart = cluster.verifiers * cluster.verifier.gpus_or(0.0)
        if isinstance(engine, Vllm):
            n = len(engine.urls) or cluster.generators
            return cls.of_vllm(engine, n, cluster.shares_gpu(engine, here), trainer, apart)
        of_actor = cluster.with_gpus(there).generator.gpus_or(1.0)
        if cluster.evaluates_beside(there):  # on a generator's GPU, which is counted already
            return cls(of_actor, trainer, of_actor / 2, apart)
        return cls(of_actor or 1.0, trainer, of_actor or 1.0, apart + of_actor)


@dataclass(frozen=True)
class Assignment:
    """The names of the devices of every process; empty on a machine without GPUs."""

    trainers: tuple[str, ...] = ()
    generators: tuple[str, ...] = ()
    """One entry per generator; that of a vLLM worker may list several, as in CUDA_VISIBLE_DEVICES. Also empty
    if generator and trainer take turns in one process."""
    evaluator: str | None = None
    """Also None if vLLM servers evaluate."""

    @property
    def used(self) -> frozenset[str]:
        """All devices in use by any process."""
        generating = (name for names in self.generators for name in names.split(","))
        return frozenset((*self.trainers, *generating, *([self.evaluator] if self.evaluator else ())))

    @property
    def shared(self) -> bool:
        """Whether a generator shares the device of the trainer."""
        return self.generators[:1] == self.trainers[:1] != ()

    @property
    def held(self) -> HeldDevices:
        """Return the devices that GPU-hours count for one process of each role.

        Processes that share a device count equal parts of it, which add up to the device. Evaluations have no
        part: their seconds are not on the compute axis, but a GPU used only by evaluations is.
        """
        users = Counter([*self.trainers, *self.generators])

        def of(names: Sequence[str]) -> float:
            # The mean, as parts can differ: those of five generators on two devices do.
            return sum(1 / users[name] for name in names) / len(names) if names else 1.0

        alone = self.evaluator is not None and self.evaluator not in users
        return HeldDevices(of(self.generators), of(self.trainers), apart=float(alone))


def assign(recipe: Recipe, gpus: Sequence[Gpu], trainers: int = 1) -> Assignment:
    """Assign `gpus`, those of one machine, to the processes of a run.

    Raises:
        InputError: there are fewer GPUs than trainers.
    """
    names = [gpu.name for gpu in gpus]
    if not names:
        return Assignment()
    if len(names) < trainers:
        raise InputError(f"--trainers: {trainers} trainers need a GPU each, and there are {len(names)}")
    if engine := recipe.vllm:
        workers = () if engine.urls else gpus_of_workers(engine, recipe.processes, names, trainers)
        return Assignment(tuple(names[:trainers]), tuple(",".join(of_worker) for of_worker in workers))
    rest = names[trainers:]
    generating = rest or names
    n = recipe.placement.generators if isinstance(recipe.placement, Local) else 0
    generators = tuple(generating[i % len(generating)] for i in range(n))
    left = [name for name in rest if name not in generators]
    evaluator = left[0] if left else generators[-1] if generators else names[0]
    return Assignment(tuple(names[:trainers]), generators, evaluator)


def gpus_of_workers(engine: Vllm, n: int, names: Sequence[str], trainers: int) -> tuple[tuple[str, ...], ...]:
    """Return the GPUs of each of `n` vLLM workers: the last of `names`, as the trainers have the first; a
    single GPU is shared with the trainer, and without `names` each has none.

    Raises:
        InputError: there are not enough.
    """
    each, there = engine.tensor_parallel, len(names)
    needed = trainers + n * each
    if not there:
        return ((),) * n
    if there < needed and not (there == n == trainers == 1 and engine.shares_gpu):
        beside = f", beside {counted(trainers, 'trainer')}," * bool(trainers)
        how = "lower generators, trainers or engine.tensor_parallel"
        if there == n == each == trainers == 1:
            how = 'they share one with engine.transport "auto", "file" or "ipc"'
        raise InputError(
            f"{counted(n, 'worker')} of vLLM with {counted(each, 'GPU')} each{beside} take {needed}, and "
            f"this machine has {there}: {how}"
        )
    first = there - n * each
    return tuple(tuple(names[first + i * each : first + (i + 1) * each]) for i in range(n))


def use_first(n: int) -> tuple[Gpu, ...]:
    """Restrict this process, and those that it starts, to the first `n` of its GPUs; return these.

    Raises:
        InputError: there are fewer.
    """
    gpus = visible_gpus()
    if n > len(gpus):
        raise InputError(f"--gpus {n}: this machine has {len(gpus)} ({ASSUMED}=8x80 simulates 8 of 80 GiB)")
    if os.environ.get(ASSUMED):
        os.environ[ASSUMED] = f"{n}x{gpus[0].memory / 2**30:g}"
    else:
        os.environ[VISIBLE] = ",".join(gpu.name for gpu in gpus[:n])
    return gpus[:n]


def visible_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that this process may use, from nvidia-smi, or those that `SCALERL_GPUS` simulates.

    It works without PyTorch, which knows more (`scalerl.rl.model.causal_lm.gpus_in_use`).

    Raises:
        InputError: SCALERL_GPUS does not have the form 8x80.
    """
    if assumed := os.environ.get(ASSUMED):
        if not (found := _ASSUMED.fullmatch(assumed)):
            raise InputError(f"{ASSUMED}: expected GPUs x GiB of each, like 8x80; found {assumed!r}")
        memory = round(float(found[2]) * 2**30)
        return tuple(Gpu(str(i), memory, memory) for i in range(int(found[1])))
    if (named := os.environ.get(VISIBLE)) is not None and named.strip() in ("", "-1"):
        return ()
    listed = _listed()
    if named is None:
        return tuple(gpu for gpu, _ in listed)
    found = list[Gpu]()
    for name in (name.strip() for name in named.split(",")):
        # A name is an index, a UUID or the start of one.
        of_name = [g for g, uuid in listed if name == g.name or (name and uuid.startswith(name))]
        if not of_name:  # CUDA ignores all names after the first invalid one
            break
        found.append(Gpu(name, of_name[0].memory, of_name[0].free))
    return tuple(found)


def free_of_gpus() -> dict[str, int]:
    """Return the free bytes of every GPU that nvidia-smi lists, by its UUID without the prefix `GPU-`."""
    return {uuid.removeprefix("GPU-"): gpu.free for gpu, uuid in _listed()}


def _listed() -> list[tuple[Gpu, str]]:
    """Return all GPUs of the machine, each with its UUID."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run([program, *_QUERY], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):  # the driver does not respond, and CUDA would not either
        return []
    rows = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines()]
    # The memory of a MIG slice, or of a GPU that uses the machine's memory, is [N/A].
    known = [row for row in rows if len(row) == 4 and row[2].isdigit() and row[3].isdigit()]
    return [(Gpu(name, int(total) * 2**20, int(free) * 2**20), uuid) for name, uuid, total, free in known]
