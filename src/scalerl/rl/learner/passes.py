"""Which rows of a batch go through the model together, on which rank.

All ranks compute the same answer, so that nothing is sent. The weights per token make the result independent
of it, but for rounding.
"""

import heapq
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from scalerl.rl.config.settings import BatchSize
from scalerl.rl.learner.batch import Batch


def share_rows(length_N: np.ndarray, n_ranks: int) -> list[np.ndarray]:
    """Return the rows of each rank, ascending: the longest left goes to the rank with the fewest tokens."""
    shares: list[list[int]] = [[] for _ in range(n_ranks)]
    loads = [(0, rank) for rank in range(n_ranks)]
    for row in np.argsort(-length_N, kind="stable"):
        tokens, rank = loads[0]
        shares[rank].append(int(row))
        heapq.heapreplace(loads, (tokens + int(length_N[row]), rank))
    return [np.array(sorted(share), dtype=np.int64) for share in shares]


def in_groups(length_N: np.ndarray, group_N: np.ndarray, size: BatchSize) -> list[np.ndarray]:
    """Cut a batch into micro-batches in its own order; groups stay whole where they fit.

    For a pass that reads the prompt of a group once.
    """
    most = size.micro_tokens or size.micro
    cost_N = length_N if size.micro_tokens else np.ones_like(group_N)
    cuts, total = [], 0
    for rows in np.split(np.arange(len(group_N)), np.flatnonzero(np.diff(group_N)) + 1):
        if total and total + int(cost_N[rows].sum()) > most:
            cuts, total = [*cuts, int(rows[0])], 0
        for row in rows:
            if total and total + int(cost_N[row]) > most:  # a group that is too large is cut
                cuts, total = [*cuts, int(row)], 0
            total += int(cost_N[row])
    return np.split(np.arange(len(group_N)), cuts)


def by_length(length_N: np.ndarray, rows: np.ndarray, size: BatchSize, packed: bool) -> list[np.ndarray]:
    """Cut `rows` into micro-batches, the shortest completions first, so that little is padded.

    A micro-batch has at most `size.micro_tokens` tokens, padding counted unless they are `packed`, and at
    least one completion; where that is 0, at most `size.micro` completions.
    """
    rows = rows[np.argsort(length_N[rows], kind="stable")]
    if not size.micro_tokens:
        return np.split(rows, range(size.micro, len(rows), size.micro)) if len(rows) else []
    found: list[list[int]] = []
    for row in rows:
        tokens = [int(length_N[other]) for other in (*(found[-1] if found else ()), row)]
        total = sum(tokens) if packed else len(tokens) * tokens[-1]
        if found and total <= size.micro_tokens:
            found[-1].append(int(row))
        else:
            found.append([int(row)])
    return [np.array(one, dtype=np.int64) for one in found]


def of_rank(
    length_N: np.ndarray, rank: int, n_ranks: int, cut: Callable[[np.ndarray], list[np.ndarray]]
) -> list[np.ndarray]:
    """Return the micro-batches of one rank, with empty ones up to the most that any rank has.

    `cut` makes them of the rows of a rank. The collectives of a pass need all ranks, also those that have no
    completion left.
    """
    each = [cut(rows) for rows in share_rows(length_N, n_ranks)]
    nothing = np.zeros(0, dtype=np.int64)
    return [*each[rank], *[nothing] * (max(map(len, each)) - len(each[rank]))]


def nothing_of(batch: Batch) -> tuple[Batch, np.ndarray]:
    """Return a completion of two tokens of weight 0, for a rank that has none left in this pass."""
    one = {"weight_NT": np.zeros((1, 2)), "length_N": np.array([2]), "prompt_N": np.array([1])}
    return replace(batch, **one), np.zeros(1, dtype=np.int64)
