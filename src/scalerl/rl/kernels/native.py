"""The kernels of native.c: compiled when a process first needs them, in a fraction of a second.

Without a C compiler there are none, and the generator runs on transformers' own modules instead.

Shapes in names: A tokens of a pass, D hidden size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache

from torch import Tensor

from scalerl.rl.kernels.compiled import address, load_library


class Shape(ctypes.Structure):
    """Of the attention of one model."""

    _fields_ = (
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("scale", c_float),
        ("eps", c_float),
    )


class KernelStore(ctypes.Structure):
    """Where the keys and values of one layer stand, for slots of `extent` positions each."""

    _fields_ = (("keys", c_void_p), ("values", c_void_p), ("extent", c_int64))


@dataclass(frozen=True)
class Kernels:
    """The compiled functions.

    All tensors are contiguous and on the CPU: float32, or int64 where they are places.
    """

    library: ctypes.CDLL

    def rms_norm(self, x_AD: Tensor, weight_D: Tensor, eps: float, out_AD: Tensor) -> None:
        """x / sqrt(mean(x^2) + eps) * weight, token by token."""
        self.library.rms_norm(_at(x_AD), _at(weight_D), eps, _at(out_AD), *x_AD.shape)

    def swiglu(self, gate_up: Tensor, out: Tensor) -> None:
        """silu(gate) * up, from (A, 2 D) to (A, D)."""
        self.library.swiglu(_at(gate_up), _at(out), *out.shape)

    def attend(
        self,
        shape: Shape,
        prompts: KernelStore,
        own: KernelStore,
        qkv: Tensor,
        norms: tuple[Tensor | None, Tensor | None],
        turns: tuple[Tensor, Tensor],
        places: Sequence[Tensor],
        score: Tensor,
        out: Tensor,
    ) -> None:
        """Write keys and values of the tokens, and attend to what stands before them and to themselves.

        `qkv` is (A, heads + 2 kv_heads, head_dim); `norms` are the weights of q and k norm, where a model has
        them; `turns` cosine and sine (positions, head_dim); `places` for each token (A,) the slot of its
        prompt, how many positions of that come before it, its slot in `own` and its place there; `score` is
        room for (heads, both extents), `out` (A, heads, head_dim). Tokens of one slot stand in order.
        """
        stores = (ctypes.byref(shape), ctypes.byref(prompts), ctypes.byref(own))
        self.library.attend(*stores, *map(_at, (qkv, *norms, *turns, *places, score, out)), len(qkv))


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else address(tensor)


@cache
def load_kernels() -> Kernels | None:
    """The kernels for this machine; None where there is no C compiler, or it does not take them."""
    library = load_library("native.c")
    return None if library is None else Kernels(_declared(library))


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.rms_norm.argtypes = [c_void_p, c_void_p, c_float, c_void_p, c_int64, c_int64]
    library.swiglu.argtypes = [c_void_p, c_void_p, c_int64, c_int64]
    library.attend.argtypes = [
        POINTER(Shape),
        POINTER(KernelStore),
        POINTER(KernelStore),
        *[c_void_p] * 11,
        c_int64,
    ]
    for function in (library.rms_norm, library.swiglu, library.attend):
        function.restype = None
    return library
