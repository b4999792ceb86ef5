"""Failed allocations, the trainer's share of a GPU, and memory that the C library keeps."""

import ctypes
import re
from collections.abc import Callable
from typing import TypeVar

import torch

from scalerl.errors import InputError, OutOfMemoryError, OwnCodeError
from scalerl.rl.config.memory import CONTEXT, RoleMemory, gib

T = TypeVar("T")
_SHORT = re.compile(r"out of memory|(can't allocate|not enough) memory|CUBLAS_STATUS_ALLOC_FAILED", re.I)
"""The error messages of CUDA, PyTorch's CPU allocator and cuBLAS."""
_ASKED = re.compile(r"(?:tried|unable) to allocate (\d[\d.]* \w+)", re.I)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is a failed allocation, on a GPU or CPU, possibly within a custom class."""
    if isinstance(error, OwnCodeError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _SHORT.search(str(error)) is not None


def within_memory(do: Callable[[], T], role: str, memory: Callable[[], RoleMemory], torn: bool = False) -> T:
    """Return the result of `do`, and explain a failed allocation for a process of `role`.

    `memory` returns the memory estimate of the process, and is called only after a failure. `torn` says that
    a failing `do` leaves something half changed.

    Raises:
        OutOfMemoryError: an allocation failed.
    """
    try:
        return do()
    except (RuntimeError, MemoryError, OwnCodeError) as error:
        if not is_out_of_memory(error):
            raise
        asked = _ASKED.search(str(error))
    # Outside the handler: the error's traceback would keep alive all that was allocated.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    raise OutOfMemoryError(_explained(role, asked[1] if asked else "", memory), torn)


def _explained(role: str, asked: str, memory: Callable[[], RoleMemory]) -> str:
    number, _, unit = asked.partition(" ")
    wanted = f"{gib(int(number))} GiB" if unit == "bytes" else asked
    text = f"{role}: out of memory" + f" (an allocation of {wanted} failed)" * bool(wanted)
    try:
        of_role = memory()
    except InputError:  # the memory of this kind of model is not known
        return f"{text}: change batch, context or decode_slots"
    terms = sorted({**of_role.held, **of_role.working}.items(), key=lambda term: -term[1])
    sizes = ", ".join(f"{name} {gib(n_bytes)}" for name, n_bytes in terms if n_bytes)
    return f"{text}; it needs {gib(of_role.total)} GiB ({sizes}): change {of_role.keys}"


def leave_share(share: float) -> None:
    """Limit this process's tensors so that they leave `share` of its GPU to a vLLM worker that starts there.

    Without the limit they would take the worker's memory during its restart, and PyTorch frees its cache only
    when one of its own allocations fails. A share of 0 ends the limit.
    """
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    # vLLM's share does not include its CUDA context.
    most = free + torch.cuda.memory_reserved() - share * total - CONTEXT if share else total
    torch.cuda.set_per_process_memory_fraction(min(max(most / total, 0.0), 1.0))


def return_freed_memory() -> None:
    """Return freed memory to the system, if the C library is glibc.

    glibc keeps freed memory in a heap per thread; with several threads and tensors of all sizes, the heaps
    grow for as long as a learner runs. A call takes some milliseconds, and memory that is needed again must
    be requested again, so call it only occasionally.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
