"""Transport of weights to vLLM's servers.

    FileTransport    a folder of safetensors files in memory for each version, removed once all have read it;
                     workers placed by Ray have their own files (`scalerl.rl.placement.ray.vllm`)
    IpcTransport     vLLM's own transfer by CUDA IPC, to workers on this machine
    NcclTransport    vLLM's own transfer by NCCL, with one group for each server

All send weights bucket by bucket, so that this process never has the whole model of a sharded learner.
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
"""Returns the target version of a server, and the result of `VllmTransport.hold` for it."""


class VllmTransport:
    """The base class of transports of weights to servers; by default they are files."""

    def hold(self, weights: Weights, version: int) -> Any:
        """Return the weights in a form that does not change; any thread may call this."""
        return hold(weights)

    async def chosen(self, server: VllmClient, choose: Choose) -> tuple[int, Any]:
        """Return the version that `choose` picks, and the source that `load` reads."""
        return choose()

    async def load(self, server: VllmClient, source: Any, seconds: float) -> dict[str, int]:
        """Make a paused server load the weights from `source`; return the progress of its completions."""
        return await server.call("install", str(source), seconds=seconds)

    def forget(self, server: VllmClient) -> None:
        """Drop the state of a server that is lost."""


def write_files(weights: Weights, path: Path) -> Path:
    """Write weights to the folder `path`, bucket by bucket, and return `path`.

    Raises:
        LearnerLostError: the weights do not arrive from the learner.
        WorkerError: they cannot be written, as without room.
    """
    aside = path.with_suffix(".part")
    try:
        aside.mkdir(parents=True)
        for i, bucket in enumerate(in_buckets(weights)):
            save_file(bucket, aside / f"{i:05}.safetensors")
        aside.replace(path)  # the folder is complete or absent
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
    """Weights, and once `written` a folder of them, which is removed with the last reference to this."""

    def __init__(self, weights: Weights, folder: Path, name: str) -> None:
        self._weights, self._folder, self._name = weights, folder, name
        self.written: asyncio.Task[None] | None = None

    def __str__(self) -> str:
        return str(self._folder / self._name)

    def write(self) -> None:
        """Write the files, and free the memory of the held weights."""
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        write_files(self._weights, self._folder / self._name)
        del self._weights


class FileTransport(VllmTransport):
    """The transport by files, which several servers read at once; the first to load a version writes them."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._numbers = folder, count()
        self._lock = asyncio.Lock()

    def hold(self, weights: Weights, version: int) -> _WeightFiles:
        """See `VllmTransport`."""
        return _WeightFiles(hold(weights), self._folder / str(next(self._numbers)), f"version-{version}")

    async def chosen(self, server: VllmClient, choose: Choose) -> tuple[int, _WeightFiles]:
        """See `VllmTransport`."""
        async with self._lock:  # other servers choose once these files are written
            version, files = choose()
            if files.written is None:
                # In a thread: writing gigabytes takes seconds, for which the event loop would receive no
                # completion. In a task of its own: it ends even if the server that asked is lost meanwhile.
                files.written = asyncio.create_task(asyncio.to_thread(files.write))
            await asyncio.wait([files.written])
        files.written.result()
        return version, files


class _GpuTransport(VllmTransport, ABC):
    """The base class of vLLM's own weight transfers, by its API of 0.32 (`vllm/distributed/weight_transfer`).

    Raises:
        InputError: there is no GPU here.
    """

    kind: ClassVar[str]

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise InputError(f'transport = "{self.kind}" needs a GPU here; "file" does not')
        self._joined: dict[VllmClient, Any] = {}
        """Servers that have joined, each with its group; `_join` adds them."""

    async def load(self, server: VllmClient, source: Weights, seconds: float) -> dict[str, int]:
        """See `VllmTransport`."""

        async def transfer(method: str, **info: Any) -> None:
            await server.call("transfer", method, info, seconds=seconds)

        if server not in self._joined:
            await self._join(server, transfer, seconds)
        await transfer("start_weight_update")
        sent = await self._send(server, source, transfer, seconds)
        await transfer("finish_weight_update")
        del sent  # only now: vLLM had the buffers open, so that PyTorch could not have freed them
        return await server.call("progress", seconds=seconds)

    def forget(self, server: VllmClient) -> None:
        """See `VllmTransport`."""
        self._joined.pop(server, None)

    @abstractmethod
    async def _join(self, server: VllmClient, transfer: _Transfer, seconds: float) -> None: ...

    @abstractmethod
    async def _send(self, server: VllmClient, source: Weights, transfer: _Transfer, seconds: float) -> Any:
        """Send the weights; return the buffers that must live until the update is finished."""


class IpcTransport(_GpuTransport):
    """The transport by CUDA IPC to workers on this machine, in their GPUs' memory. Run with one GPU so far.

    vLLM opens a buffer only on the GPU of its own rank, so this process copies each bucket to every GPU of
    the worker, and vLLM copies it from there into its model. An update uses one buffer on each GPU for all
    buckets: vLLM answers once its own copy is made (`WeightTransferEngine.update_weights` waits for the
    device), and PyTorch keeps a buffer that is dropped earlier until the other process has closed it.

    Raises:
        InputError: there is no GPU here, or PyTorch's allocator gives memory without an IPC handle.
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
        # In threads: allocation, and the next bucket of a sharded learner, from an object store, take time.
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
    """The transport by NCCL from the trainer's GPU to vLLM's. Never run: it needs vLLM and two GPUs.

    Each server has its own group, in which the trainer is rank 0. It makes the group's id, sends it to
    `/init_weight_transfer_engine`, and takes part in the all-reduce that vLLM starts with; then every update
    is one broadcast for each tensor, concurrent with `/update_weights`.
    """

    kind = "nccl"

    async def _join(self, server: VllmClient, transfer: _Transfer, seconds: float) -> None:
        world = await server.call("world_size", seconds=seconds) + 1
        name = nccl.unique_id()
        # Stored before joining: `forget` must abort it if the server is lost meanwhile.
        group = self._joined[server] = _Group()
        info = {"nccl_unique_id_b64": base64.b64encode(name).decode(), "rank_offset": 1, "world_size": world}
        await asyncio.gather(
            transfer("init_weight_transfer_engine", init_info=info | {"packed": False}),
            _in_thread(server, seconds, group.join, world, name),
        )

    def forget(self, server: VllmClient) -> None:
        """See `VllmTransport`; also abort kernels that wait for the server."""
        if group := self._joined.pop(server, None):
            # In a thread: NCCL frees memory, for which CUDA waits for all queued work.
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
    """Return the result of `do`, called in a daemon thread, because NCCL may wait forever for a lost peer.

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
    """A server's NCCL group, in which this process is rank 0; only a thread may join it and send.

    It has its own stream: on the default stream training would wait for a lost server, and on a stream for
    all groups the other servers would.
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
        with self._lock:  # `abort` frees the communicator: nothing may be queued on it afterwards
            if self._aborted:
                raise RuntimeError("the group was aborted")
            collective([tensor], comms=[self._comm])
        self._stream.synchronize()  # before the tensor's memory is reused

    def abort(self) -> None:
        """Abort the kernel that waits for the server.

        Otherwise it would occupy part of the GPU, and every synchronisation of the GPU would wait forever."""
        with self._lock:
            self._aborted = True
            if self._comm is None:
                return
            # PyTorch has no function for this; its communicator is a capsule around NCCL's ncclComm_t.
            python, capsule = ctypes.pythonapi, ctypes.py_object(self._comm)
            python.PyCapsule_GetName.restype = ctypes.c_char_p
            python.PyCapsule_GetPointer.restype = ctypes.c_void_p
            comm = python.PyCapsule_GetPointer(capsule, python.PyCapsule_GetName(capsule))
            python.PyCapsule_SetDestructor(capsule, None)  # it would free the communicator again
            ctypes.CDLL("libnccl.so.2").ncclCommAbort(ctypes.c_void_p(comm))
