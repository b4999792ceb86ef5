"""Several processes: collectives, a peer that is lost, memory shared between processes.

NCCL takes one process per device: with one GPU the checks of collectives are skipped. On a CPU gloo is used.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from gpu_checks import SkippedError
from gpu_checks.lab import Lab

_SECONDS = 20


def shared_memory(lab: Lab) -> dict[str, Any]:
    """A tensor made here is read, and written, by another process without a copy."""
    context, n = mp.get_context("spawn"), lab.size(2**26, 2**10)
    values = torch.arange(n, dtype=torch.float32, device=lab.device)
    if lab.device.type == "cpu":
        values.share_memory_()
    queue, answers = context.Queue(), context.Queue()
    child = context.Process(target=_double, args=(queue, answers))
    child.start()
    started = time.perf_counter()
    queue.put(values)
    total = answers.get(timeout=60)
    took = time.perf_counter() - started
    child.join(30)
    expected = float(torch.arange(n, dtype=torch.float64).sum())
    assert abs(total - expected) < 1e-6 * expected, (total, expected)
    assert float(values[-1]) == 2.0 * (n - 1), "the other process wrote into a copy"
    return {"bytes": values.nbytes, "seconds_with_start": took}


def _double(queue: Any, answers: Any) -> None:
    values = queue.get()
    total = float(values.double().sum())
    values *= 2
    if values.is_cuda:
        torch.cuda.synchronize()
    del values  # before its owner may free it
    answers.put(total)


def collectives(lab: Lab) -> dict[str, Any]:
    """Broadcast and all-reduce of two ranks, each on its own device."""
    seconds = _two_ranks(lab, _collect)
    return {"broadcast_seconds": seconds, "backend": _backend(lab)}


def lost_peer(lab: Lab) -> dict[str, Any]:
    """Rank 1 is killed in a collective: rank 0 gets an error it can catch, and lives on."""
    return {"error_after_seconds": _two_ranks(lab, _lose), "backend": _backend(lab)}


def _two_ranks(lab: Lab, work: Any) -> float:
    """Run `work(rank, device, port)` in two processes; returns what rank 0 reports."""
    if lab.device.type == "cuda" and torch.cuda.device_count() < 2:
        raise SkippedError("NCCL needs a GPU per process, and there is one")
    context = mp.get_context("spawn")
    answers, store = context.Queue(), lab.folder / "store"
    ranks = [
        context.Process(target=_rank, args=(rank, lab.device.type, str(store), work, answers))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        found = answers.get(timeout=4 * _SECONDS)
    finally:
        for process in ranks:
            process.join(5)
            process.kill()
    if isinstance(found, str):
        raise AssertionError(found)
    return found


def _backend(lab: Lab) -> str:
    return "nccl" if lab.device.type == "cuda" else "gloo"


def _rank(rank: int, kind: str, store: str, work: Any, answers: Any) -> None:
    # An error in the collective must come to its caller: the watchdog would end the process.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=_SECONDS),
    )
    found = work(rank, device)
    if rank == 0:
        answers.put(found)


def _collect(rank: int, device: torch.device) -> float | str:
    values = torch.full((2**20,), float(rank + 1), device=device)
    dist.all_reduce(values)
    if values.unique().tolist() != [3.0]:
        return f"all-reduce gave {values.unique().tolist()}"
    started = time.perf_counter()
    dist.broadcast(values, 0)
    float(values[0])
    return time.perf_counter() - started


def _lose(rank: int, device: torch.device) -> float | str:
    values = torch.ones(2**20, device=device)
    dist.all_reduce(values)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.perf_counter()
    try:
        dist.all_reduce(values)
        float(values[0])
    except RuntimeError:
        return time.perf_counter() - started
    return "the collective came back without its peer"
