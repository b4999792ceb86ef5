"""Least squares for one family, arranged so that it cannot get stuck.

Given (B, C_mid) the curve is linear in (R_0, A), so the search is over two numbers only (variable
projection; Golub and Pereyra, 1973): a grid over their whole range, then Gauss-Newton from the best cells.

Shapes: N points at distinct compute, P noise correlations, and `...` any grid of (log B, log C_mid).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from scalerl.curve.families import Curve, Family, log_compute
from scalerl.curve.points import Points

LOG_B_RANGE = (math.log(0.05), math.log(20.0))
"""Where the point estimate is searched; wider than the prior of the intervals, and flagged when reached."""


@dataclass(frozen=True)
class Sample:
    """Points sorted by compute, replicates averaged; what the numerics need of them.

    `weight_N` counts the replicates behind each mean, `within` is their sum of squares about their means,
    `gap_N[i]` is the distance from point i-1 to i in usual steps between evaluations, at least 1.
    `r0` is a fixed R_0, or None where it is a parameter.
    """

    log_c_N: np.ndarray
    y_N: np.ndarray
    weight_N: np.ndarray
    gap_N: np.ndarray
    within: float
    n_points: int
    r0: float | None

    @property
    def n_linear(self) -> int:
        """How many of (R_0, A) are free."""
        return 2 if self.r0 is None else 1

    @property
    def log_c_range(self) -> tuple[float, float]:
        """Logarithms of the smallest positive and the largest compute."""
        positive = self.log_c_N[np.isfinite(self.log_c_N)]
        return float(positive[0]), float(positive[-1])


def make_sample(points: Points, r0: float | None) -> Sample:
    """Sort, average replicates, and measure the gaps between consecutive evaluations."""
    compute_N, group_N, count_N = np.unique(points.compute_N, return_inverse=True, return_counts=True)
    y_N = np.bincount(group_N, points.pass_rate_N) / count_N
    step_N = np.arange(len(compute_N), dtype=float)
    if points.step_N is not None:
        step_N = np.bincount(group_N, points.step_N) / count_N
    gap_N = np.abs(np.diff(step_N, prepend=step_N[0]))
    usual = float(np.median(gap_N[1:])) if len(gap_N) > 1 else 1.0
    # Evaluations closer than usual still have sampling noise of their own: no more correlation than at 1.
    gap_N = np.maximum(gap_N / usual, 1.0) if usual > 0 else np.ones_like(gap_N)
    within = float(np.sum((points.pass_rate_N - y_N[group_N]) ** 2))
    return Sample(log_compute(compute_N), y_N, count_N.astype(float), gap_N, within, len(points), r0)


@dataclass(frozen=True)
class Quadratic:
    """The residual sum of squares of every cell as a quadratic in (R_0, A); all fields shape (P, ...).

    RSS = yy - 2 (R_0 hy + A gy) + R_0^2 hh + 2 R_0 A hg + A^2 gg, with g the share reached and h = 1 - g.
    """

    gg: np.ndarray
    hg: np.ndarray
    hh: np.ndarray
    gy: np.ndarray
    hy: np.ndarray
    yy: np.ndarray

    def rss(self, R_0: np.ndarray | float, A: np.ndarray | float) -> np.ndarray:
        """Residual sum of squares at (R_0, A)."""
        square = self.yy - 2 * (R_0 * self.hy + A * self.gy)
        square = square + R_0 * R_0 * self.hh + 2 * R_0 * A * self.hg + A * A * self.gg
        return np.maximum(square, 0.0)

    def best(self, r0: float | None) -> tuple[np.ndarray, np.ndarray]:
        """(R_0, A) of the least RSS within 0 <= R_0 <= A <= 1, or of A alone where `r0` is given."""
        tiny = 1e-300
        if r0 is not None:
            A = np.clip((self.gy - r0 * self.hg) / np.maximum(self.gg, tiny), r0, 1.0)
            return np.full_like(A, r0), A
        det = self.gg * self.hh - self.hg**2
        sound = det > 1e-12 * self.gg * self.hh
        det = np.where(sound, det, 1.0)
        R_0 = (self.hy * self.gg - self.gy * self.hg) / det
        A = (self.gy * self.hh - self.hy * self.hg) / det
        level = (self.gy + self.hy) / (self.gg + 2 * self.hg + self.hh)  # the best constant: A = R_0
        inside = sound & (R_0 >= 0) & (A >= R_0) & (A <= 1)
        # Outside, the best is on an edge: A = 1, R_0 = 0 or A = R_0.
        R_0_at_1 = np.clip((self.hy - self.hg) / np.maximum(self.hh, tiny), 0.0, 1.0)
        A_at_0 = np.clip(self.gy / np.maximum(self.gg, tiny), 0.0, 1.0)
        edges_R_0 = np.stack([np.clip(level, 0, 1), R_0_at_1, np.zeros_like(A)])
        edges_A = np.stack([np.clip(level, 0, 1), np.ones_like(A), A_at_0])
        edge = np.argmin(self.rss(edges_R_0, edges_A), axis=0)[None]
        R_0 = np.where(inside, R_0, np.take_along_axis(edges_R_0, edge, 0)[0])
        A = np.where(inside, A, np.take_along_axis(edges_A, edge, 0)[0])
        return R_0, A


@dataclass(frozen=True)
class Precision:
    """Inverse noise correlations: tridiagonal, as consecutive evaluations are correlated as AR(1).

    `diagonal_PN`, and `below_PN` with the entry of (i, i - 1) at i, 0 at i = 0.
    """

    diagonal_PN: np.ndarray
    below_PN: np.ndarray

    def product(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """a^T K^-1 b for every pair of rows of `a` (cells, N) and `b` (cells, N) or (N,): (P, cells)."""
        across = a[:, 1:] * b[..., :-1] + a[:, :-1] * b[..., 1:]
        return self.diagonal_PN @ (a * b).T + self.below_PN[:, 1:] @ across.T


def quadratic(share: np.ndarray, y_N: np.ndarray, precision: Precision) -> Quadratic:
    """The quadratic of every cell, from the shares (..., N) and the inverse noise correlations."""
    g = share.reshape(-1, share.shape[-1])
    h = 1.0 - g
    shape = (len(precision.diagonal_PN), *share.shape[:-1])
    yy = precision.product(y_N[None], y_N).reshape(-1, *(1,) * (share.ndim - 1))
    pairs = {"gg": (g, g), "hg": (h, g), "hh": (h, h), "gy": (g, y_N), "hy": (h, y_N)}
    products = {name: precision.product(a, b).reshape(shape) for name, (a, b) in pairs.items()}
    return Quadratic(yy=np.broadcast_to(yy, shape), **products)


def share_at(family: Family, log_b: np.ndarray, log_mid: np.ndarray, log_c_N: np.ndarray) -> np.ndarray:
    """Share of the gain at every point for every cell: broadcast(log_b, log_mid).shape + (N,)."""
    return family.share(np.exp(log_b)[..., None], log_c_N - log_mid[..., None])


@dataclass(frozen=True)
class LeastSquares:
    """The best curve of one family, its sum of squares (replicates included), and the bounds it lies on."""

    curve: Curve
    rss: float
    at_bounds: tuple[str, ...]


def least_squares(
    sample: Sample, family: Family, log_b_range: tuple[float, float] = LOG_B_RANGE, starts: int = 3
) -> LeastSquares:
    """Minimise the weighted sum of squares over R_0, A, B and C_mid, with 0 <= R_0 <= A <= 1."""
    log_lo, log_hi = sample.log_c_range
    box = np.array([log_b_range, (log_lo - math.log(100.0), log_hi + math.log(100.0))])
    log_b = np.linspace(box[0, 0], box[0, 1], 25)
    log_mid = np.concatenate(
        [
            np.linspace(box[1, 0], log_lo, 6)[:-1],
            np.linspace(log_lo, log_hi, 24),
            np.linspace(log_hi, box[1, 1], 8)[1:],
        ]
    )
    grid_b, grid_mid = (g.ravel() for g in np.meshgrid(log_b, log_mid))
    precision = _independent(sample)
    q = quadratic(share_at(family, grid_b, grid_mid, sample.log_c_N), sample.y_N, precision)
    rss = q.rss(*q.best(sample.r0))[0]
    cells = np.argsort(rss, kind="stable")[: 40 * starts]
    # Starts that lie apart, so that two valleys are both walked.
    chosen: list[np.ndarray] = []
    for cell in cells:
        theta = np.array([grid_b[cell], grid_mid[cell]])
        if all(np.abs(theta - other).max() > 0.5 for other in chosen):
            chosen.append(theta)
    polished = [_polish(sample, family, theta, box) for theta in chosen[:starts]]
    return min(polished, key=lambda p: p.rss)


def _independent(sample: Sample) -> Precision:
    return Precision(sample.weight_N[None], np.zeros((1, len(sample.weight_N))))


def _solve(sample: Sample, family: Family, theta: np.ndarray) -> tuple[float, float, np.ndarray]:
    """(R_0, A) and the weighted residuals at theta = (log B, log C_mid)."""
    root_N = np.sqrt(sample.weight_N)
    share_N = share_at(family, theta[0], theta[1], sample.log_c_N)
    q = quadratic(share_N[None], sample.y_N, _independent(sample))
    R_0, A = (float(v[0, 0]) for v in q.best(sample.r0))
    return R_0, A, root_N * (sample.y_N - R_0 - (A - R_0) * share_N)


def _jacobian(sample: Sample, family: Family, theta: np.ndarray, R_0: float, A: float) -> np.ndarray:
    """d residual / d theta with the linear parameters re-fitted (Kaufman, 1975), shape (N, 2)."""
    root_N = np.sqrt(sample.weight_N)
    ratio_N = sample.log_c_N - theta[1]
    b = math.exp(theta[0])
    share_N, by_log_b_N, by_log_c_N = family.slopes(np.asarray(b), ratio_N)
    jacobian = (R_0 - A) * np.stack([by_log_b_N, -by_log_c_N], axis=1) * root_N[:, None]
    free = []
    if sample.r0 is None and 0 < R_0 < A:
        free.append(root_N * (1 - share_N))
    if R_0 < A < 1:
        free.append(root_N * share_N)
    if free:
        basis, _ = np.linalg.qr(np.stack(free, axis=1))
        jacobian = jacobian - basis @ (basis.T @ jacobian)
    return jacobian


def _polish(sample: Sample, family: Family, theta: np.ndarray, box: np.ndarray) -> LeastSquares:
    """Levenberg-Marquardt in (log B, log C_mid), kept inside `box`."""
    damping = 1e-3
    R_0, A, residual_N = _solve(sample, family, theta)
    rss = float(residual_N @ residual_N)
    for _ in range(100):
        J = _jacobian(sample, family, theta, R_0, A)
        gradient, hessian = J.T @ residual_N, J.T @ J
        # A parameter on its bound that wants to go beyond it is held there.
        held = ((theta <= box[:, 0]) & (gradient > 0)) | ((theta >= box[:, 1]) & (gradient < 0))
        scale = np.diag(hessian) + 1e-12 * np.trace(hessian) + 1e-300
        matrix = hessian + damping * np.diag(scale)
        matrix[held], matrix[:, held] = 0.0, 0.0
        matrix[held, held] = 1.0
        step = -np.linalg.solve(matrix, np.where(held, 0.0, gradient))
        step *= min(1.0, 1.0 / max(float(np.abs(step).max()), 1e-300))  # a factor e at most
        trial = np.clip(theta + step, box[:, 0], box[:, 1])
        trial_R_0, trial_A, trial_N = _solve(sample, family, trial)
        trial_rss = float(trial_N @ trial_N)
        moved = float(np.abs(trial - theta).max())
        if trial_rss <= rss:
            gain = rss - trial_rss
            theta, R_0, A, residual_N, rss = trial, trial_R_0, trial_A, trial_N, trial_rss
            damping = max(damping / 10, 1e-12)
            if moved < 1e-11 or (gain <= 1e-13 * rss and moved < 1e-7):
                break
        else:
            damping *= 10
            if damping > 1e12 or moved < 1e-13:
                break
    curve = Curve(family, A, float(np.exp(theta[0])), float(np.exp(theta[1])), R_0)
    return LeastSquares(curve, rss + sample.within, _bounds(curve, theta, box, sample.r0))


def _bounds(curve: Curve, theta: np.ndarray, box: np.ndarray, r0: float | None) -> tuple[str, ...]:
    names = []
    if curve.A >= 1.0:
        names.append("A = 1")
    if r0 is None and curve.R_0 <= 0.0:
        names.append("R_0 = 0")
    for name, value, (low, high) in zip(("B", "C_mid"), theta, box, strict=True):
        if value <= low or value >= high:
            names.append(f"{name} = {math.exp(value):.3g}")
    return tuple(names)
