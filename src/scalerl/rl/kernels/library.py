"""Compilation of the C files beside this one, at first use, in a second; the result is kept in the cache."""

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

# Not -ffast-math: it assumes that all numbers are finite, but scores of masked positions are not.
_FLAGS = ("-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_MACHINES = ("-march=native", "")
"""Flags to try in order: not every compiler supports `native`."""


class Pointer:
    """The ctypes type of an argument that is a contiguous CPU tensor, or None for NULL."""

    @classmethod
    def from_param(cls, tensor: Tensor | None) -> ctypes.c_void_p:
        """Return the address of a tensor; called by ctypes."""
        return ctypes.c_void_p(None if tensor is None else address(tensor))


def address(tensor: Tensor) -> int:
    """Return the address of a contiguous tensor."""
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def load_library(name: str, arguments: Mapping[str, Sequence[Any]]) -> ctypes.CDLL | None:
    """Compile and load the C file `name` beside this one; return None if that fails.

    `arguments` has the argument types of each of its functions, which return nothing.
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
    with suppress(OSError):  # not compiled yet
        return ctypes.CDLL(str(kept))
    for folder in (kept.parent, Path(tempfile.gettempdir())):
        with suppress(OSError):  # the folder may be read-only or mounted noexec
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix="scalerl-", dir=folder) as made:
                library = _compile(compiler, source, target := Path(made) / "library.so")
                if folder == kept.parent and library:
                    target.replace(kept)  # atomically: another process may load it at this moment
                return library
    return None


def _compile(compiler: Sequence[str], source: Path, target: Path) -> ctypes.CDLL | None:
    for machine in _MACHINES:
        command = [*compiler, *_FLAGS, *machine.split(), str(source), "-o", str(target), "-lm"]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return ctypes.CDLL(str(target))
    return None


def _key(compiler: Sequence[str], source: Path) -> str:
    """Return a hash of code, compiler and CPU: machines with different CPUs may share a home directory."""
    binary = Path(shutil.which(compiler[0]) or "").resolve()
    parts = [*compiler, *_FLAGS, str(binary), str(binary.stat().st_mtime_ns), platform.platform()]
    with suppress(OSError):  # on Linux this file lists the CPU's instruction sets
        lines = set(Path("/proc/cpuinfo").read_text().splitlines())
        parts += sorted(line for line in lines if line.startswith(("flags", "Features", "model")))
    code = [path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h")))]
    return hashlib.sha256(b"\0".join([*code, *map(str.encode, parts)])).hexdigest()[:32]
