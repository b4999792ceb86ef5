"""Simulated runs of one phase whose truth is known; `benchmarks/shapes.py` has those of other shapes.

A run goes to 6 C_mid (the published ones reach 4 to 9), with evaluations every `spacing` C_mid and, if
`step_0`, one before training. Noise is AR(1) from one evaluation to the next; the evaluation before training
is independent of the rest.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from scalerl.curve import LOG_LOGISTIC, Curve, Family, Frechet, Gompertz, Points, Weibull
from scalerl.curve.noise import ar1

C_MID, RATIO, R_0 = 3000.0, 6.0, 0.3
DRIFT_SD, DRIFT_PERIOD = 0.004, 2.5
"""Slow drift: its sd, and its approximate period in C_mid."""


@dataclass(frozen=True)
class Truth:
    """The shape that a simulated run follows."""

    name: str
    family: Family
    B: float
    drift: bool = False


TRUTHS = (
    Truth("log_logistic", LOG_LOGISTIC, 1.9),
    Truth("weibull .75", Weibull(), 0.75),
    Truth("weibull 1.4", Weibull(), 1.4),
    Truth("frechet", Frechet(), 1.3),
    Truth("gompertz", Gompertz(), 2.0),
    Truth("drift", LOG_LOGISTIC, 1.9, drift=True),
)
PHIS, SDS, GAINS, SPACINGS = (0.0, 0.25, 0.5, 0.8), (0.0045, 0.0075, 0.010), (0.2, 0.35), (0.06, 0.10)
FRACTIONS, STEP_0 = (0.25, 0.5, 0.75), (True, False)


@dataclass(frozen=True)
class Cell:
    """One combination of the simulation's settings."""

    truth: Truth
    phi: float
    sd: float
    gain: float
    spacing: float
    step_0: bool


CELLS = [Cell(*c) for c in itertools.product(TRUTHS, PHIS, SDS, GAINS, SPACINGS, STEP_0)]


@dataclass(frozen=True)
class Simulated:
    """A whole run: its mean curve and what was measured, at every evaluation."""

    compute_N: np.ndarray
    mean_N: np.ndarray
    pass_rate_N: np.ndarray
    A: float
    change: float = math.nan
    """Compute from which no single rise describes the curve; NaN if one does throughout."""
    sd: float = math.nan
    """Sd of the noise; NaN if evaluations are binomial."""
    phi: float = 0.0

    def first(self, fraction: float) -> Points:
        """Return the evaluations of the first `fraction` of the compute."""
        keep_N = self.compute_N <= fraction * self.compute_N[-1] * (1 + 1e-9)
        return Points.from_arrays(self.compute_N[keep_N], np.clip(self.pass_rate_N[keep_N], 0, 1))


def simulate(cell: Cell, rng: np.random.Generator) -> Simulated:
    """Draw one run; forecasts are compared with its last evaluation."""
    n = round(RATIO / cell.spacing)
    compute_N = C_MID * cell.spacing * np.arange(0 if cell.step_0 else 1, n + 1)
    curve = Curve(cell.truth.family, R_0 + cell.gain, cell.truth.B, C_MID, R_0)
    mean_N = curve(compute_N)
    if cell.truth.drift:
        mean_N = mean_N + drift(compute_N / C_MID, rng)
    noise_N = noise(len(compute_N), cell.sd, cell.phi, rng, first=int(cell.step_0))
    return Simulated(compute_N, mean_N, mean_N + noise_N, curve.A, sd=cell.sd, phi=cell.phi)


def noise(n: int, sd: float, phi: float, rng: np.random.Generator, first: int = 0) -> np.ndarray:
    """Return noise of n evaluations, AR(1) with phi from index `first` on (1 leaves step 0 independent)."""
    return ar1(rng.normal(0, sd, n), np.where(np.arange(n) > first, phi, 0.0))


def drift(ratio_N: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return three slow waves of random phase that set in with training, so that compute 0 has none."""
    period = DRIFT_PERIOD * np.array([0.8, 1.0, 1.4])[:, None]
    phase = rng.uniform(0, 2 * math.pi, (3, 1))
    wave_N = np.sqrt(2 / 3) * np.sin(2 * math.pi * ratio_N / period + phase).sum(axis=0)
    return DRIFT_SD * wave_N * (1 - np.exp(-4 * ratio_N))
