"""Single evaluations that failed: of a server that died, or of a checkpoint that was not loaded.

The curve is fitted without the suspect. The suspect must then lie much farther from what its two neighbours
leave of that curve than the others lie from theirs, and beyond both: the first of a step does not. The first
evaluation of a run, before training, is no suspect. The newest is one where it falls: alone it may as well
be the start of a decline, so that there is no verdict before the next one (`Failures.newest`).

Shapes: N evaluations, in the order of compute.
"""

import math
from dataclasses import dataclass

import numpy as np

from scalerl.curve.families import LOG_LOGISTIC, Curve
from scalerl.curve.least_squares import least_squares
from scalerl.curve.points import Points
from scalerl.curve.sample import MIN_TO_FIT, make_sample

_FAR, _FAR_NEWEST, _LEAST = 12.0, 6.0, 0.05
"""Times the usual distance from neighbours, and pass rate, from which on an evaluation has failed: the newest
sooner, as that costs no more than to wait for the next one."""
_ALONE = 1.5
"""Times as far from its neighbours as these are from theirs."""
_SUSPECTS = 3
_PARAMETERS = 4


@dataclass(frozen=True)
class Failures:
    """Which evaluations have failed, and what is said of each."""

    failed_N: np.ndarray
    said: tuple[str, ...] = ()
    newest: str = ""
    """Why there is no verdict yet, where the newest evaluation is one of them; else empty."""


def find_failed(points: Points, r0: float | None, curve: Curve) -> Failures:
    """Find the evaluations that are off alone: at most a tenth of all, and one; if there are more, none.

    `curve` is the least-squares log-logistic curve of all `points`, `r0` its R_0 where that is given.
    """
    at = np.arange(len(points))
    apart: dict[int, float] = {}
    while found := _worst(points.select(at), r0, curve):
        place, distance, curve = found
        apart[int(at[place])] = distance
        at = np.delete(at, place)
    if len(apart) > len(points) // 10 + 1:
        apart = {}
    failed_N = np.isin(np.arange(len(points)), list(apart))
    said = tuple(_sentence(points, i, apart[i]) for i in sorted(apart))
    newest = said[-1] if len(points) - 1 in apart else ""
    return Failures(failed_N, said, newest)


def _worst(points: Points, r0: float | None, curve: Curve) -> tuple[int, float, Curve] | None:
    """Return one that has failed: its place, its distance from its neighbours, and the curve without it."""
    n = len(points)
    apart_N = np.abs(_distances(points.pass_rate_N - curve(points.compute_N)))
    suspects = 1 + np.argsort(-apart_N[1:], kind="stable")[:_SUSPECTS]
    # Half: the curve of all goes some way towards it.
    for i in (int(i) for i in suspects if apart_N[i] > 0.5 * _LEAST):
        others = points.select(np.arange(n) != i)
        if len(np.unique(others.compute_N)) < MIN_TO_FIT:
            continue
        without = least_squares(make_sample(others, r0), LOG_LOGISTIC).curve
        left_N = points.pass_rate_N - without(points.compute_N)
        beside = [i - 1, i + 1] if i < n - 1 else [i - 1]
        distance = float(left_N[i] - left_N[beside].mean())
        rate, rates = points.pass_rate_N[i], points.pass_rate_N[beside]
        # Up alone, the second may be a run that learnt at once and collapsed, and the newest one that learns.
        if not (rate < rates.min() or (1 < i < n - 1 and rate > rates.max())):
            continue
        others_N = np.abs(_distances(np.delete(left_N, i)))
        # The curve has taken its parameters from them; the sd of a normal of this median deviation.
        usual = float(np.median(others_N)) / 0.6745 * math.sqrt((n - 1) / max(n - 1 - _PARAMETERS, 1))
        far = _FAR if i < n - 1 else _FAR_NEWEST
        if abs(distance) > max(far * usual, _LEAST, _ALONE * others_N[i - 1 : i + 1].max()):
            return i, distance, without
    return None


def _distances(left_N: np.ndarray) -> np.ndarray:
    """Return how far each residual is from the mean of its neighbours; at an end from the nearer of two."""
    apart_N = np.empty_like(left_N)
    apart_N[1:-1] = left_N[1:-1] - 0.5 * (left_N[:-2] + left_N[2:])
    for end, two in ((0, left_N[1:3]), (-1, left_N[-3:-1])):
        apart_N[end] = min(left_N[end] - two, key=abs)
    return apart_N


def _sentence(points: Points, i: int, apart: float) -> str:
    steps = points.step_N
    where = f"{points.axis} {points.compute_N[i]:.10g}" if steps is None else f"step {steps[i]:.10g}"
    way = "below" if apart < 0 else "above"
    what = f"at {where} ({points.pass_rate_N[i]:.3f}) is {abs(apart):.3f} {way}"
    if i < len(points) - 1:
        return f"left out: the evaluation {what} its neighbours, as if it had failed"
    return (
        f"the newest evaluation, {what} the one before, and left out: it has failed, or the run falls, so no "
        "ceiling is identified and verdicts are 'too early' until the next one"
    )
