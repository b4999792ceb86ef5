"""Weights from the trainer's GPU to those of vLLM, by vLLM's transfer over NCCL.

By its documented API (vLLM 0.32, `vllm/distributed/weight_transfer/nccl_engine.py`), and never run: no
machine with vLLM and GPUs was at hand. Each server is a group of its own, in which the trainer is rank 0: it
makes the group's id, sends it to `/init_weight_transfer_engine`, and takes part in the one sum that vLLM
begins with; then every update is `/start_weight_update`, `/update_weights` beside one broadcast for each
tensor, and `/finish_weight_update`. The threads in which it does so are waited for in the loop, with a limit,
and not at the end of the process: NCCL may never come back from a peer that has died.
"""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import torch
from torch.cuda import nccl

from scalerl.errors import InputError, LearnerLostError, brief_error
from scalerl.rl.sync.buckets import buckets_of, layout_of
from scalerl.rl.sync.vllm_http import Gone, VllmServer
from scalerl.rl.types import Weights


class NcclTransport:
    """See `scalerl.rl.sync.vllm_http.VllmTransport`.

    Raises:
        InputError: there is no GPU here.
    """

    def __init__(self, weights: Weights, version: int) -> None:
        if not torch.cuda.is_available():
            raise InputError('transport = "nccl" needs a GPU for the trainer; "file" does not')
        self._groups: dict[VllmServer, Any] = {}
        self.offer(weights, version)

    def offer(self, weights: Weights, version: int) -> None:
        """See `Transport`."""
        self._weights, self.version = weights, version

    @asynccontextmanager
    async def newest(self) -> AsyncIterator[tuple[int, Weights]]:
        """See `Transport`."""
        yield self.version, self._weights

    async def load(self, server: VllmServer, source: Weights, seconds: float) -> Any:
        """See `Transport`."""
        if server not in self._groups:
            self._groups[server] = await self._join(server, seconds)
        layout = layout_of(source)
        info = {
            "names": [name for name, _ in layout],
            "dtype_names": ["float32"] * len(layout),
            "shapes": [list(shape) for _, shape in layout],
        }
        await server.ask("/start_weight_update", {}, seconds=seconds)
        await asyncio.gather(
            server.ask("/update_weights", {"update_info": info}, seconds=seconds),
            _aside(server, seconds, _broadcast, source, self._groups[server]),
        )
        await server.ask("/finish_weight_update", {}, seconds=seconds)
        return await server.progress(seconds)

    def forget(self, server: VllmServer) -> None:
        """See `Transport`."""
        self._groups.pop(server, None)

    async def _join(self, server: VllmServer, seconds: float) -> Any:
        world = (await server.ask("/get_world_size", seconds=seconds))["world_size"] + 1
        name = nccl.unique_id()
        info = {"nccl_unique_id_b64": base64.b64encode(name).decode(), "rank_offset": 1, "world_size": world}
        info |= {"packed": False}
        _, group = await asyncio.gather(
            server.ask("/init_weight_transfer_engine", {"init_info": info}, seconds=seconds),
            _aside(server, seconds, _first, world, name),
        )
        return group


async def _aside(server: VllmServer, seconds: float, do: Callable[..., Any], *args: Any) -> Any:
    """What `do` returns, in a thread of its own.

    Raises:
        Gone: NCCL failed, or did not come back in time.
    """
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(do(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="nccl", daemon=True).start()
    try:
        return await asyncio.wait_for(asyncio.wrap_future(future), seconds)
    except TimeoutError as error:
        raise Gone(f"{server.name}: NCCL took longer than {seconds:g} s") from error
    except LearnerLostError:
        raise
    except Exception as error:
        raise Gone(f"{server.name}: NCCL: {brief_error(error)}") from error


def _first(world: int, name: bytes) -> Any:
    group = nccl.init_rank(world, name, 0)
    nccl.all_reduce([torch.zeros(1, device="cuda")], comms=[group])
    torch.cuda.synchronize()
    return group


def _broadcast(weights: Weights, group: Any) -> None:
    for bucket in buckets_of(weights):
        for weight in bucket.values():
            nccl.broadcast([torch.from_numpy(np.array(weight)).cuda()], root=0, comms=[group])
            torch.cuda.synchronize()  # before the tensor's memory is used again
