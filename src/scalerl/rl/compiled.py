"""C of this package: compiled when a process first needs it, in a fraction of a second.

Without a C compiler there is none, and whoever asks goes another way.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from torch import Tensor

LANES = 8
"""Numbers in a vector: sizes of heads, hidden states and gates must be multiples of it."""

_FLAGS = ("-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")


@cache
def load_library(name: str) -> ctypes.CDLL | None:
    """The functions of the C file `name` beside this one; None where no compiler takes it."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    source = Path(__file__).with_name(name)
    with tempfile.TemporaryDirectory(prefix="scalerl-") as folder:
        target = Path(folder) / "library.so"
        for machine in (["-march=native"], []):  # not every compiler knows the machine it is on
            command = [*compiler.split(), *_FLAGS, *machine, str(source), "-o", str(target), "-lm"]
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                return ctypes.CDLL(str(target))
    return None


def address(tensor: Tensor) -> int:
    """Where a contiguous tensor stands in memory."""
    assert tensor.is_contiguous()
    return tensor.data_ptr()
