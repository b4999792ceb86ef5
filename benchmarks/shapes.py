"""The shapes on which `benchmarks/coverage.py` judges forecasts: six of one phase, and those that also occur.

All runs end at 6 C_mid of the first rise (`END`), and are drawn anew each: R_0 of .1 to .5, a gain of .2 to
.35, B of 1.2 to 2.4, noise, correlation and spacing as in `benchmarks/simulation.py`, unless said otherwise.

    one-phase   those of `benchmarks/simulation.py`, by the correlation of the noise
    two-speeds  a share of .4 to .8 of the gain log-logistic, the rest 4 to 20 times later and less steep
    two-phase   a burst of .4 to .7 of the gain in the first 2 to 10 %, then a slow rise; a plateau, then a
                rise; a learning rate changed at .3 to .7 of the run, after which the slope in log compute is
                .25 to .5 or 2 to 4 times what it were
    decline     a peak at .2 to .7 of the run, then a loss of .1 to 1 of the gain by its end; a fall from the
                start
    flat        a gain of 0, .02, .05 in noise of .004 to .011; also of 6 to 12 evaluations in the fitted part
    ceiling     A = 1, binomial evaluations of 256 to 4,096 samples; early: C_mid at 1 to 4 % of the run
    few         log-logistic, by the evaluations in the fitted part and by gain over noise
    many        log-logistic, 400 evaluations
    failed      log-logistic, one evaluation of the fitted part is 0: any but the first; the newest; one of 8

Shapes: N evaluations. x is compute as a share of the run's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from scalerl.curve import LOG_LOGISTIC, Curve, Family
from simulation import (
    C_MID,
    GAINS,
    PHIS,
    RATIO,
    SDS,
    SPACINGS,
    TRUTHS,
    Cell,
    Simulated,
    Truth,
    noise,
    simulate,
)

END, MID = RATIO * C_MID, 1 / RATIO
Mean = Callable[[np.ndarray], np.ndarray]
Uniform = Callable[[float, float], float]


@dataclass(frozen=True)
class Drawn:
    """What a run is made of: its mean curve by x, and where it differs from the defaults of all shapes."""

    at: Mean
    A: float
    """Limit of the curve; NaN if it is not something to forecast."""
    change: float = math.nan
    """x from which no single rise describes the curve; NaN if one does throughout."""
    sd: float | None = None
    n_fitted: int | None = None
    spacing: float | None = None
    samples: int | None = None
    fails: Literal["", "any", "newest"] = ""


@dataclass(frozen=True)
class Shape:
    """A row of the table at each fraction: its name, and how to draw a run for a fit of that fraction."""

    name: str
    run: Callable[[float, np.random.Generator], Simulated]
    known: tuple[Family, float] | None = None
    """True family and correlation, for the oracle; None if no family is the truth."""


def rise(x_N: np.ndarray, b: float, mid: float) -> np.ndarray:
    """Return the share of its gain that a log-logistic has reached at x."""
    return Curve(LOG_LOGISTIC, 1.0, b, mid, 0.0)(np.maximum(x_N, 0.0))


def measured(drawn: Drawn, fraction: float, rng: np.random.Generator) -> Simulated:
    """Evaluate a drawn curve over the whole run, with noise."""
    first = int(rng.integers(2))  # 1: an evaluation before training
    spacing = drawn.spacing or float(rng.choice(SPACINGS)) * MID
    if drawn.n_fitted:
        spacing = fraction / (drawn.n_fitted - first)
    x_N = spacing * np.arange(1 - first, math.floor(1 / spacing + 1e-9) + 1)
    x_N = x_N if x_N[-1] > 1 - 1e-6 else np.append(x_N, 1.0)
    mean_N, sd, phi = np.clip(drawn.at(x_N), 0.0, 1.0), math.nan, 0.0
    if drawn.samples:
        value_N = rng.binomial(drawn.samples, mean_N) / drawn.samples
    else:
        sd = float(rng.choice(SDS)) if drawn.sd is None else drawn.sd
        phi = float(rng.choice(PHIS))
        value_N = mean_N + noise(len(x_N), sd, phi, rng, first)
    if drawn.fails:
        n = int(np.sum(x_N <= fraction))
        value_N[n - 1 if drawn.fails == "newest" else int(rng.integers(1, n))] = 0.0
    value_N = np.clip(value_N, 0.0, 1.0)
    return Simulated(END * x_N, mean_N, value_N, drawn.A, END * drawn.change, sd, phi)


def shape(name: str, draw: Callable[[Uniform], Drawn]) -> Shape:
    """Return a shape whose curves `draw` makes from uniform numbers `u(low, high)`."""

    def run(fraction: float, rng: np.random.Generator) -> Simulated:
        return measured(draw(lambda low, high: float(rng.uniform(low, high))), fraction, rng)

    return Shape(name, run)


def one_phase(truth: Truth, phi: float) -> Shape:
    def run(fraction: float, rng: np.random.Generator) -> Simulated:
        sd, gain, spacing = (float(rng.choice(values)) for values in (SDS, GAINS, SPACINGS))
        return simulate(Cell(truth, phi, sd, gain, spacing, bool(rng.integers(2))), rng)

    return Shape(f"{truth.name}, phi {phi:g}", run, (truth.family, phi))


def log_logistic(u: Uniform) -> Drawn:
    r0, gain, b = u(0.1, 0.5), u(0.2, 0.35), u(1.2, 2.4)
    return Drawn(lambda x_N: r0 + gain * rise(x_N, b, MID), r0 + gain)


def two_speeds(u: Uniform, low: float, high: float) -> Drawn:
    r0, gain, w, b, late, slow = u(0.1, 0.5), u(0.2, 0.35), u(0.4, 0.8), u(1.2, 2.4), u(low, high), u(0.6, 1)
    return Drawn(
        lambda x_N: r0 + gain * (w * rise(x_N, b, MID) + (1 - w) * rise(x_N, slow, late * MID)), r0 + gain
    )


def burst(u: Uniform) -> Drawn:
    r0, gain, w, at, b, mid = u(0.1, 0.5), u(0.2, 0.35), u(0.4, 0.7), u(0.02, 0.1), u(1, 2), u(0.25, 1)
    # At twice its midpoint a rise with B = 4 has reached .94 of its gain.
    return Drawn(
        lambda x_N: r0 + gain * (w * rise(x_N, 4.0, at / 2) + (1 - w) * rise(x_N, b, mid)), r0 + gain, at
    )


def plateau(u: Uniform) -> Drawn:
    r0, gain, w, at, b, mid = u(0.1, 0.5), u(0.2, 0.35), u(0.3, 0.6), u(0.2, 0.6), u(1.2, 2.4), u(0.1, 0.4)
    early = u(0.02, 0.06)
    return Drawn(
        lambda x_N: r0 + gain * (w * rise(x_N, 2.0, early) + (1 - w) * rise(x_N - at, b, mid)), r0 + gain, at
    )


def new_rate(u: Uniform, low: float, high: float) -> Drawn:
    before, at, factor = log_logistic(u), u(0.3, 0.7), u(low, high)
    return replace(
        before,
        at=lambda x_N: before.at(np.where(x_N < at, x_N, at * (np.maximum(x_N, at) / at) ** factor)),
        change=at,
    )


def decline(u: Uniform, low: float, high: float, power: float) -> Drawn:
    before, at, loss = log_logistic(u), u(0.2, 0.7), u(low, high)
    start, peak = before.at(np.array([0.0, at]))
    return Drawn(
        lambda x_N: (
            before.at(np.minimum(x_N, at))
            - loss * (peak - start) * (np.maximum(x_N - at, 0) / (1 - at)) ** power
        ),
        math.nan,
        at,
    )


def only_falls(u: Uniform) -> Drawn:
    before, loss = log_logistic(u), u(0.1, 1.0)
    top, bottom = before.at(np.array([1e9, 0.0]))
    return Drawn(lambda x_N: top - loss * (top - bottom) * x_N, math.nan, 0.0)


def flat(u: Uniform, gain: float, few: bool) -> Drawn:
    r0, b, sd = u(0.1, 0.7), u(1.2, 2.4), u(0.004, 0.011)
    n = int(u(6, 13)) if few else None
    return Drawn(lambda x_N: r0 + gain * rise(x_N, b, MID), r0 + gain, sd=sd, n_fitted=n)


def ceiling(u: Uniform, low: float, high: float) -> Drawn:
    r0, b, mid, samples = u(0.2, 0.7), u(1.2, 2.4), u(low, high), round(256 * 2 ** u(0, 4))
    return Drawn(lambda x_N: r0 + (1 - r0) * rise(x_N, b, mid), 1.0, samples=samples)


def few(u: Uniform, n: int, ratio: float) -> Drawn:
    drawn = log_logistic(u)
    return replace(drawn, sd=(drawn.A - float(drawn.at(np.zeros(1))[0])) / ratio, n_fitted=n)


GROUPS: dict[str, tuple[Shape, ...]] = {
    "one-phase": tuple(one_phase(truth, phi) for truth in TRUTHS for phi in PHIS),
    "two-speeds": (
        shape("two speeds, 4-9 apart", lambda u: two_speeds(u, 4, 9)),
        shape("two speeds, 9-20 apart", lambda u: two_speeds(u, 9, 20)),
    ),
    "two-phase": (
        shape("burst, then slow", burst),
        shape("plateau, then a rise", plateau),
        shape("learning rate down", lambda u: new_rate(u, 0.25, 0.5)),
        shape("learning rate up", lambda u: new_rate(u, 2, 4)),
    ),
    "decline": (
        shape("decline, .1-.4 of gain", lambda u: decline(u, 0.1, 0.4, 1)),
        shape("decline, .4-1 of gain", lambda u: decline(u, 0.4, 1, 1)),
        shape("bending decline", lambda u: decline(u, 0.1, 1, 2)),
        shape("only falls", only_falls),
    ),
    "flat": tuple(
        shape(f"gain {gain:g}{', 6-12 evals' * few}", lambda u, g=gain, f=few: flat(u, g, f))
        for gain, few in itertools.product((0.0, 0.02, 0.05), (False, True))
    ),
    "ceiling": (
        shape("A = 1", lambda u: ceiling(u, MID, MID)),
        shape("A = 1, early", lambda u: ceiling(u, 0.01, 0.04)),
    ),
    "few": tuple(
        shape(f"{n} evals, gain/noise {ratio}", lambda u, n=n, r=ratio: few(u, n, r))
        for n, ratio in itertools.product((6, 8, 12, 20), (2, 5, 15, 50))
    ),
    "many": (shape("400 evals", lambda u: replace(log_logistic(u), spacing=1 / 400)),),
    "failed": (
        shape("one evaluation of 0", lambda u: replace(log_logistic(u), fails="any")),
        shape("the newest of 0", lambda u: replace(log_logistic(u), fails="newest")),
        shape("one of 8 of 0", lambda u: replace(log_logistic(u), fails="any", n_fitted=8)),
    ),
}
