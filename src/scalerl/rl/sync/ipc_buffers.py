"""GPU memory for a bucket of weights, which a vLLM worker reads by CUDA IPC.

by_dtype, back_to_back, update_info    a bucket in the format of vLLM's IPCWeightTransferEngine of 0.32
IpcBuffer                              the memory of a bucket
unshareable_memory                     allocator settings with which memory cannot be shared
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
    """Return the fields of vLLM's IPCWeightTransferUpdateInfo for a bucket in the buffers of `handles`."""
    return {
        "names": list(bucket),
        "dtype_names": [str(weight.dtype).removeprefix("torch.") for weight in bucket.values()],
        "shapes": [list(weight.shape) for weight in bucket.values()],
        "tensor_sizes": [weight.nbytes for weight in bucket.values()],
        # As text: vLLM's own messages cannot carry handles.
        "ipc_handles_pickled": base64.b64encode(pickle.dumps(dict(handles))).decode(),
    }


def by_dtype(bucket: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the tensors grouped by dtype: vLLM views a tensor in place, which requires aligned offsets."""
    parts: dict[torch.dtype, dict[str, Tensor]] = {}
    for name, weight in bucket.items():
        parts.setdefault(weight.dtype, {})[name] = weight
    return list(parts.values())


def back_to_back(bucket: Mapping[str, Tensor], buffer: Tensor) -> None:
    """Copy all tensors of a bucket, of one dtype, into an array of bytes, in order and without gaps."""
    start = 0
    for weight in bucket.values():
        place = buffer[start : start + weight.nbytes].view(weight.dtype).view(weight.shape)
        place.copy_(weight.detach())
        start += weight.nbytes


class IpcBuffer:
    """GPU memory that another process reads."""

    def __init__(self, n_bytes: int, gpu: int) -> None:
        # A side stream, because vLLM is paused meanwhile: on the default stream each bucket would wait for
        # queued training, although its source is in CPU memory and does not depend on it.
        self._stream = side_stream(gpu)
        with torch.cuda.stream(self._stream):
            self._bytes = torch.empty(n_bytes, dtype=torch.uint8, device=torch.device("cuda", gpu))

    def handle(self) -> tuple[str, Any]:
        """Return the UUID of the GPU, and the handle; call this once, as each call counts as a reader."""
        # vLLM waits for an event of the current stream, which must not be the default one, which trains.
        with torch.cuda.stream(self._stream):
            _, handle = reduce_tensor(self._bytes)
        return str(torch.cuda.get_device_properties(self._bytes.device).uuid), handle

    def fill(self, bucket: Mapping[str, Tensor]) -> None:
        """Replace the content by a bucket."""
        with torch.cuda.stream(self._stream):
            back_to_back(bucket, self._bytes)
        self._stream.synchronize()  # must be complete before another process reads it


def unshareable_memory() -> str:
    """Return the setting of PyTorch's allocator with which processes cannot share its memory, or "".

    The setting may come from the environment or from a later call. CUDA has no IPC handle for expandable
    segments: PyTorch passes descriptors, which the reader fetches from this process (`pidfd_getfd`). Kernels
    allow this only to processes that may trace it, which a child may not by default on Debian and Ubuntu
    (`kernel.yama.ptrace_scope`), nor in containers. With fabric handles, the reader must have chosen them too
    (`ExpandableSegment` in c10/cuda/CUDACachingAllocator.cpp). CUDA's asynchronous allocator has no handle.
    """
    live = getattr(torch._C, "_accelerator_getAllocatorSettings", None)  # not in older PyTorch
    named = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    found = (live() if live else named).replace(" ", "").lower().split(",")
    bad = "expandable_segments:True", "backend:cudaMallocAsync"
    return next((setting for setting in bad if setting.lower() in found), "")
