"""Paper mode: the fit and the comparison exactly as the paper makes them, to match published numbers.

Khatri et al., arXiv 2510.13786, section 2 and appendix: R_0 is given. For every A and C_mid of a grid only B
is fitted by least squares, and the cell with the least squared error is kept. The answer has no uncertainty;
for that use `scalerl.curve.fit`.

Shapes: N points, K nodes of log B, M values of C_mid, L ceilings, Q cells that may still win.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from scalerl.curve.families import LOG_LOGISTIC, Curve, log_compute
from scalerl.curve.points import Points
from scalerl.curve.sample import MAX_ROWS
from scalerl.errors import CannotAnswerError, InputError, counted
from scalerl.numbers import percent

if TYPE_CHECKING:
    from scalerl.curve.result import Fit

PAPER_CEILINGS: tuple[float, ...] = tuple(float(a) for a in np.arange(450, 801, 5) / 1000)
"""A = .450, .455, ..., .800."""
PAPER_C_MIDS: tuple[float, ...] = tuple(
    float(c) for c in np.unique(np.trunc(np.r_[np.linspace(100, 4000, 100), np.linspace(4000, 40000, 100)]))
)
"""C_mid in GPU-hours: two linear grids, truncated to integers, with all but one of the published values."""
PAPER_MIN_COMPUTE = 1500.0
"""GPU-hours that are left out of the fit, about the first epoch."""
SAME_CEILING = 0.02
"""Ceilings that differ by no more count as one: three seeds of one recipe lay within +-.015."""

_SPAN = 2 * PAPER_MIN_COMPUTE, 10 * PAPER_C_MIDS[-1]  # where a run must end for the paper's own grids
_RUN = 8000.0  # GPU-hours at which most published fits end; grids are scaled by the run's end over this
_LOG_B_K = np.linspace(math.log(0.05), math.log(20.0), 64)
_CURVATURE = 0.235  # bounds the second derivative of the log-logistic share by log B, whatever C and B
_ZOOM = np.linspace(0.0, 1.0, 9)


@dataclass(frozen=True)
class PaperFit:
    """A curve as the paper fits it: on the grid in A and C_mid, and without any uncertainty."""

    curve: Curve
    rss: float
    """Sum of squared residuals."""
    r0_source: Literal["given", "measured"]
    min_compute: float
    points: Points = field(repr=False)
    """The points that were fitted, none below `min_compute`."""
    ceilings: tuple[float, ...] = field(repr=False)
    c_mids: tuple[float, ...] = field(repr=False)
    warnings: tuple[str, ...]

    @property
    def c_max_over_c_mid(self) -> float:
        """The largest compute of the data over C_mid."""
        return float(self.points.compute_N.max()) / self.curve.C_mid

    def to_json(self) -> dict[str, Any]:
        """Return the parameters, and the points that were fitted."""
        curve = self.curve
        return {
            "A": curve.A,
            "B": curve.B,
            "C_mid": curve.C_mid,
            "r0": {"value": curve.R_0, "source": self.r0_source},
            "rss": self.rss,
            "points": len(self.points),
            "axis": self.points.axis,
            "min_compute": self.min_compute,
            "c_max_over_c_mid": self.c_max_over_c_mid,
            "warnings": list(self.warnings),
        }

    def __str__(self) -> str:
        curve = self.curve
        line = (
            f"paper  A {curve.A:.4g}  B {curve.B:.3g}  C_mid {curve.C_mid:.5g}  R_0 {curve.R_0:.3f} "
            f"{self.r0_source}  ({len(self.points)} points on {self.points.axis} from {self.min_compute:g})"
        )
        return "\n".join([line, *(f"  warning: {warning}" for warning in self.warnings)])


def paper_fit(
    points: Points,
    r0: float | None = None,
    *,
    min_compute: float | None = None,
    ceilings: tuple[float, ...] = PAPER_CEILINGS,
    c_mids: tuple[float, ...] | None = None,
) -> PaperFit:
    """Fit the log-logistic curve by the paper's grid search (arXiv 2510.13786, equation 1).

    Args:
        points: evaluations of one run.
        r0: R_0; by default the mean of the evaluations at compute 0.
        min_compute: compute below this is left out; by default 1,500 GPU-hours.
        ceilings: the values of A to try.
        c_mids: the values of C_mid to try, in the unit of the axis. By default the paper's, in GPU-hours. If
            a run ends outside 3,000 to 400,000, the grids and `min_compute` are scaled by its end over 8,000,
            where published runs end, with a warning. (An error would rule out paper mode on every other axis
            and for every small run.)

    Raises:
        InputError: R_0 is neither given nor measured, or not a pass rate, or no ceiling lies above it.
        CannotAnswerError: fewer than three evaluations at distinct compute are left, or they do not rise.
    """
    source: Literal["given", "measured"] = "measured" if r0 is None else "given"
    if r0 is None:
        zero_N = points.compute_N == 0
        if not zero_N.any():
            raise InputError(
                f"{points.source}: the paper's fit needs R_0, and there is no evaluation at C = 0: give r0"
            )
        r0 = float(points.pass_rate_N[zero_N].mean())
    if not 0 <= r0 < 1:
        raise InputError(f"R_0 must be a pass rate in [0, 1), found {r0:g}")
    scale, warnings = _scale(points) if c_mids is None else (1.0, ())
    c_mids = tuple(scale * c for c in PAPER_C_MIDS) if c_mids is None else c_mids
    min_compute = scale * PAPER_MIN_COMPUTE if min_compute is None else float(min_compute)
    ceilings = tuple(a for a in ceilings if a > r0)
    if not ceilings:
        raise InputError(f"{points.source}: no ceiling of the grid is above R_0 = {r0:g}; give others")
    chosen = points.select((points.compute_N >= min_compute) & (points.compute_N > 0))
    n = len(np.unique(chosen.compute_N))
    if n < 3:
        raise CannotAnswerError(
            f"{points.source}: {counted(n, 'evaluation')} of different compute from {min_compute:g} on; "
            f"the paper's fit needs at least 3 (is min_compute in the unit of {points.axis}?)"
        )
    last_N = chosen.pass_rate_N[np.argsort(chosen.compute_N, kind="stable")[-max(len(chosen) // 3, 1) :]]
    if last_N.mean() <= r0:
        raise CannotAnswerError(
            f"{points.source}: {points.metric.subject} does not rise: from {r0:.3f} (R_0) to "
            f"{last_N.mean():.3f} (last third)"
        )
    left_out = int(np.count_nonzero((points.compute_N > 0) & (points.compute_N < min_compute)))
    curve, rss = _search(chosen, r0, np.array(ceilings), np.array(c_mids))
    warnings = (*points.warnings, *warnings)
    found = PaperFit(curve, rss, source, min_compute, chosen, ceilings, c_mids, warnings)
    return replace(found, warnings=(*warnings, *_doubts(found, left_out)))


def linearised(points: Points, curve: Curve, size: float = 1.0) -> np.ndarray:
    """Return F = C_mid^B / ((A - R_0) / (R_C - R_0) - 1), (N,): on the curve log F = B log C.

    NaN where R_C is not between R_0 and A. C_mid is in units of `size`.
    """
    gain_N, gap_N = points.pass_rate_N - curve.R_0, curve.A - points.pass_rate_N
    out_N = np.full(len(points), np.nan)
    odds_N = np.divide(gain_N, gap_N, out=out_N, where=(gain_N > 0) & (gap_N > 0))
    # C_mid^B overflows to infinity where B is large on an axis of FLOPs, which is right.
    with np.errstate(over="ignore"):
        return np.power(np.float64(curve.C_mid / size), curve.B) * odds_N


def paper_fit_of(fit: Fit, min_compute: float | None = None) -> PaperFit:
    """Make a `paper_fit` of the points of a fit, with its R_0 if that was given, else the measured one.

    For a long run the points are the rows of the fit's sample, means of consecutive evaluations.

    Raises:
        InputError, CannotAnswerError: as `paper_fit`.
    """
    points, sample = fit.points, fit.sample
    if len(points) > MAX_ROWS:
        source, axis = points.source, points.axis
        # Time and memory grow with the points, times 13,000 pairs of B and C_mid.
        points = Points.from_arrays(np.exp(sample.log_c_N), sample.y_N, source=source, axis=axis)
    r0 = fit.r0_value if fit.r0_source == "given" else None
    return paper_fit(points, r0, min_compute=min_compute)


def _scale(points: Points) -> tuple[float, tuple[str, ...]]:
    """Return the factor for the paper's grids, and a warning unless it is 1."""
    last = float(points.compute_N.max(initial=0.0))
    if _SPAN[0] <= last <= _SPAN[1] or last == 0.0:
        return 1.0, ()
    return last / _RUN, (
        f"the run ends at {last:.4g} {points.axis}, where the grid of C_mid (100 to 40,000 GPU-hours) "
        f"does not serve: grid and min_compute are scaled by {last / _RUN:.3g}, a run of 8,000 to this one",
    )


def _search(points: Points, r0: float, ceiling_L: np.ndarray, c_mid_M: np.ndarray) -> tuple[Curve, float]:
    """Return the curve of least squared error over the cells (A, C_mid), with B exact, and that error."""
    y_N = points.pass_rate_N - r0
    x_MN = log_compute(points.compute_N) - np.log(c_mid_M)[:, None]
    gain_L = ceiling_L - r0
    k_Q, m_Q, l_Q = _candidates(y_N, x_MN, gain_L)
    log_b, q, rss = _zoom(_LOG_B_K[k_Q], _LOG_B_K[k_Q + 1], x_MN[m_Q], gain_L[l_Q], y_N)
    best = Curve(LOG_LOGISTIC, float(ceiling_L[l_Q[q]]), math.exp(log_b), float(c_mid_M[m_Q[q]]), r0)
    return best, rss


def _candidates(
    y_N: np.ndarray, x_MN: np.ndarray, gain_L: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the segments of B between neighbouring nodes, (k, m, l), that can hold the least squared error.

    Given B, the squared error S is a quadratic in A, so one scan of B serves all ceilings. Along the chord
    between the curves at two nodes, S(t) = (1 - t) S_0 + t S_1 - t (1 - t) D^2 with D their distance. The
    curves in between are nowhere farther from the chord than `_CURVATURE` h^2 / 8 of the gain.
    """
    # One node of B at a time: all shares at once would take K M N numbers.
    gg_KM, gy_KM, dd_KM = np.empty((3, len(_LOG_B_K), len(x_MN)))
    before_MN = np.zeros_like(x_MN)
    for k, b in enumerate(np.exp(_LOG_B_K)):
        share_MN = LOG_LOGISTIC.share(b, x_MN)
        step_MN = share_MN - before_MN
        gg_KM[k], gy_KM[k] = np.einsum("mn,mn->m", share_MN, share_MN), share_MN @ y_N
        dd_KM[k] = np.einsum("mn,mn->m", step_MN, step_MN)
        before_MN = share_MN
    rss_KML = y_N @ y_N - 2 * gain_L * gy_KM[..., None] + gain_L**2 * gg_KM[..., None]
    left_KML, right_KML, dd_KML = rss_KML[:-1], rss_KML[1:], gain_L**2 * dd_KM[1:, :, None]
    # The minimum of the parabola along the chord, kept between its ends.
    t_KML = np.clip(0.5 + (left_KML - right_KML) / (2 * np.maximum(dd_KML, 1e-300)), 0.0, 1.0)
    chord_KML = left_KML + t_KML * (right_KML - left_KML - (1 - t_KML) * dd_KML)
    sag_L = _CURVATURE * (_LOG_B_K[1] - _LOG_B_K[0]) ** 2 / 8 * math.sqrt(len(y_N)) * gain_L
    distance_KML = np.sqrt(np.maximum(chord_KML, 0.0))
    # Kept if the least possible distance is within the largest that the best can have.
    k_Q, m_Q, l_Q = np.nonzero(distance_KML - sag_L <= (distance_KML + sag_L).min())
    return k_Q, m_Q, l_Q


def _zoom(
    low_Q: np.ndarray, high_Q: np.ndarray, x_QN: np.ndarray, gain_Q: np.ndarray, y_N: np.ndarray
) -> tuple[float, int, float]:
    """Return (log B, q, S) of the least squared error over all segments; each round divides them by 4."""
    while True:
        log_b_QZ = low_Q[:, None] + (high_Q - low_Q)[:, None] * _ZOOM
        share_ZQN = (LOG_LOGISTIC.share(np.exp(log_b_Q)[:, None], x_QN) for log_b_Q in log_b_QZ.T)
        rss_QZ = np.stack([np.sum((y_N - gain_Q[:, None] * g) ** 2, axis=1) for g in share_ZQN], axis=1)
        if (high_Q - low_Q).max() < 1e-8:
            q, z = np.unravel_index(rss_QZ.argmin(), rss_QZ.shape)
            return float(log_b_QZ[q, z]), int(q), float(rss_QZ[q, z])
        z_Q, rows = rss_QZ.argmin(axis=1), np.arange(len(rss_QZ))
        # Both neighbours: the minimum lies between them wherever S has one valley in the segment.
        low_Q = log_b_QZ[rows, np.maximum(z_Q - 1, 0)]
        high_Q = log_b_QZ[rows, np.minimum(z_Q + 1, len(_ZOOM) - 1)]


def _doubts(fit: PaperFit, left_out: int) -> tuple[str, ...]:
    """Return warnings where the paper's answer is known to mislead; `left_out` evaluations were cut."""
    curve, doubts = fit.curve, []
    for name, value, grid in (("A", curve.A, fit.ceilings), ("C_mid", curve.C_mid, fit.c_mids)):
        if len(grid) > 1 and value in (min(grid), max(grid)):
            doubts.append(f"{name} = {value:g} lies on the edge of its grid: the grid chose it, not the data")
    if not _LOG_B_K[0] + 1e-6 < math.log(curve.B) < _LOG_B_K[-1] - 1e-6:
        doubts.append(f"B = {curve.B:.3g} lies on the edge of what is tried (0.05 to 20)")
    if (reach := fit.c_max_over_c_mid) < 2:
        doubts.append(
            # The standard errors are those that benchmarks/paper_rule.py prints.
            f"the data reach {reach:.2g} C_mid: below 2 the ceiling is a guess (with noise .0075 its "
            "standard error is .03 at 2 C_mid, .06 at 1.6, .48 at 1)"
        )
    skipped = float((curve(fit.min_compute) - curve.R_0) / (curve.A - curve.R_0))
    if left_out and skipped > 0.1:
        doubts.append(
            f"leaving out compute under {fit.min_compute:g} leaves out the first {percent(skipped)} of the "
            "gain: B then rests on R_0, which is given and not fitted"
        )
    return tuple(doubts)


@dataclass(frozen=True)
class PaperComparison:
    """Two runs compared as the paper does it: by A if it differs, else by B at the average A."""

    by: Literal["A", "B"]
    first: PaperFit
    """The fit that is compared; A is held at the average where `by` is "B"."""
    second: PaperFit
    separate: tuple[PaperFit, PaperFit] = field(repr=False)
    """The two fits with A free."""
    warnings: tuple[str, ...]

    @property
    def difference(self) -> float:
        """Second minus first, of A or of B."""
        return getattr(self.second.curve, self.by) - getattr(self.first.curve, self.by)

    def to_json(self) -> dict[str, Any]:
        """Return what was compared, at which ceiling, and the fits."""
        return {
            "by": self.by,
            "difference": self.difference,
            "A_held": self.first.curve.A if self.by == "B" else None,
            "compared": [self.first.to_json(), self.second.to_json()],
            "separate": [fit.to_json() for fit in self.separate],
            "warnings": list(self.warnings),
        }

    def __str__(self) -> str:
        a, b = self.first.curve, self.second.curve
        answer = f"A differs by {self.difference:+.3f}: {a.A:.3f} and {b.A:.3f}"
        if self.by == "B":
            answer = (
                f"one A for both, {a.A:.4g}; B differs by {self.difference:+.3f}: {a.B:.3f} and {b.B:.3f}"
            )
        return "\n".join([answer, *(f"  warning: {warning}" for warning in self.warnings)])


def paper_compare(a: PaperFit, b: PaperFit) -> PaperComparison:
    """Compare two runs as the paper does (arXiv 2510.13786): no seeds, no uncertainty.

    If their ceilings differ by at most .02, both are refitted with A at the average of the two, and B is
    compared; otherwise A is compared.

    Raises:
        InputError: the two runs are on different compute axes.
    """
    if a.points.axis != b.points.axis:
        raise InputError(
            f"{a.points.source} is on {a.points.axis}, {b.points.source} on {b.points.axis}: "
            "runs are compared on one compute axis"
        )
    warnings = tuple(f"{fit.points.source}: {warning}" for fit in (a, b) for warning in fit.warnings)
    # 1e-9: ceilings are multiples of .005, which floats do not represent exactly.
    if abs(a.curve.A - b.curve.A) > SAME_CEILING + 1e-9:
        seeds = "one run each cannot show seed variance; three seeds of one recipe lay within +-.015 in A"
        return PaperComparison("A", a, b, (a, b), (*warnings, seeds))
    held = (a.curve.A + b.curve.A) / 2
    first, second = (
        replace(
            paper_fit(
                fit.points, fit.curve.R_0, min_compute=fit.min_compute, ceilings=(held,), c_mids=fit.c_mids
            ),
            r0_source=fit.r0_source,
        )
        for fit in (a, b)
    )
    claim = (
        "where only A differs, B at an averaged A favours the run with the higher A in 76 to 100 % of the "
        "pairs: compare with intervals before believing it"
    )
    return PaperComparison("B", first, second, (a, b), (*warnings, claim))
