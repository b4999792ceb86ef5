"""Counter-based random numbers: a completion does not depend on where it ran or on what shared its batch.

Every number is a hash of (seed, prompt id, draw, sample) and the position; no generator carries state.
"""

from __future__ import annotations

import hashlib

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def stream_key(*parts: object) -> np.uint64:
    """The 64-bit key of a stream of random numbers, from whatever names the stream."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def uniform(key_R: np.ndarray, position_R: np.ndarray) -> np.ndarray:
    """Numbers uniform in [0, 1), one for each (key, position): SplitMix64 (Steele, Lea, Flood 2014).

    Both arguments are integer arrays of one shape; the result is float64 of that shape.
    """
    z = key_R.astype(np.uint64) + (position_R.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
