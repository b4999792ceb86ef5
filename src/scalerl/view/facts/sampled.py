"""Choice of the evaluations to draw, and of the computes of a drawn curve; N evaluations, M computes."""

import numpy as np

PLACES = 81
"""Computes of a drawn curve that are evenly spaced on a linear axis, and as many on a logarithmic axis."""
_PLACES_BEYOND = 61
"""As `PLACES`, between the last evaluation and the budget, where no points show the curve's shape."""


def thin(value_N: np.ndarray, most: int) -> np.ndarray:
    """Return at most about `most` positions, in order, whose values look like all values in a plot.

    Half are evenly spaced, with the first and the last among them; the others are the highest and the lowest
    of every bin, so that no outlier is lost. Spacing and bins are even both in the position and in its
    logarithm, so that the start, which a logarithmic axis stretches, keeps its detail.
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
    """Return the computes at which to draw a curve, from the start of its fit to `last`.

    They are evenly spaced on a linear and on a logarithmic axis, up to the last evaluation and again beyond.
    With an evaluation at compute 0, logarithmic spacing starts at half of the first compute above 0.
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
