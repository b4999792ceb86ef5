"""Ranks that fail together: an error on one is raised on all, which would otherwise wait for it."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from scalerl.errors import InputError, ScalerlError, WorkerError, WriteError, first_line

T = TypeVar("T")
_LONGEST = 1000  # most bytes of a message
_KINDS: tuple[type[ScalerlError], ...] = (InputError, WriteError)


def meet(seconds: float, **where: Any) -> None:
    """Make the process group of the ranks, with NCCL if there are GPUs; `where` is passed to PyTorch.

    Ranks wait for each other for at most `seconds`, now or later.
    """
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=seconds), **where)


def free_port(address: str) -> int:
    """Return a port that is free at this moment: at `address`, or on this machine if that is another's."""
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:  # the address is another machine's
            probe.bind(("", 0))
        return probe.getsockname()[1]


def store_at(address: str, port: int, size: int, leads: bool, seconds: float) -> Any:
    """Return the store by which processes find each other; the one that `leads` listens at `address` only.

    By default PyTorch's store would listen at all addresses of the machine.
    """
    listening = {}
    if leads:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening["master_listen_fd"] = socket.create_server((address, port), family=family).detach()
    c10d: Any = dist  # its stubs lack this
    limit = timedelta(seconds=seconds)
    return c10d.TCPStore(address, port, size, leads, limit, wait_for_workers=False, **listening)


def on_all_ranks(do: Callable[[], T]) -> T:
    """Return the result of `do` on this rank once it has returned on all ranks; collective.

    Raises:
        InputError: on every rank, with the message of the first rank on which `do` raised one.
        WriteError: likewise.
    """
    result, message = None, b""
    try:
        result = do()
    except _KINDS as error:
        kind = next(i for i, kind in enumerate(_KINDS) if isinstance(error, kind))
        message = bytes([kind + 1]) + str(error).encode()[: _LONGEST - 1]
    errors = torch.zeros(dist.get_world_size(), _LONGEST, dtype=torch.uint8)
    if message:
        errors[dist.get_rank(), : len(message)] = torch.tensor(list(message), dtype=torch.uint8)
    dist.all_reduce(errors)
    for row in errors:
        if row[0]:
            text = bytes(row[1:].tolist()).rstrip(b"\0").decode(errors="replace")
            raise _KINDS[int(row[0]) - 1](text)
    return result  # pyright: ignore[reportReturnType]


@contextmanager
def losses(seconds: float) -> Iterator[None]:
    """Raise PyTorch's errors about a lost rank as a WorkerError.

    Raises:
        WorkerError: a rank has exited, or has not responded for `seconds`.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:  # gloo raises either; NCCL raises DistError
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise WorkerError(
                f"learner: another of its processes has ended, or was silent for {seconds:g} s "
                f"({first_line(error)})"
            ) from error
        raise
