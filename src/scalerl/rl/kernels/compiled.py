"""C of this package: compiled when a process first needs it, in a fraction of a second.

Without a C compiler there is none, and whoever asks goes another way.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from scalerl.rl.kernels.dense import DenseModel

LANES = 8
"""Numbers in a vector: sizes of heads, hidden states and gates must be multiples of it."""

_FLAGS = ("-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")


def load_library(name: str) -> ctypes.CDLL | None:
    """The functions of the C file `name` beside this one; None where no compiler takes it."""
    named = os.environ.get("CC", "").split()
    choices = [named] if named else [["cc"], ["gcc"], ["clang"]]
    compiler = next((choice for choice in choices if shutil.which(choice[0])), None)
    if compiler is None:
        return None
    source = Path(__file__).with_name(name)
    with tempfile.TemporaryDirectory(prefix="scalerl-") as folder:
        target = Path(folder) / "library.so"
        for machine in (["-march=native"], []):  # not every compiler knows the machine it is on
            command = [*compiler, *_FLAGS, *machine, str(source), "-o", str(target), "-lm"]
            with suppress(OSError):  # a folder from which nothing may be run, say
                if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                    return ctypes.CDLL(str(target))
    return None


def fits(model: DenseModel) -> bool:
    """Whether C can compute with a model: float32 on a CPU, and sizes of whole vectors."""
    sizes = (model.norm.shape[0], model.head_dim, model.layers[0].down.in_features)
    plain = all(p.dtype == torch.float32 and p.device.type == "cpu" for p in model.parameters())
    return plain and all(size % LANES == 0 for size in sizes)


def address(tensor: Tensor) -> int:
    """Where a contiguous tensor stands in memory."""
    assert tensor.is_contiguous()
    return tensor.data_ptr()
