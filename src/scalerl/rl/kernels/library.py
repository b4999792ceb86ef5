"""The C beside this file: compiled when it is first needed, in a second, and kept in the user's cache."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from scalerl.files import cache_folder

# Not -ffast-math: it assumes that nothing is infinite, and scores of masked positions are.
_FLAGS = ("-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_MACHINES = ("-march=native", "")
"""Not every compiler knows the machine it is on."""


class Pointer:
    """The type of an argument that is a contiguous tensor on the CPU, or None for NULL."""

    @classmethod
    def from_param(cls, tensor: Tensor | None) -> ctypes.c_void_p:
        """Return the address; called by ctypes."""
        return ctypes.c_void_p(None if tensor is None else address(tensor))


def address(tensor: Tensor) -> int:
    """Return the address of a contiguous tensor."""
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def load_library(name: str, arguments: Mapping[str, Sequence[Any]]) -> ctypes.CDLL | None:
    """Load the C file `name` beside this one; None where no compiler takes it.

    `arguments` are the types of the arguments of its functions, which return nothing.
    """
    named = os.environ.get("CC", "").split()
    choices = [named] if named else [["cc"], ["gcc"], ["clang"]]
    compiler = next((choice for choice in choices if shutil.which(choice[0])), None)
    library = None if compiler is None else _load(compiler, Path(__file__).with_name(name))
    for function, types in arguments.items() if library else ():
        found = getattr(library, function)
        found.argtypes, found.restype = list(types), None
    return library


def _load(compiler: Sequence[str], source: Path) -> ctypes.CDLL | None:
    kept = cache_folder() / "kernels" / f"{source.stem}-{_key(compiler, source)}.so"
    with suppress(OSError):  # it is not there
        return ctypes.CDLL(str(kept))
    for folder in (kept.parent, Path(tempfile.gettempdir())):
        with suppress(OSError):  # a folder that cannot be written, or from which nothing may be run
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix="scalerl-", dir=folder) as made:
                library = _compile(compiler, source, target := Path(made) / "library.so")
                if folder == kept.parent and library:
                    target.replace(kept)  # whole: another process may load it at this moment
                return library
    return None


def _compile(compiler: Sequence[str], source: Path, target: Path) -> ctypes.CDLL | None:
    for machine in _MACHINES:
        command = [*compiler, *_FLAGS, *machine.split(), str(source), "-o", str(target), "-lm"]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return ctypes.CDLL(str(target))
    return None


def _key(compiler: Sequence[str], source: Path) -> str:
    """Hash the code, the compiler, and the processor: a home may be that of machines of several kinds."""
    binary = Path(shutil.which(compiler[0]) or "").resolve()
    parts = [*compiler, *_FLAGS, str(binary), str(binary.stat().st_mtime_ns), platform.platform()]
    with suppress(OSError):  # Linux says there which instructions the processor has
        lines = set(Path("/proc/cpuinfo").read_text().splitlines())
        parts += sorted(line for line in lines if line.startswith(("flags", "Features", "model")))
    code = [path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h")))]
    return hashlib.sha256(b"\0".join([*code, *map(str.encode, parts)])).hexdigest()[:32]
