"""Memory of a GPU that a bucket of weights is put into, for a worker of vLLM to read by CUDA IPC.

by_dtype, back_to_back, update_info    a bucket as vLLM's IPCWeightTransferEngine of 0.32 unpacks it
IpcBuffer                              what it lies in
expandable_segments                    where that cannot be shared
"""

import base64
import os
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from scalerl.rl.sync.buckets import side_stream


def update_info(bucket: Mapping[str, Tensor], handles: Mapping[str, Any]) -> dict[str, Any]:
    """Return what vLLM's IPCWeightTransferUpdateInfo has of a bucket that is packed in the buffers of these
    handles."""
    return {
        "names": list(bucket),
        "dtype_names": [str(weight.dtype).removeprefix("torch.") for weight in bucket.values()],
        "shapes": [list(weight.shape) for weight in bucket.values()],
        "tensor_sizes": [weight.nbytes for weight in bucket.values()],
        # As a text: vLLM's own messages do not carry handles.
        "ipc_handles_pickled": base64.b64encode(pickle.dumps(dict(handles))).decode(),
    }


def by_dtype(bucket: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the tensors of each dtype: vLLM views each at its place, which its dtype must be aligned to."""
    parts: dict[torch.dtype, dict[str, Tensor]] = {}
    for name, weight in bucket.items():
        parts.setdefault(weight.dtype, {})[name] = weight
    return list(parts.values())


def back_to_back(bucket: Mapping[str, Tensor], buffer: Tensor) -> None:
    """Copy all tensors of a bucket, of one dtype, into an array of bytes in their order, without gaps."""
    start = 0
    for weight in bucket.values():
        place = buffer[start : start + weight.nbytes].view(weight.dtype).view(weight.shape)
        place.copy_(weight.detach())
        start += weight.nbytes


class IpcBuffer:
    """Memory of a GPU that another process reads."""

    def __init__(self, n_bytes: int, gpu: int) -> None:
        # vLLM is paused meanwhile: on the default stream, each bucket would wait for the training that is
        # queued there, and needs none of it, as the source is in the memory of the CPU.
        self._stream = side_stream(gpu)
        with torch.cuda.stream(self._stream):
            self._bytes = torch.empty(n_bytes, dtype=torch.uint8, device=torch.device("cuda", gpu))

    def handle(self) -> tuple[str, Any]:
        """Return the UUID of the GPU, and the handle; to be called once, as each call counts as a reader."""
        # vLLM waits for the current stream, of which the handle has an event: the default one trains.
        with torch.cuda.stream(self._stream):
            _, handle = reduce_tensor(self._bytes)
        return str(torch.cuda.get_device_properties(self._bytes.device).uuid), handle

    def fill(self, bucket: Mapping[str, Tensor]) -> None:
        """Put a bucket in place of the one before."""
        with torch.cuda.stream(self._stream):
            back_to_back(bucket, self._bytes)
        self._stream.synchronize()  # before another process reads it


def unshareable_memory() -> str:
    """Return the setting of PyTorch's allocator, of its environment or of a call since, by which processes
    cannot share its memory; empty where there is none.

    CUDA has no IPC handle for expandable segments: PyTorch passes descriptors, which the reader takes from
    this process (`pidfd_getfd`). Kernels allow that to processes that may trace it, which a child may not by
    default on Debian and Ubuntu (`kernel.yama.ptrace_scope`), nor in containers; where GPUs have fabric
    handles, the reader must have chosen these as well (`ExpandableSegment` in
    c10/cuda/CUDACachingAllocator.cpp). CUDA's own asynchronous allocator has none either.
    """
    live = getattr(torch._C, "_accelerator_getAllocatorSettings", None)  # not in older PyTorch
    named = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    found = (live() if live else named).replace(" ", "").lower().split(",")
    bad = "expandable_segments:True", "backend:cudaMallocAsync"
    return next((setting for setting in bad if setting.lower() in found), "")
