"""Weights on their way to vLLM's servers.

    FileTransport    a folder of safetensors files in memory for each version, removed once all have read it;
                     workers that Ray has placed have files of their own (`scalerl.rl.placement.ray.vllm`)
    IpcTransport     vLLM's own transfer by CUDA IPC, to workers of this machine
    NcclTransport    vLLM's own transfer by NCCL, with one group for each server

Either passes on weights bucket by bucket: what a sharded learner has put into an object store is never whole
in this process.
"""

from __future__ import annotations

import asyncio
import base64
import ctypes
import shutil
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.cuda import nccl

from scalerl.errors import InputError, LearnerLostError, WorkerError, brief_error
from scalerl.rl.sync.buckets import in_buckets, largest_bucket
from scalerl.rl.sync.ipc_buffers import IpcBuffer, by_dtype, unshareable_memory, update_info
from scalerl.rl.sync.shared_weights import hold
from scalerl.rl.sync.vllm_client import VllmClient
from scalerl.rl.types import Weights
from scalerl.rl.workers.backend import WorkerLostError

_Transfer = Callable[..., Coroutine[Any, Any, None]]
Choose = Callable[[], tuple[int, Any]]
"""Returns the version that a server is to have, and what `VllmTransport.hold` has returned of it."""


class VllmTransport:
    """Brings weights to servers, by files unless it says otherwise."""

    def hold(self, weights: Weights, version: int) -> Any:
        """Return the same weights as they stay, for as long as they are referred to; may be called by any
        thread."""
        return hold(weights)

    async def chosen(self, server: VllmClient, choose: Choose) -> tuple[int, Any]:
        """Return the version that is chosen, and the source that `load` reads."""
        return choose()

    async def load(self, server: VllmClient, source: Any, seconds: float) -> dict[str, int]:
        """Have a paused server load the weights, which are files; return the progress of its completions."""
        return await server.call("install", str(source), seconds=seconds)

    def forget(self, server: VllmClient) -> None:
        """Drop what is kept for a server that is lost."""


def write_files(weights: Weights, path: Path) -> Path:
    """Write weights to the folder `path`, bucket by bucket, and return it.

    Raises:
        LearnerLostError: they do not come from the learner.
        WorkerError: there is no room.
    """
    aside = path.with_suffix(".part")
    try:
        aside.mkdir(parents=True)
        for i, bucket in enumerate(in_buckets(weights)):
            save_file(bucket, aside / f"{i:05}.safetensors")
        aside.replace(path)  # whole, or not there
    except LearnerLostError:
        raise
    except Exception as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise WorkerError(
            f"the weights cannot be written to {path.parent} ({error}): more memory there (docker run "
            "--shm-size), or weights_folder names another place"
        ) from error
    return path


class _WeightFiles:
    """Weights, or once they are `written` a folder, which is removed when this is referred to no more."""

    def __init__(self, weights: Weights, folder: Path, name: str) -> None:
        self._weights, self._folder, self._name = weights, folder, name
        self.written: asyncio.Task[None] | None = None

    def __str__(self) -> str:
        return str(self._folder / self._name)

    def write(self) -> None:
        """Write the files; what was held is a model's worth of memory."""
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        write_files(self._weights, self._folder / self._name)
        del self._weights


class FileTransport(VllmTransport):
    """Brings weights to servers, several at a time; files are written for the first that loads a version."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._numbers = folder, count()
        self._lock = asyncio.Lock()

    def hold(self, weights: Weights, version: int) -> _WeightFiles:
        """See `VllmTransport`."""
        return _WeightFiles(hold(weights), self._folder / str(next(self._numbers)), f"version-{version}")

    async def chosen(self, server: VllmClient, choose: Choose) -> tuple[int, _WeightFiles]:
        """See `VllmTransport`."""
        async with self._lock:  # servers that ask meanwhile choose once these are written
            version, files = choose()
            if files.written is None:
                # In a thread: gigabytes take seconds to write, for which no completion of the loop would be
                # received. And to the end, though the server that asks may be lost meanwhile.
                files.written = asyncio.create_task(asyncio.to_thread(files.write))
            await asyncio.wait([files.written])
        files.written.result()
        return version, files


class _GpuTransport(VllmTransport, ABC):
    """vLLM's own transfer of weights, by its API of 0.32 (`vllm/distributed/weight_transfer`); methods as of
    `VllmTransport`.

    Raises:
        InputError: there is no GPU here.
    """

    kind: ClassVar[str]

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise InputError(f'transport = "{self.kind}" needs a GPU here; "file" does not')
        self._joined: dict[VllmClient, Any] = {}
        """Servers that have joined, each with what it is sent through; put there by `_join`."""

    async def load(self, server: VllmClient, source: Weights, seconds: float) -> dict[str, int]:
        """See `VllmTransport`."""

        async def transfer(method: str, **info: Any) -> None:
            await server.call("transfer", method, info, seconds=seconds)

        if server not in self._joined:
            await self._join(server, transfer, seconds)
        await transfer("start_weight_update")
        sent = await self._send(server, source, transfer, seconds)
        await transfer("finish_weight_update")
        del sent  # not before: until then vLLM has it open, and PyTorch would keep it without a user
        return await server.call("progress", seconds=seconds)

    def forget(self, server: VllmClient) -> None:
        """See `VllmTransport`."""
        self._joined.pop(server, None)

    @abstractmethod
    async def _join(self, server: VllmClient, transfer: _Transfer, seconds: float) -> None: ...

    @abstractmethod
    async def _send(self, server: VllmClient, source: Weights, transfer: _Transfer, seconds: float) -> Any:
        """Send the weights; return what has to stay until the update is finished."""


class IpcTransport(_GpuTransport):
    """Hands weights to workers of this machine in the memory of their GPUs; run with one GPU.

    vLLM opens a buffer only on the GPU of its own rank: this process copies each bucket to every GPU of the
    worker, and vLLM copies it from there into its model. An update has one buffer on each GPU, that every
    bucket is in: vLLM answers once its own copy is made (`WeightTransferEngine.update_weights` waits for the
    device), and PyTorch keeps a buffer that is dropped before until the other process has closed it.

    Raises:
        InputError: there is no GPU here, or PyTorch allocates what has no IPC handle.
    """

    kind = "ipc"

    def __init__(self) -> None:
        if setting := unshareable_memory():
            raise InputError(
                f'transport = "ipc" cannot share memory that PyTorch allocates with {setting}: take that out '
                'of PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF, or use transport = "file"'
            )
        super().__init__()

    async def _join(self, server: VllmClient, transfer: _Transfer, seconds: float) -> None:
        await transfer("init_weight_transfer_engine", init_info={"packed": True})
        self._joined[server] = None

    async def _send(self, server: VllmClient, source: Weights, transfer: _Transfer, seconds: float) -> Any:
        buckets = in_buckets(source)
        # In a thread: the weights of a sharded learner come from an object store.
        size = largest_bucket(source.plan)
        buffers = [await asyncio.to_thread(IpcBuffer, size, gpu) for gpu in server.gpus]
        handles = dict(buffer.handle() for buffer in buffers)
        while bucket := await asyncio.to_thread(next, buckets, None):
            for part in by_dtype(bucket):
                for buffer in buffers:
                    await asyncio.to_thread(buffer.fill, part)
                await transfer("update_weights", update_info=update_info(part, handles))
        return buffers


class NcclTransport(_GpuTransport):
    """Sends weights from the trainer's GPU to those of vLLM. Never run: no machine with vLLM and two GPUs was
    at hand.

    Each server is a group of its own, in which the trainer is rank 0: it makes the group's id, sends it to
    `/init_weight_transfer_engine`, and takes part in the one sum that vLLM starts with; then every update is
    one broadcast for each tensor, beside `/update_weights`.
    """

    kind = "nccl"

    async def _join(self, server: VllmClient, transfer: _Transfer, seconds: float) -> None:
        world = await server.call("world_size", seconds=seconds) + 1
        name = nccl.unique_id()
        # Kept before it is joined: `forget` has to end it if the server is lost meanwhile.
        group = self._joined[server] = _Group()
        info = {"nccl_unique_id_b64": base64.b64encode(name).decode(), "rank_offset": 1, "world_size": world}
        await asyncio.gather(
            transfer("init_weight_transfer_engine", init_info=info | {"packed": False}),
            _in_thread(server, seconds, group.join, world, name),
        )

    def forget(self, server: VllmClient) -> None:
        """See `VllmTransport`; what waits for the server on the GPU ends."""
        if group := self._joined.pop(server, None):
            # In a thread: NCCL frees memory, for which CUDA waits for all that is queued.
            threading.Thread(target=group.abort, name="nccl", daemon=True).start()

    async def _send(self, server: VllmClient, source: Weights, transfer: _Transfer, seconds: float) -> None:
        info = {
            "names": [spec.name for spec in source.plan],
            "dtype_names": [spec.dtype for spec in source.plan],
            "shapes": [list(spec.shape) for spec in source.plan],
        }
        await asyncio.gather(
            transfer("update_weights", update_info=info),
            _in_thread(server, seconds, self._joined[server].broadcast, source),
        )


async def _in_thread(server: VllmClient, seconds: float, do: Callable[..., Any], *args: Any) -> Any:
    """Return what `do` returns in a daemon thread: NCCL may never return from a peer that was lost.

    Raises:
        WorkerLostError: NCCL failed, or did not return in time.
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
        async with asyncio.timeout(seconds):
            return await asyncio.wrap_future(future)
    except TimeoutError as error:
        raise WorkerLostError(f"{server.name}: NCCL took longer than {seconds:g} s") from error
    except LearnerLostError:
        raise
    except Exception as error:
        raise WorkerLostError(f"{server.name}: NCCL: {brief_error(error)}") from error


class _Group:
    """A server's group of NCCL, of which this process is rank 0; only a thread joins it, and sends.

    It has a stream of its own: on the default stream training would wait for a server that is lost, and on
    one for all groups the other servers would.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._lock = threading.Lock()
        self._comm: Any = None
        self._aborted = False

    def join(self, world: int, name: bytes) -> None:
        self._comm = nccl.init_rank(world, name, 0)
        with torch.cuda.stream(self._stream):
            self._run(nccl.all_reduce, torch.zeros(1, device="cuda"))

    def broadcast(self, weights: Weights) -> None:
        with torch.cuda.stream(self._stream):
            for _, weight in weights:
                self._run(nccl.broadcast, weight.cuda())

    def _run(self, collective: Callable[..., None], tensor: Tensor) -> None:
        with self._lock:  # NCCL frees what `abort` is called with: nothing may be queued there after it
            if self._aborted:
                raise RuntimeError("the group was aborted")
            collective([tensor], comms=[self._comm])
        self._stream.synchronize()  # before the tensor's memory is used again

    def abort(self) -> None:
        """End the kernel that waits for the server: else it keeps its share of the GPU, and any
        synchronisation of the whole GPU waits for it without end."""
        with self._lock:
            self._aborted = True
            if self._comm is None:
                return
            # PyTorch has no call for it; its communicator is a capsule around NCCL's ncclComm_t.
            python, capsule = ctypes.pythonapi, ctypes.py_object(self._comm)
            python.PyCapsule_GetName.restype = ctypes.c_char_p
            python.PyCapsule_GetPointer.restype = ctypes.c_void_p
            comm = python.PyCapsule_GetPointer(capsule, python.PyCapsule_GetName(capsule))
            python.PyCapsule_SetDestructor(capsule, None)  # which destroys it a second time
            ctypes.CDLL("libnccl.so.2").ncclCommAbort(ctypes.c_void_p(comm))
