"""The C library's heaps."""

from __future__ import annotations

import ctypes


def return_freed_memory() -> None:
    """Return freed memory to the system, if the C library is glibc.

    glibc keeps it in a heap per thread, and with several threads and tensors of all sizes the heaps grow for
    as long as a learner runs. This takes some milliseconds, and memory that is used again must be requested
    again, so occasional calls are enough.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
