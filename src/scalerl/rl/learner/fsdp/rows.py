"""Which process trains which completions, and in which passes.

Every process has the whole batch and computes the same answer, so that nothing is sent. All join as many
passes: the collectives of a pass need everybody, also who has no completion left (an empty pass).

Shapes in names: N completions.
"""

from __future__ import annotations

import heapq

import numpy as np


def share_rows(length_N: np.ndarray, n_ranks: int) -> list[np.ndarray]:
    """The rows of each rank, ascending: the longest that is left goes to whoever has the fewest tokens."""
    shares: list[list[int]] = [[] for _ in range(n_ranks)]
    loads = [(0, rank) for rank in range(n_ranks)]
    for row in np.argsort(-length_N, kind="stable"):
        tokens, rank = loads[0]
        shares[rank].append(int(row))
        heapq.heapreplace(loads, (tokens + int(length_N[row]), rank))
    return [np.array(sorted(share), dtype=np.int64) for share in shares]


def passes(length_N: np.ndarray, rows: np.ndarray, most_rows: int, most_tokens: int) -> list[np.ndarray]:
    """Cut `rows` into forward passes, the shortest first, so that little is padded.

    Of `most_tokens` tokens with padding, at least one completion; or of `most_rows` where that is 0.
    """
    rows = rows[np.argsort(length_N[rows], kind="stable")]
    if not most_tokens:
        return np.split(rows, range(most_rows, len(rows), most_rows)) if len(rows) else []
    found: list[list[int]] = []
    for row in rows:
        if found and (len(found[-1]) + 1) * int(length_N[row]) <= most_tokens:
            found[-1].append(int(row))
        else:
            found.append([int(row)])
    return [np.array(one, dtype=np.int64) for one in found]


def passes_of_rank(
    length_N: np.ndarray, rank: int, n_ranks: int, most_rows: int, most_tokens: int
) -> list[np.ndarray]:
    """The passes of one rank, empty ones after its own: as many as of the rank that has the most."""
    shares = share_rows(length_N, n_ranks)
    each = [passes(length_N, rows, most_rows, most_tokens) for rows in shares]
    nothing = np.zeros(0, dtype=np.int64)
    return [*each[rank], *[nothing] * (max(map(len, each)) - len(each[rank]))]
