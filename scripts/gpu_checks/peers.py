"""Several processes: collectives, a lost peer, memory shared between processes.

NCCL needs a device per process: with one GPU the checks of collectives are skipped. On a CPU gloo is used.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from gpu_checks import SkippedError
from gpu_checks.lab import Lab
from scalerl.rl.sync.ray_weights import BroadcastGroup, Joined
from scalerl.rl.workers.ranks import free_port

_SECONDS = 20


def shared_memory(lab: Lab) -> dict[str, Any]:
    """Check that another process reads and writes a tensor of this one without a copy."""
    context, n = mp.get_context("spawn"), lab.size(2**26, 2**10)
    values = (torch.arange(n, device=lab.device) % 1024).float()  # exact in float32, and so are their doubles
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
    assert total == n / 1024 * (1023 * 1024 / 2), total
    assert float(values[-1]) == 2 * 1023, "the other process wrote into a copy"
    return {"bytes": values.nbytes, "seconds_with_start": took}


def _double(queue: Any, answers: Any) -> None:
    values = queue.get()
    total = float(values.double().sum())
    values *= 2
    if values.is_cuda:
        torch.cuda.synchronize()
    del values  # before its owner may free the memory
    answers.put(total)


def collectives(lab: Lab) -> dict[str, Any]:
    """Check an all-reduce and time a broadcast of two ranks, each on its own device."""
    seconds = _two_ranks(lab, _collect)
    return {"broadcast_seconds": seconds, "backend": _backend(lab)}


def lost_peer(lab: Lab) -> dict[str, Any]:
    """Kill a receiver of a weight broadcast: the sender must get an error and go on with another receiver.

    On a GPU the sender is also in a group of its own, like a learner that runs as actors.
    """
    groups = [
        BroadcastGroup(_backend(lab), "127.0.0.1", free_port("127.0.0.1"), 2, _SECONDS) for _ in range(2)
    ]
    roles = [(_send, 0), (_receive_and_die, 1), (_receive, 1)]
    seconds = _processes(lab, [(role, lab.device.type, device, groups) for role, device in roles])
    return {"error_after_seconds": seconds, "backend": _backend(lab)}


def _two_ranks(lab: Lab, work: Any) -> float:
    """Run `work(rank, device)` in two processes of a group; return what rank 0 reports."""
    store = str(lab.folder / "store")
    return _processes(lab, [(_rank, lab.device.type, rank, store, work) for rank in range(2)])


def _processes(lab: Lab, calls: Sequence[tuple[Any, ...]]) -> float:
    """Run functions in processes; return what one of them puts into the queue, their last argument."""
    if lab.device.type == "cuda" and torch.cuda.device_count() < 2:
        raise SkippedError("NCCL needs a GPU per process, and there is one")
    context = mp.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=call[0], args=(*call[1:], answers)) for call in calls]
    for process in ranks:
        process.start()
    try:
        found = answers.get(timeout=6 * _SECONDS)
    finally:
        for process in ranks:
            process.join(5)
            process.kill()
    if isinstance(found, str):
        raise AssertionError(found)
    return found


def _backend(lab: Lab) -> str:
    return "nccl" if lab.device.type == "cuda" else "gloo"


def _device(kind: str, number: int) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(number)
    return torch.device(kind, number)


def _rank(kind: str, rank: int, store: str, work: Any, answers: Any) -> None:
    device = _device(kind, rank)
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


def _send(kind: str, device: int, groups: Sequence[BroadcastGroup], answers: Any) -> None:
    values = torch.ones(2**20, device=_device(kind, device))
    if kind == "cuda":
        # The monitor of a process's first group aborts it, by default 8 minutes after an error.
        os.environ |= {
            "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "5",
            "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000",
            "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN": "0",
        }
        address = f"tcp://127.0.0.1:{free_port('127.0.0.1')}"
        dist.init_process_group("nccl", init_method=address, rank=0, world_size=1)
        dist.all_reduce(torch.ones(1, device=values.device))
    Joined.of(groups[0], 0).broadcast(values)
    started = time.perf_counter()
    try:
        for _ in range(100):  # the receiver has died by then
            Joined.of(groups[0], 0).broadcast(values)
            time.sleep(0.1)
        answers.put("broadcasts went on without their receiver")
    except RuntimeError:
        Joined.leave()
        took = time.perf_counter() - started
        Joined.of(groups[1], 0).broadcast(2 * values)
        # Outlive both: a watchdog would end the process within a few seconds, and the monitor 5 s after its
        # dump (1 s of polling, 2 s of dumps).
        time.sleep(30 if kind == "cuda" else 5)
        answers.put(took)


def _receive_and_die(kind: str, device: int, groups: Sequence[BroadcastGroup], answers: Any) -> None:
    Joined.of(groups[0], 1).broadcast(torch.zeros(2**20, device=_device(kind, device)))
    os.kill(os.getpid(), signal.SIGKILL)


def _receive(kind: str, device: int, groups: Sequence[BroadcastGroup], answers: Any) -> None:
    values = torch.zeros(2**20, device=_device(kind, device))
    deadline = time.monotonic() + 3 * _SECONDS
    while True:  # until the sender has reached the second group
        try:
            Joined.of(groups[1], 1).broadcast(values)
            break
        except RuntimeError:
            Joined.leave()
            if time.monotonic() > deadline:
                raise
    if values.unique().tolist() != [2.0]:
        answers.put(f"the second broadcast gave {values.unique().tolist()}")
