"""The C of this package, compiled when a process first needs it, in a fraction of a second.

Without a C compiler there is none, and the callers run a model through its own modules instead.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scalerl.rl.kernels.dense import DenseModel

LANES = 8
"""Numbers in a vector: sizes of heads, hidden states and gates must be multiples of it."""

# Not -ffast-math: it assumes that nothing is infinite, and scores of masked positions are.
_FLAGS = ("-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")


class Pointer:
    """The type of an argument that is a contiguous tensor on the CPU, or None for NULL."""

    @classmethod
    def from_param(cls, tensor: Tensor | None) -> ctypes.c_void_p:
        """Return the address; called by ctypes."""
        return ctypes.c_void_p(None if tensor is None else address(tensor))


def load_library(name: str, arguments: Mapping[str, Sequence[Any]]) -> ctypes.CDLL | None:
    """Compile the C file `name` beside this one; None where no compiler takes it.

    `arguments` are the types of the arguments of its functions, which return nothing.
    """
    named = os.environ.get("CC", "").split()
    choices = [named] if named else [["cc"], ["gcc"], ["clang"]]
    compiler = next((choice for choice in choices if shutil.which(choice[0])), None)
    library = None if compiler is None else _compile(compiler, Path(__file__).with_name(name))
    for function, types in arguments.items() if library else ():
        found = getattr(library, function)
        found.argtypes, found.restype = list(types), None
    return library


def _compile(compiler: Sequence[str], source: Path) -> ctypes.CDLL | None:
    with tempfile.TemporaryDirectory(prefix="scalerl-") as folder:
        target = Path(folder) / "library.so"
        for machine in (["-march=native"], []):  # not every compiler knows the machine it is on
            command = [*compiler, *_FLAGS, *machine, str(source), "-o", str(target), "-lm"]
            with suppress(OSError):  # such as a folder from which nothing may be run
                if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                    # Loaded before its folder is removed: the mapping keeps it, and no path is shared.
                    return ctypes.CDLL(str(target))
    return None


def fits(model: DenseModel) -> bool:
    """Return whether C can compute with a model: float32 on a CPU, and sizes of whole vectors."""
    sizes = (model.norm.shape[0], model.head_dim, model.layers[0].down.in_features)
    plain = all(p.dtype == torch.float32 and p.device.type == "cpu" for p in model.parameters())
    return plain and all(size % LANES == 0 for size in sizes)


def address(tensor: Tensor) -> int:
    """Return the address of a contiguous tensor."""
    assert tensor.is_contiguous()
    return tensor.data_ptr()
