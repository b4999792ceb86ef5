"""Weights for vLLM in the memory of a GPU, for which memory of the CPU stands in."""

import asyncio
import base64
import pickle
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scalerl.errors import InputError
from scalerl.rl.model.weights import WeightStream
from scalerl.rl.sync import vllm_weights
from scalerl.rl.sync.buckets import in_buckets, largest_bucket
from scalerl.rl.sync.ipc_buffers import IpcBuffer
from scalerl.rl.sync.shared_weights import hold
from scalerl.rl.sync.vllm_weights import IpcTransport

MIB = 2**20


def weights():
    """An embedding that is larger than a bucket, blocks that fill two, and a norm of another dtype."""
    blocks = {f"block.{i}": torch.randn(6 * MIB).bfloat16() for i in range(8)}
    return WeightStream.of({"embedding": torch.randn(20 * MIB), **blocks, "norm": torch.randn(3, 5).T})


class HostBuffer(IpcBuffer):
    """A buffer in the memory of the CPU, which a peer finds by its handle."""

    made: list[weakref.ref["HostBuffer"]]
    exported: dict[int, torch.Tensor]

    def __init__(self, n_bytes, gpu):
        self.gpu, self._stream = gpu, SimpleNamespace(synchronize=lambda: None)
        self._bytes = torch.empty(n_bytes, dtype=torch.uint8)
        HostBuffer.made.append(weakref.ref(self))

    def handle(self):
        HostBuffer.exported[len(HostBuffer.exported)] = self._bytes
        return f"GPU-{self.gpu}", len(HostBuffer.exported) - 1


class Peer:
    """A worker with two GPUs: reads the buffers when it is told to, and has them open until the end."""

    name, gpus = "vLLM worker 0", (1, 2)

    def __init__(self):
        self.read: dict[str, dict[str, torch.Tensor]] = {f"GPU-{gpu}": {} for gpu in self.gpus}
        self.alive_at_finish: list[bool] = []

    async def call(self, method, *arguments, seconds):
        if method != "transfer":
            return {}
        what, info = arguments
        if what == "update_weights":
            self._read(info["update_info"])
        if what == "finish_weight_update":
            self.alive_at_finish = [buffer() is not None for buffer in HostBuffer.made]
        return None

    def _read(self, info):
        handles = pickle.loads(base64.b64decode(info["ipc_handles_pickled"]))
        for uuid, handle in handles.items():
            parts = HostBuffer.exported[handle][: sum(info["tensor_sizes"])].split(info["tensor_sizes"])
            described = zip(info["names"], info["dtype_names"], info["shapes"], parts, strict=True)
            for name, dtype, shape, part in described:
                self.read[uuid][name] = part.clone().view(getattr(torch, dtype)).view(shape)


@pytest.fixture
def ipc(monkeypatch):
    HostBuffer.made, HostBuffer.exported = [], {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(vllm_weights, "IpcBuffer", HostBuffer)


def test_an_update_by_ipc_takes_one_buffer_of_a_gpu_which_stays_until_it_is_finished(ipc):
    source = hold(weights())
    peer: Any = Peer()
    asyncio.run(IpcTransport().load(peer, source, 60.0))
    for uuid in ("GPU-1", "GPU-2"):
        assert peer.read[uuid].keys() == dict(source).keys()
        assert all(torch.equal(peer.read[uuid][name], weight) for name, weight in source)
    sizes = [len(buffer) for buffer in HostBuffer.exported.values()]
    assert sizes == [largest_bucket(source.plan)] * 2 == [80 * MIB] * 2
    assert peer.alive_at_finish == [True, True]
    assert [buffer() for buffer in HostBuffer.made] == [None, None]


@pytest.mark.parametrize("bucket_mib", [1.0, 10.0, 64.0, 1000.0])
def test_no_bucket_is_larger_than_what_is_allocated_for_the_largest(bucket_mib):
    source = weights()
    found = [sum(w.nbytes for w in bucket.values()) for bucket in in_buckets(source, bucket_mib)]
    assert max(found) <= largest_bucket(source.plan, bucket_mib) <= max(80, bucket_mib) * MIB


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ("expandable_segments:True", "expandable_segments:True"),
        ("max_split_size_mb:512, expandable_segments:True", "expandable_segments:True"),
        ("expandable_segments:False", None),
    ],
)
def test_memory_that_has_no_ipc_handle_is_refused_before_a_worker_starts(ipc, settings, named):
    before = torch._C._accelerator_getAllocatorSettings()
    torch._C._accelerator_setAllocatorSettings(settings)
    try:
        if named is None:
            IpcTransport()
            return
        with pytest.raises(InputError, match=rf'transport = "ipc" cannot .*{named}.*use transport = "file"'):
            IpcTransport()
    finally:
        torch._C._accelerator_setAllocatorSettings(before or "expandable_segments:False")
