"""A learner on processes started by torchrun, or by this process in the way of torchrun.

    torchrun --nproc-per-node 2 -m scalerl train RECIPE

Rank 0 is the driver: it generates, verifies and writes. The other ranks wait for its commands: the name of a
method of `LearnerRank` and its arguments, as JSON followed by the arrays. No pickles are sent.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from scalerl.errors import InputError, OutOfMemoryError, ScalerlError, WorkerError
from scalerl.rl.checkpoint.store import with_arrays, without_arrays
from scalerl.rl.config.cluster import Fsdp2
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.learner.group import LearnerGroup, LearnerRank
from scalerl.rl.model.weights import WeightStream
from scalerl.rl.types import Done, Pending, Plan, Weights
from scalerl.rl.workers.ranks import free_port, losses, meet
from scalerl.rl.workers.signals import STOPPING

_IDLE = timedelta(days=30)
"""Longest wait of a rank for the next command: rank 0 may generate or evaluate for a long time. The exit of a
rank is noticed at once, by its closed connection."""
_STOP = "stop"
_END = 30.0  # seconds that ranks have to exit after the stop command, before they are killed


def timeout_of(recipe: Recipe) -> float:
    """Return the seconds that ranks wait for each other.

    Raises:
        InputError: the recipe has a cluster whose learner is not FSDP2.
    """
    if recipe.cluster is not None and not isinstance(recipe.cluster.learner, Fsdp2):
        raise InputError('cluster.learner.kind: torchrun starts several processes for "fsdp2" alone')
    return recipe.learner.timeout


def lead_or_follow(timeout: float, lead: Callable[[Callable[..., LearnerGroup]], None]) -> None:
    """Call `lead` on rank 0 with a function that makes the learner; the other ranks execute its commands.

    Raises:
        InputError: on every rank; torchrun has started more processes here than there are GPUs.
        WorkerError: a rank has exited, or has not responded for `timeout` seconds.
    """
    if torch.cuda.is_available():
        here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if here > gpus:
            raise InputError(f"torchrun: {here} processes need a GPU each here, and PyTorch sees {gpus}")
        # Before the process group is made: NCCL uses the device that is current then.
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with losses(timeout):
        meet(timeout)
    # A group of its own: waiting for a command may take hours, waiting within a step must not.
    commands, rank = dist.new_group(backend="gloo", timeout=_IDLE), LearnerRank()
    try:
        if dist.get_rank():
            _follow(rank, commands, timeout)
        else:
            leader = _Leader(rank, commands, timeout)
            with leader.stopping():
                lead(lambda recipe, folder: LearnerGroup(leader, recipe, folder))
    finally:
        dist.destroy_process_group()


@contextmanager
def local_ranks(n: int) -> Iterator[None]:
    """Start `n` - 1 more processes of this command, and set up all of them, this one included, like torchrun.

    They have no terminal, so signals reach only rank 0; they exit when their connection to it closes.
    """
    port = str(free_port("127.0.0.1"))  # free at this instant; rank 0 listens at it next
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    where |= {"WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n), "TORCHELASTIC_RUN_ID": "scalerl"}

    def of(rank: int) -> dict[str, str]:
        return {**where, "RANK": str(rank), "LOCAL_RANK": str(rank)}

    command, quiet = [sys.executable, "-m", "scalerl", *sys.argv[1:]], subprocess.DEVNULL
    others = [
        subprocess.Popen(command, env=os.environ | of(i), stdin=quiet, start_new_session=True)
        for i in range(1, n)
    ]
    before = dict(os.environ)
    os.environ.update(of(0))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        for process in others:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END)
            process.kill()
            process.wait()


class _Leader:
    """The `Ranks` of a driver that is itself rank 0."""

    def __init__(self, rank: LearnerRank, commands: Any, seconds: float) -> None:
        self._rank, self._commands, self._seconds = rank, commands, seconds
        self.size = dist.get_world_size()

    def all(self, name: str, *args: Any) -> Any:
        with losses(self._seconds):
            _send([name, *args], self._commands)
            return getattr(self._rank, name)(*args)

    def begin(self, name: str, *args: Any) -> Pending[Any]:
        """See `Ranks`: this process is a rank, so the work is done when this returns."""
        return Done(self.all(name, *args))

    def first(self, name: str, *args: Any) -> Any:
        return getattr(self._rank, name)(*args)

    def weights(self, plan: Plan) -> Weights:
        """See `Ranks`: this rank reads the weights as they are gathered, one block at a time."""
        return WeightStream(plan, self._gathered)

    def watch(self, stop: threading.Event, report: Callable[[int, int], None]) -> None:
        """See `Ranks`: this rank shares `stop` with the others before each micro-batch."""
        self._rank.learner.watch(stop, report)

    def _gathered(self) -> Iterator[tuple[str, Tensor]]:
        with losses(self._seconds):
            _send(["gather"], self._commands)
            yield from self._rank.learner.weights()

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Stop the other ranks at the end of the context.

        After a lost rank, or an error that is not a ScalerlError, they may be in a collective and receive no
        command: they exit when this process closes its connection.
        """
        try:
            yield
        except WorkerError:
            raise
        except ScalerlError:
            _send([_STOP], self._commands)
            raise
        _send([_STOP], self._commands)


def _follow(rank: LearnerRank, commands: Any, seconds: float) -> None:
    """Execute the commands of rank 0; errors that all ranks raise are reported by rank 0 alone."""
    for number in STOPPING:  # rank 0 handles these signals and stops this rank by a command
        signal.signal(number, signal.SIG_IGN)
    with losses(seconds):
        while (command := _receive(commands)) != [_STOP]:
            name, *args = command
            try:
                getattr(rank, name)(*args)
            except OutOfMemoryError:  # on this rank alone: the others notice its exit
                raise
            except ScalerlError:
                pass


def _send(tree: Any, group: Any) -> None:
    arrays: dict[str, Tensor] = {}
    plain = without_arrays(tree, arrays)
    shapes = {name: [str(a.dtype).removeprefix("torch."), list(a.shape)] for name, a in arrays.items()}
    # A bytearray, because PyTorch warns about read-only memory.
    text = torch.frombuffer(bytearray(json.dumps([plain, shapes]).encode()), dtype=torch.uint8)
    # The size first: a receiver must allocate before it can take part in the broadcast.
    dist.broadcast(torch.tensor(len(text)), 0, group=group)
    copies = [array.clone(memory_format=torch.contiguous_format) for array in arrays.values()]
    for part in (text, *map(_bytes, copies)):
        dist.broadcast(part, 0, group=group)


def _receive(group: Any) -> Any:
    size = torch.zeros((), dtype=torch.int64)
    dist.broadcast(size, 0, group=group)
    text = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(text, 0, group=group)
    plain, shapes = json.loads(bytes(text.numpy()))
    arrays = {}
    for name, (dtype, shape) in shapes.items():
        arrays[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        dist.broadcast(_bytes(arrays[name]), 0, group=group)
    return with_arrays(plain, arrays)


def _bytes(array: Tensor) -> Tensor:
    return array.reshape(-1).view(torch.uint8)
