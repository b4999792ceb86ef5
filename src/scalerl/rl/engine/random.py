"""Counter-based random numbers: a completion does not depend on where it ran or on what shared its batch.

Every number is a hash of (seed, prompt id, epoch, sample) and the position; no generator carries state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def stream_keys(*parts: object, last: Iterable[object]) -> np.ndarray:
    """The 64-bit keys of streams of random numbers, from whatever names them.

    `parts` are what the names have in common, and every stream has one of `last`; the result is uint64, one
    for each of these.
    """
    common = hashlib.blake2b("".join(f"{part}\0" for part in parts).encode(), digest_size=8)
    digests = []
    for part in last:
        own = common.copy()
        own.update(str(part).encode())
        digests.append(own.digest())
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)


def uniform(key_R: np.ndarray, position_R: np.ndarray) -> np.ndarray:
    """Numbers uniform in [0, 1), one for each (key, position): SplitMix64 (Steele, Lea, Flood 2014).

    Both arguments are integer arrays of one shape; the result is float64 of that shape.
    """
    z = key_R.astype(np.uint64) + (position_R.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
