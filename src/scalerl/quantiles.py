"""Quantiles of weighted values, and of weighted values with noise added."""

import functools
import math

import numpy as np

Interval = tuple[float, float]
"""Low and high."""
_BINS = 8192  # a histogram is quicker than sorting the 10^5 nodes of a posterior
_NORMAL_X = np.linspace(-8.5, 8.5, 8193)
_NOISY_BINS = 2048  # the convolution costs the square of this, and noise needs no finer bins


@functools.cache
def _normal_cdf() -> np.ndarray:
    """Return the standard normal CDF on `_NORMAL_X`; linear interpolation of it is accurate to 3e-7."""
    return np.array([0.5 * (1.0 + math.erf(x / math.sqrt(2.0))) for x in _NORMAL_X])


def normal_quantiles(at: np.ndarray) -> np.ndarray:
    """Return quantiles of the standard normal distribution at probabilities in (0, 1), accurate to 1e-6."""
    return np.interp(at, _normal_cdf(), _NORMAL_X)


def tails(level: float) -> np.ndarray:
    """Return the probabilities at the ends of a central interval with equal tails."""
    return np.array([(1 - level) / 2, (1 + level) / 2])


def weighted_quantiles(value: np.ndarray, weight: np.ndarray, at_Q: np.ndarray) -> np.ndarray:
    """Return quantiles of weighted values by a histogram over their range, linear inside a bin."""
    value, weight = value.ravel(), weight.ravel()
    low, high = float(value.min()), float(value.max())
    if not high - low > 1e-12:
        return np.full(len(at_Q), low)
    index = np.minimum(((value - low) * (_BINS / (high - low))).astype(int), _BINS - 1)
    held = np.concatenate([[0.0], np.cumsum(np.bincount(index, weight, _BINS))])
    # Mass exactly at an end, as at a pass rate of 1, is not spread over its bin.
    at_Q = np.asarray(at_Q) * held[-1]
    first, last = weight[value == low].sum(), held[-1] - weight[value == high].sum()
    found = np.interp(at_Q, held, np.linspace(low, high, _BINS + 1))
    return np.where(at_Q <= first, low, np.where(at_Q >= last, high, found))


def span_quantiles(span_cells2: np.ndarray, weight_cells: np.ndarray, at_Q: np.ndarray) -> np.ndarray:
    """Return quantiles of a parameter with the weight of each cell spread evenly between the cell's ends.

    The CDF rises everywhere between the ends, so that quantiles move smoothly with the weights instead of
    jumping between a few nodes.
    """
    low_cells, high_cells = span_cells2.T
    end, index = np.unique(span_cells2, return_inverse=True)
    index = index.reshape(span_cells2.shape)
    # The density changes only at ends of cells: cells that start there add to it, cells that stop subtract.
    each_cells = weight_cells / np.maximum(high_cells - low_cells, 1e-12)
    change = np.bincount(index[:, 0], each_cells, len(end)) - np.bincount(index[:, 1], each_cells, len(end))
    density = np.maximum(np.cumsum(change)[:-1], 0.0)
    held = np.concatenate([[0.0], np.cumsum(density * np.diff(end))])
    return np.interp(np.asarray(at_Q) * held[-1], held, end)


def draw_quantiles(value_n: np.ndarray, at_Q: np.ndarray) -> np.ndarray:
    """Return quantiles without interpolation, as values may be infinite; NaN if there are no values."""
    if not len(value_n):
        return np.full(len(at_Q), np.nan)
    place_Q = np.minimum((at_Q * len(value_n)).astype(int), len(value_n) - 1)
    return np.partition(value_n, place_Q)[place_Q]


def noisy_quantiles(
    value: np.ndarray, weight: np.ndarray, sd_J: np.ndarray, sd_weight_J: np.ndarray, at_Q: np.ndarray
) -> np.ndarray:
    """Return quantiles of value + e, with e a scale mixture of N(0, sd_j^2) independent of the value."""
    held = np.cumsum(sd_weight_J)
    reach = 5.0 * float(sd_J[min(int(np.searchsorted(held, (1 - 1e-4) * held[-1])), len(sd_J) - 1)])
    low, high = float(value.min()) - reach, float(value.max()) + reach
    width = (high - low) / _NOISY_BINS
    index = np.minimum(((value.ravel() - low) / width).astype(int), _NOISY_BINS - 1)
    mass = np.bincount(index, weight.ravel(), _NOISY_BINS)
    half = int(reach / width) + 1
    # Each bin of the kernel gets the mass between its edges, so that narrow noise is not lost.
    edges = (np.arange(-half, half + 2) - 0.5) * width
    # Nodes of the sd with negligible weight would only cost time.
    keep = sd_weight_J > 1e-6 * sd_weight_J.max()
    cdf = sd_weight_J[keep] @ np.interp(edges / sd_J[keep, None], _NORMAL_X, _normal_cdf())
    spread = np.convolve(mass, np.diff(cdf))[half : half + _NOISY_BINS]
    held = np.concatenate([[0.0], np.cumsum(spread)])
    return np.interp(np.asarray(at_Q) * held[-1], held, low + width * np.arange(_NOISY_BINS + 1))
