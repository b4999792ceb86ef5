"""Ranks of a process group on this machine: processes over gloo, bounded in time and killed at the end."""

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = 120.0
"""Seconds after which ranks that have not ended are killed, and the test fails."""


class Ranks:
    """Starts `work(rank, *args)` on every rank of a new process group, which must be a module's function."""

    def __init__(self, folder: Path, timeout: float = 60.0) -> None:
        self._folder, self._timeout = folder, timeout
        self._context: Any = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["scalerl.study.run.preload"])
        self._count = 0

    def __call__(
        self, n: int, work: Callable[..., Any], *args: Any, allow_failure: bool = False
    ) -> list[Any]:
        """What every rank returns; with `allow_failure` the text of its error where it ended with one."""
        self._count += 1
        place = self._folder / str(self._count)
        place.mkdir()
        port = free_port()
        rest = (n, port, self._timeout, str(place), work, args)
        started = [self._context.Process(target=_rank, args=(rank, *rest), daemon=True) for rank in range(n)]
        deadline = time.monotonic() + PATIENCE
        try:
            for process in started:
                process.start()
            for process in started:
                process.join(max(0.1, deadline - time.monotonic()))
        finally:
            hung = [rank for rank, process in enumerate(started) if process.exitcode is None]
            for process in started:
                process.kill()
                process.join()
        assert not hung, f"ranks {hung} hung"
        found = [_read(place / f"{rank}.pt") for rank in range(n)]
        failed = [result for kind, result in found if kind != "result"]
        assert allow_failure or not failed, "\n".join(failed)
        return [result for _, result in found]


def _rank(
    rank: int, n: int, port: int, timeout: float, place: str, work: Callable[..., Any], args: Any
) -> None:
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    seconds = timedelta(seconds=timeout)
    try:
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=n, timeout=seconds)
        found = "result", work(rank, *args)
        if dist.is_initialized():  # work may have ended it, and made another
            dist.destroy_process_group()
    except Exception:
        found = "error", traceback.format_exc()
    torch.save(found, f"{place}/{rank}.pt")


def _read(path: Path) -> tuple[str, Any]:
    if not path.exists():
        return "killed", "killed"
    return torch.load(path, weights_only=False)


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
