"""Which evaluations of a run are drawn, and at which computes a curve is; N evaluations, M computes."""

import numpy as np

PLACES = 81
"""Computes at which a curve is drawn, even on a linear axis, and as many even on a logarithmic one."""
_PLACES_BEYOND = 61
"""Those between the last evaluation and the budget, where nothing else shows the shape of the curve."""


def thin(value_N: np.ndarray, most: int) -> np.ndarray:
    """Return positions of about `most` values at most, in order, whose plot looks like that of all.

    Half are even steps apart, the first and the last among them; the others are the highest and the lowest
    of every bin, so that no outlier is lost. Steps and bins are even both in the place and in its logarithm:
    a start that a logarithmic axis stretches stays whole.
    """
    n = len(value_N)
    if n <= most:
        return np.arange(n)
    even = _even(n - 1, most // 4)
    edges = _even(n, most // 8)
    order = np.lexsort((value_N, np.searchsorted(edges[1:], np.arange(n), side="right")))
    return np.unique(np.concatenate([even, order[edges[:-1]], order[edges[1:] - 1]]))


def _even(last: int, count: int) -> np.ndarray:
    """Return whole numbers from 0 to `last`: `count` evenly spaced ones, and as many on a log scale."""
    steps = np.concatenate([np.linspace(0, last, count), np.geomspace(1, last, count)])
    return np.unique(steps.round().astype(int))


def places_between(compute_N: np.ndarray, last: float, places: int = PLACES) -> np.ndarray:
    """Return the computes at which a curve is drawn, from where its fit begins to `last`.

    They are even on a linear and on a logarithmic axis, up to the last evaluation and again beyond it. A fit
    with an evaluation at compute 0 begins at half of the first compute above that.
    """
    first = float(compute_N[compute_N > 0].min()) / (2 if compute_N[0] == 0 else 1)
    even_M = np.linspace(min(float(compute_N[0]), first), last, places)
    within_M = np.union1d(even_M, np.geomspace(first, last, places)[:-1])
    known = float(compute_N.max())
    if known >= last:
        return within_M
    beyond_M = np.linspace(known, last, _PLACES_BEYOND)
    if last > 4 * known:
        beyond_M = np.union1d(beyond_M, np.geomspace(known, last, _PLACES_BEYOND)[:-1])
    return np.union1d(within_M[within_M < known], beyond_M)
