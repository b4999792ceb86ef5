"""Memory that was freed goes back to the system; a worker of vLLM has its share of the trainer's GPU."""

import platform
import subprocess
import sys

import pytest
import torch

from scalerl.rl.config.memory import CONTEXT
from scalerl.rl.model.out_of_memory import leave_share

PROGRAM = """
import numpy as np
import psutil
from scalerl.rl.model.out_of_memory import return_freed_memory

def resident_mib():
    return psutil.Process().memory_info().rss / 2**20

blocks = [(np.ones(12_800), np.ones(16)) for _ in range(1000)]  # 100 KiB each, and what stays between them
full = resident_mib()
kept = [small for _, small in blocks]
del blocks
freed = resident_mib()
return_freed_memory()
print(full - freed, full - resident_mib())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_goes_back_to_the_system():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    by_itself, when_asked = map(float, done.stdout.split())
    assert by_itself < 10
    assert when_asked > 80


class SharedGpu:
    """A GPU of 80 GiB: this process has tensors of 10, and 4 more in its cache; another one has 2."""

    GIB = 2**30
    total = 80 * GIB

    def __init__(self):
        self.held, self.cached, self.others, self.limit = 10 * self.GIB, 4 * self.GIB, 2 * self.GIB, 1.0

    def empty_cache(self):
        self.cached = 0

    def memory_reserved(self):
        return self.held + self.cached

    def mem_get_info(self):
        return self.total - self.others - self.memory_reserved(), self.total

    def set_per_process_memory_fraction(self, fraction):
        assert 0 <= fraction <= 1
        self.limit = fraction


@pytest.mark.parametrize("share", [0.3, 0.6, 0.97])
def test_a_worker_finds_its_share_free_however_much_the_trainer_has_allocated_since(monkeypatch, share):
    gpu = SharedGpu()
    for name in ("empty_cache", "memory_reserved", "mem_get_info", "set_per_process_memory_fraction"):
        monkeypatch.setattr(torch.cuda, name, getattr(gpu, name))
    leave_share(share)
    fits = share * gpu.total + CONTEXT <= gpu.mem_get_info()[0]
    gpu.cached = max(round(gpu.limit * gpu.total) - gpu.held, 0)  # all that it may have
    free = gpu.mem_get_info()[0] - CONTEXT
    assert free == pytest.approx(share * gpu.total, abs=1) if fits else not gpu.cached
    leave_share(0.0)
    assert gpu.limit == 1.0
