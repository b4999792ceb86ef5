"""Memory that was freed goes back to the system."""

from __future__ import annotations

import ctypes


def return_freed_memory() -> None:
    """Give what has been freed back to the system, where the C library is glibc.

    By itself that keeps it in a heap for each thread, and with several threads and tensors of all sizes the
    heaps grow for as long as a learner runs. It takes some milliseconds, and what is used again has to be
    fetched again: now and then is enough.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
