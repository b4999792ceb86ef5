"""Memory that was freed goes back to the system."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import numpy as np
import psutil
from scalerl.rl.model.memory import return_freed_memory

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
