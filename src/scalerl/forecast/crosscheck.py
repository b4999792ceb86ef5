"""Two cross-checks of a fit's intervals that use no prior: a bootstrap and a profile likelihood.

All three intervals are given the log-logistic family (arXiv 2510.13786, equation 1), so they leave out the
uncertainty of the family itself. Bootstrap and profile take the correlation of the noise from the fit, as a
number. Early in a run the three differ: there the answer follows from the prior or, without one, from the
bounds 0 <= R_0 <= A <= 1.

Shapes: N rows of the sample, n resamples, M computes or values of A, K cells of (log B, log C_mid).
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from scalerl.curve.answers import span
from scalerl.curve.families import FAMILIES, LOG_LOGISTIC
from scalerl.curve.least_squares import LOG_B_RANGE, SEARCH_REACH, least_squares_many
from scalerl.curve.noise import Noise, ar1, make_noise
from scalerl.curve.prior import FLAT, SD_RANGE, NoiseModel
from scalerl.curve.result import Fit
from scalerl.curve.sample import Sample
from scalerl.errors import CannotAnswerError
from scalerl.forecast.measured import t_quantile
from scalerl.numbers import percent
from scalerl.quantiles import Interval, tails, weighted_quantiles

_GRID, _ZOOM, _ZOOMS = (24, 36), 5, 10  # cells of the first (log B, log C_mid) grid; a side of a zoom; zooms
_CEILINGS = 48


@dataclass(frozen=True)
class Bootstrap:
    """Percentile intervals over refits of the least-squares curve to simulated evaluations."""

    level: float
    n: int
    A: Interval
    B: Interval
    C_mid: Interval
    curve: tuple[tuple[float, Interval], ...]
    """Computes, and the interval of the mean curve at each."""
    at_bound: float
    """Share of the refits whose ceiling is 1, the bound of a pass rate: there the interval is cut off."""


@dataclass(frozen=True)
class Profile:
    """The profile-likelihood interval of A; an end is None where the data alone do not bound A."""

    level: float
    A: float
    interval: tuple[float | None, float | None]


@dataclass(frozen=True)
class CrossCheck:
    """Three intervals of A, and two of the rest, given the log-logistic. Made by `cross_check`."""

    level: float
    A: Interval
    B: Interval
    C_mid: Interval
    curve: tuple[tuple[float, Interval], ...]
    """`A` to `curve` are those of the fit's own posterior, given the log-logistic."""
    bootstrap: Bootstrap
    profile: Profile

    def to_json(self) -> dict[str, Any]:
        """Return all fields; open ends are null."""
        return asdict(self)

    def __str__(self) -> str:
        boot = self.bootstrap
        rows = [
            (f"given {LOG_LOGISTIC.label}, {percent(self.level)}", "A", "B", "C_mid"),
            ("posterior", span(self.A), span(self.B), span(self.C_mid, ".4g")),
            (f"AR(1) bootstrap, {boot.n}", span(boot.A), span(boot.B), span(boot.C_mid, ".4g")),
            ("profile likelihood", span(self.profile.interval), "", ""),
        ]
        lines = ["".join(f"{cell:<26}" for cell in row).rstrip() for row in rows]
        for (compute, own), (_, other) in zip(self.curve, boot.curve, strict=True):
            lines.append(f"curve at {compute:g}: posterior {span(own)}, bootstrap {span(other)}")
        if boot.at_bound > 0:
            lines.append(f"{percent(boot.at_bound)} of the bootstrap's ceilings are 1, the bound")
        return "\n".join(lines)


def cross_check(fit: Fit, at: Sequence[float] = ()) -> CrossCheck:
    """Compute `bootstrap` and `profile` beside the posterior, with the mean curve `at` some computes.

    Raises:
        CannotAnswerError: as for `profile`, or the ceiling is withheld, as no family describes the run.
    """
    if fit.misfit:
        raise CannotAnswerError(f"{fit.points.source}: no interval is worth a check: {fit.misfit.why}")
    level = fit.intervals.level
    boot, ceiling = bootstrap(fit, at=at), profile(fit)
    own = fit.posterior.only(FAMILIES.index(LOG_LOGISTIC))
    bands = [weighted_quantiles(own.curve_at(compute), own.weight, tails(level)) for compute in at]
    curve = tuple((float(c), (float(low), float(high))) for c, (low, high) in zip(at, bands, strict=True))
    inside = fit.intervals
    return CrossCheck(level, inside.A_given_family, inside.B, inside.C_mid, curve, boot, ceiling)


def bootstrap(fit: Fit, n: int = 1000, seed: int = 0, at: Sequence[float] = ()) -> Bootstrap:
    """Refit evaluations simulated from the least-squares curve, with AR(1) noise of the fit's size and phi.

    The parametric bootstrap (Efron and Tibshirani, 1993, chapters 6 and 13), with percentile intervals.

    Args:
        fit: the fit to resample; it sets the level of the intervals.
        n: resamples; the ends of an interval need 100 or more.
        seed: of the noise.
        at: computes for the interval of the mean curve.
    """
    sample, level = fit.sample, fit.intervals.level
    # The noise of a row: with that of one evaluation A's interval was 3 times too wide at 4,000 of them.
    sd, rng = sample.row_sd(fit.noise.sd), np.random.default_rng(seed)
    y_nN = fit.paper_curve.at_log(sample.log_c_N) + sd * _replicates(sample, fit.noise.phi, n, rng)
    refits = least_squares_many([replace(sample, y_N=y_N) for y_N in y_nN], LOG_LOGISTIC)
    curves = [refit.curve for refit in refits]

    def interval(values: list[float]) -> Interval:
        low, high = np.quantile(values, tails(level))
        return float(low), float(high)

    A, B, C_mid = (interval([getattr(curve, name) for curve in curves]) for name in ("A", "B", "C_mid"))
    bands = tuple((float(c), interval([float(curve(c)) for curve in curves])) for c in at)
    at_bound = float(np.mean([curve.A >= 1.0 - 1e-9 for curve in curves]))
    return Bootstrap(level, n, A, B, C_mid, bands, at_bound)


def profile(fit: Fit) -> Profile:
    """Return the profile-likelihood interval of A given the log-logistic family, at the level of the fit.

        (RSS(A) - RSS) / sd^2 <= t_d^2        d = evaluations less free parameters

    RSS is whitened by the AR(1) correlation of the fit, K^-1, and is the least over R_0, B and C_mid, with A
    fixed and with A free; sd^2 = RSS / d, but at least the known evaluation noise squared. (Seber and Wild,
    Nonlinear Regression, 1989, sections 5.2.3 and 6.2.)

    Raises:
        CannotAnswerError: no more evaluations than free parameters.
    """
    sample, level = fit.sample, fit.intervals.level
    degrees = sample.n_points - 2 - sample.n_linear
    if degrees < 1:
        raise CannotAnswerError(
            f"{fit.points.source}: {sample.n_points} evaluations leave no degrees of freedom beside "
            f"{2 + sample.n_linear} parameters"
        )
    # Only the whitening by phi matters here: the sd comes from RSS.
    own = replace(FLAT, noise=(NoiseModel(fit.noise.phi, 0.0),))
    noise = make_noise(sample, SD_RANGE[0], own)
    A_M = np.append(np.linspace(float(sample.y_N.min()), 1.0, _CEILINGS), fit.paper_curve.A)
    A_M, rss_M = _refined(sample, noise, np.unique(A_M))
    best = int(np.argmin(rss_M))
    floor = 0.0 if math.isnan(fit.noise.floor) else fit.noise.floor / math.sqrt(sample.each)
    # A few points may lie on the curve by luck, but the sampling noise is still there.
    variance = max((rss_M[best] + sample.within) / degrees, floor**2)
    limit = float(rss_M[best] + variance * t_quantile(level, degrees) ** 2)
    inside = np.flatnonzero(rss_M <= limit)
    low = _crossing(sample, noise, A_M, inside[0] - 1, inside[0], limit)
    high = _crossing(sample, noise, A_M, inside[-1] + 1, inside[-1], limit)
    return Profile(level, float(A_M[best]), (low, high))


def _replicates(sample: Sample, phi: float, n: int, rng: np.random.Generator) -> np.ndarray:
    """Draw noise of unit size and correlation phi^gap, replicates averaged; shape (n, N)."""
    noise_nN = ar1(rng.standard_normal((n, len(sample))), phi**sample.gap_N)
    return noise_nN / np.sqrt(sample.weight_N)


def _refined(sample: Sample, noise: Noise, A_M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Add ceilings near the best by bisection; return all of them and their RSS, (M,), by ceiling."""
    rss_M = _profile_rss(sample, noise, A_M)
    for _ in range(8):
        best = int(np.argmin(rss_M))
        near = A_M[[max(best - 1, 0), best, min(best + 1, len(A_M) - 1)]]
        new_M = np.unique((near[:-1] + near[1:]) / 2)
        order = np.argsort(np.append(A_M, new_M), kind="stable")
        rss_M = np.append(rss_M, _profile_rss(sample, noise, new_M))[order]
        A_M = np.append(A_M, new_M)[order]
    return A_M, rss_M


def _crossing(
    sample: Sample, noise: Noise, A_M: np.ndarray, outside: int, inside: int, limit: float
) -> float | None:
    """Return the ceiling between two nodes at which RSS crosses `limit`; None if no node is outside."""
    if not 0 <= outside < len(A_M):
        return None
    out, within = float(A_M[outside]), float(A_M[inside])
    for _ in range(14):  # halves of 1/48, down to 1e-6
        middle = (out + within) / 2
        beyond = _profile_rss(sample, noise, np.array([middle]))[0] > limit
        out, within = (middle, within) if beyond else (out, middle)
    return (out + within) / 2


def _profile_rss(sample: Sample, noise: Noise, A_M: np.ndarray) -> np.ndarray:
    """Return the least RSS over R_0, B and C_mid for every ceiling (M,), by a grid and then zooms."""

    def grid(log_b: np.ndarray, log_mid: np.ndarray) -> np.ndarray:
        return np.stack(np.meshgrid(log_b, log_mid, indexing="ij"), axis=-1).reshape(-1, 2)

    log_lo, log_hi = sample.log_c_range
    reach = math.log(SEARCH_REACH)
    log_b = np.linspace(*LOG_B_RANGE, _GRID[0])
    log_mid = np.linspace(log_lo - reach, log_hi + reach, _GRID[1])
    step = np.array([log_b[1] - log_b[0], log_mid[1] - log_mid[0]])
    grid_K2 = grid(log_b, log_mid)
    rss_MK = _given_ceiling(sample, noise, np.broadcast_to(grid_K2, (len(A_M), *grid_K2.shape)), A_M)
    # A grid over everything, no descent from one start: the likelihood of early runs has several valleys.
    theta_M2, rss_M = grid_K2[np.argmin(rss_MK, axis=1)], rss_MK.min(axis=1)
    # Each zoom spans one step to either side of the best cell, and halves the step.
    around_K2 = grid(*[np.linspace(-1, 1, _ZOOM)] * 2)
    for _ in range(_ZOOMS):
        cell_MK2 = theta_M2[:, None] + around_K2 * step
        rss_MK = _given_ceiling(sample, noise, cell_MK2, A_M)
        best = np.argmin(rss_MK, axis=1)
        theta_M2 = np.take_along_axis(cell_MK2, best[:, None, None], 1)[:, 0]
        rss_M = np.minimum(rss_M, rss_MK.min(axis=1))
        step = step / 2
    return rss_M


def _given_ceiling(sample: Sample, noise: Noise, cell_MK2: np.ndarray, A_M: np.ndarray) -> np.ndarray:
    """Return RSS of every cell (log B, log C_mid) at its best R_0 in [0, A], or the given one; (M, K)."""
    share = LOG_LOGISTIC.share(np.exp(cell_MK2[..., :1]), sample.log_c_N - cell_MK2[..., 1:])
    q = noise.quadratic(share, sample.y_N).take(0)
    A_M1 = A_M[:, None]
    if sample.r0 is not None:
        return q.rss(sample.r0, A_M1)
    # At a given A the quadratic has its minimum at this R_0; beyond a bound, at the bound.
    R_0 = (q.hy - A_M1 * q.hg) / np.maximum(q.hh, 1e-12)
    return q.rss(np.clip(R_0, 0.0, A_M1), A_M1)
