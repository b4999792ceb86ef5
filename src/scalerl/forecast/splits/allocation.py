"""How to split sampling compute C = P n T cost: prompts per batch P, completions per prompt n, steps T.

The question is that of IsoCompute (arXiv 2603.12151), whose B_p, n and M these are; how it is answered here
is ours. The paper counts compute in completions, so that cost = 1; here it is in the unit of the runs' axis.
From a grid of runs (P, n), each with its curve, at every budget C:

    1. response: the mean curve of every run at C, with what its seed may have done to it; the runs of a cell
       are averaged
    2. surface: response = q(log P, log n) + g_cell, q a quadratic with smaller terms of third and fourth
       order. Slopes have a scale, all that bends another, and g, what q cannot follow, a third; the three are
       integrated over their priors (`scalerl.forecast.splits.mixed`). As q is right near the top only, g also
       has a share (`BELOW`) of what a cell lies below the best one: far cells hardly say where the top is
    3. draws of q, and of its highest place within the hull of the grid, at its edge too

A quadratic alone, made concave, put its top where the far sides of the grid balance: on simulated grids its
95 % intervals held the truth in 57 to 93 %. Nor is q made concave: that finds a top where there is none.

One draw has one curve of every run at all budgets, so that what is said of the growth with C counts how the
errors at several budgets hang together. Where runs say nothing, draws of the best lie anywhere on the grid,
and so does their interval.

Shapes: c cells, n draws, M budgets, V axes of the grid that vary (1 or 2), F coefficients of the surface, H
places in the hull of the grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scalerl.curve.answers import check_level
from scalerl.curve.posterior import Draws
from scalerl.curve.quantiles import Interval, tails
from scalerl.curve.result import Fit
from scalerl.curve.seeds import SEED_PRIOR, SeedPrior, shifted, theta_moments
from scalerl.errors import CannotAnswerError, InputError
from scalerl.forecast.splits.hull import places_within
from scalerl.forecast.splits.mixed import LinearPosterior, half_t, linear_posterior
from scalerl.forecast.splits.table import Allocation, AtBudget, Best, Growth

SLOPE_SCALE, BEND_SCALE, OFF_SCALE = 0.05, 0.05, 0.005
"""Scales of the half-t priors, in pass rate from the middle of the grid to its edge: slopes, what bends, and
what the surface cannot follow. Ours, and wide: the data overrule them with a dozen cells."""
MIN_BUDGETS = 3
"""Growth is said from so many budgets up at which the best is not at an edge."""
BELOW = 0.15
"""How far off the surface may be in a cell, as a share of what the cell lies below the best one. Ours."""
_DRAWS = 1000
_BUDGETS = 6


@dataclass(frozen=True)
class GridRun:
    """A run of the grid: its batch, draws of its curve, and the largest compute that it has been to."""

    prompts: int
    samples: int
    draws: Draws
    last: float

    @classmethod
    def of(cls, fit: Fit, prompts: int, samples: int, draws: int = _DRAWS) -> GridRun:
        """From a fit."""
        return cls(prompts, samples, fit.posterior.draws(draws), float(fit.points.compute_N.max()))


def allocate(
    runs: Sequence[GridRun],
    cost: float,
    *,
    budgets: Sequence[float] | None = None,
    level: float = 0.95,
    seed_prior: SeedPrior = SEED_PRIOR,
) -> Allocation:
    """The best split of every budget, and how it grows with the budget.

    Args:
        runs: a grid of batches, of one recipe otherwise; several runs of a cell are seeds.
        cost: compute of one completion, generated and trained on, in the unit of the axis.
        budgets: rising; by default geometric, from an eighth of the compute that all runs have been to.
        level: of the intervals.
        seed_prior: how far seeds are apart.

    Raises:
        InputError: a batch, cost or budget that is not above 0, or draws of unequal number.
        CannotAnswerError: fewer than three values of both P and n, or a grid without shape.
    """
    check_level(level)
    cells = _cells(runs, cost)
    within = min(run.last for run in runs)
    budgets_M = np.geomspace(within / 8, within, _BUDGETS) if budgets is None else np.asarray(budgets, float)
    if not (budgets_M > 0).all() or not (np.diff(budgets_M) > 0).all():
        raise InputError("budgets: rising computes above 0")
    grid = _Grid.of(list(cells))
    y_cnM = _responses(list(cells.values()), budgets_M, seed_prior)
    found = [_at(grid, y_cnM[:, :, i], float(c), cost, level, i) for i, c in enumerate(budgets_M)]
    best_MnV = np.array([best for _, best in found])
    at = tuple(answer for answer, _ in found)
    growth = tuple(
        _growth(name, [getattr(answer, name) for answer in at], best_MnV[:, :, v], budgets_M, level)
        for v, name in enumerate(grid.names)
    )
    cautions = []
    if budgets_M[-1] > within * (1 + 1e-9):
        cautions.append(
            f"budgets above {within:.3g} are beyond the end of a run: there its curve is a forecast"
        )
    if any(budget / (p * n * cost) < 1 for budget in budgets_M[:1] for p, n in cells):
        cautions.append("at the smallest budget some batches are less than one step")
    return Allocation(tuple(cells), cost, level, at, growth, tuple(cautions))


def _cells(runs: Sequence[GridRun], cost: float) -> dict[tuple[int, int], list[Draws]]:
    if not runs:
        raise InputError("an allocation needs a grid of runs, found none")
    if not cost > 0 or not all(run.prompts > 0 and run.samples > 0 for run in runs):
        raise InputError("prompts, samples and the cost of a completion are above 0")
    if len({len(run.draws.A_n) for run in runs}) > 1:
        raise InputError("all runs need as many draws")
    cells: dict[tuple[int, int], list[Draws]] = {}
    for run in sorted(runs, key=lambda run: (run.prompts, run.samples)):
        cells.setdefault((run.prompts, run.samples), []).append(run.draws)
    return cells


@dataclass(frozen=True)
class _Grid:
    """Cells in coordinates from -1 to 1 on every axis that varies, and places in their hull."""

    cells: tuple[tuple[int, int], ...]
    names: tuple[str, ...]
    """Axes that vary: prompts, samples."""
    middle_V: np.ndarray
    half_V: np.ndarray
    x_cV: np.ndarray
    hull_HV: np.ndarray

    @classmethod
    def of(cls, cells: list[tuple[int, int]]) -> _Grid:
        log_c2 = np.log(np.array(cells, dtype=float).reshape(-1, 2))
        varies = [len(np.unique(log_c2[:, v])) > 1 for v in (0, 1)]
        if not any(len(np.unique(log_c2[:, v])) > 2 for v in (0, 1)):
            raise CannotAnswerError(
                "a best split needs three values or more of the prompts or of the samples: two have no middle"
            )
        log_cV = log_c2[:, varies]
        middle_V, half_V = (log_cV.max(0) + log_cV.min(0)) / 2, (log_cV.max(0) - log_cV.min(0)) / 2
        x_cV = (log_cV - middle_V) / half_V
        names = tuple(name for name, does in zip(("prompts", "samples"), varies, strict=True) if does)
        return cls(tuple(cells), names, middle_V, half_V, x_cV, places_within(x_cV))

    def split(self, log_V: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(P, n) of coordinates (..., V), with the one that does not vary."""
        values = {name: np.exp(log_V[..., v]) for v, name in enumerate(self.names)}
        fixed = dict(zip(("prompts", "samples"), self.cells[0], strict=True))
        p, n = (values.get(name, np.full(log_V.shape[:-1], fixed[name])) for name in ("prompts", "samples"))
        return p, n


def _responses(cells: Sequence[Sequence[Draws]], budgets_M: np.ndarray, prior: SeedPrior) -> np.ndarray:
    """The curve of every cell's recipe at the budgets, with the seed effects that its runs leave open."""
    every = [draws for runs in cells for draws in runs]
    of_cell = np.repeat(np.arange(len(cells)), [len(runs) for runs in cells])
    spread = prior.spread().given(*theta_moments(every), of_cell)
    # One tau in a draw for all runs: it is not known, but it is the same for all of them.
    effect_R3n = spread.effects(len(every[0].A_n), runs=len(every))
    values = [
        shifted(draws, effect).curves_at(budgets_M) for draws, effect in zip(every, effect_R3n, strict=True)
    ]
    return np.array(
        [
            np.mean([v for v, cell in zip(values, of_cell, strict=True) if cell == c], axis=0)
            for c in range(len(cells))
        ]
    )


def _surface(x_XV: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Columns of the slopes, and of what bends: squares, products, third and fourth powers."""
    parts = [x_XV**2 / 2, x_XV**3 / 3, x_XV**4 / 4]
    if x_XV.shape[1] == 2:
        u, v = x_XV.T
        parts.append(np.column_stack([u * v, u * u * v / 2, u * v * v / 2]))
    return x_XV, np.hstack(parts)


def _at(
    grid: _Grid, y_cn: np.ndarray, budget: float, cost: float, level: float, seed: int
) -> tuple[AtBudget, np.ndarray]:
    """The answer at one budget, and the draws of the best (n, V), in logarithms."""
    mean_c, sd_c = y_cn.mean(axis=1), np.maximum(y_cn.std(axis=1), 1e-6)
    slopes, bends = _surface(grid.x_cV)
    slack_c = BELOW * (mean_c.max() - mean_c)
    post = linear_posterior(
        mean_c,
        np.hypot(sd_c, slack_c),
        np.ones((len(mean_c), 1)),
        [(slopes, half_t(SLOPE_SCALE)), (bends, half_t(BEND_SCALE))],
        half_t(OFF_SCALE),
    )
    coefficient_nF, off_cn = _draw_surfaces(post, grid, y_cn, sd_c, slack_c)
    value_nH = np.hstack([np.ones((len(grid.hull_HV), 1)), *_surface(grid.hull_HV)]) @ coefficient_nF.T
    best_n = value_nH.argmax(axis=0)
    best_nV = grid.middle_V + grid.half_V * grid.hull_HV[best_n]
    cell_cn = np.hstack([np.ones((len(mean_c), 1)), slopes, bends]) @ coefficient_nF.T + off_cn
    P_n, samples_n = grid.split(best_nV)
    at_Q = np.insert(tails(level), 1, 0.5)
    quantiles = {
        name: np.quantile(value_n, at_Q)
        for name, value_n in {
            "steps": budget / (P_n * samples_n * cost),
            "pass_rate": value_nH[best_n, np.arange(len(best_n))],
        }.items()
    }
    axes = {name: _best(grid, v, best_nV[:, v], level) for v, name in enumerate(grid.names)}
    answer = AtBudget(
        budget=budget,
        prompts=axes.get("prompts"),
        samples=axes.get("samples"),
        steps=_ends(quantiles["steps"]),
        pass_rate=_ends(quantiles["pass_rate"]),
        cells=_likely(grid.cells, cell_cn, level),
    )
    return answer, best_nV


def _ends(quantiles: np.ndarray) -> tuple[float, Interval]:
    low, median, high = quantiles.tolist()
    return median, (low, high)


def _draw_surfaces(
    post: LinearPosterior, grid: _Grid, y_cn: np.ndarray, sd_c: np.ndarray, slack_c: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Draws of the coefficients (n, F), and of what the surface cannot follow (c, n).

    A draw of the responses, of the scales, and of every coefficient from its prior are fitted together: for
    a linear model this draws from the posterior (Papandreou and Yuille, 2010), the errors of y as they are.
    """
    rng = np.random.default_rng(0)  # the same at all budgets
    n = y_cn.shape[1]
    held = np.cumsum(post.weight_N)
    node_n = rng.permutation(np.minimum(np.searchsorted(held, (np.arange(n) + 0.5) / n), len(held) - 1))
    slopes, bends = _surface(grid.x_cV)
    X_cF = np.hstack([np.ones((len(slopes), 1)), slopes, bends])
    sizes = [slopes.shape[1], bends.shape[1]]
    scale_nP = np.repeat(post.scale_NG[node_n], sizes, axis=1)
    size_cn = np.hypot(post.tau_N[node_n], slack_c[:, None])
    prior_nP = scale_nP * rng.standard_normal(scale_nP.shape)
    off_cn = size_cn * rng.standard_normal((len(sd_c), n))
    target_cn = y_cn - off_cn
    weight_cn = 1.0 / (sd_c[:, None] ** 2 + size_cn**2)
    coefficient_nF = _solve(X_cF, weight_cn, target_cn, 1 / scale_nP**2, prior_nP)
    share_cn = size_cn**2 * weight_cn
    off_cn = off_cn + share_cn * (target_cn - X_cF @ coefficient_nF.T)
    return coefficient_nF, off_cn


def _solve(
    X_cF: np.ndarray, weight_cn: np.ndarray, y_cn: np.ndarray, precision_nP: np.ndarray, prior_nP: np.ndarray
) -> np.ndarray:
    """Weighted least squares for every draw, its coefficients but the first drawn to `prior_nP`."""
    M_nFF = np.einsum("cf,cn,cg->nfg", X_cF, weight_cn, X_cF)
    v_nF = np.einsum("cf,cn,cn->nf", X_cF, weight_cn, y_cn)
    places = np.arange(1, X_cF.shape[1])
    M_nFF[:, places, places] += precision_nP
    v_nF[:, 1:] += precision_nP * prior_nP
    return np.linalg.solve(M_nFF, v_nF[:, :, None])[:, :, 0]


def _best(grid: _Grid, v: int, log_n: np.ndarray, level: float) -> Best:
    """The best on one axis, and whether it is at an end of the grid."""
    low, median, high = np.exp(np.quantile(log_n, np.insert(tails(level), 1, 0.5))).tolist()
    ends = np.exp([grid.middle_V[v] - grid.half_V[v], grid.middle_V[v] + grid.half_V[v]])
    near = math.exp(0.03 * grid.half_V[v])
    return Best(
        median, (low, high), (float(ends[0]), float(ends[1])), low < ends[0] * near, high > ends[1] / near
    )


def _likely(
    cells: Sequence[tuple[int, int]], value_cn: np.ndarray, level: float
) -> tuple[tuple[int, int], ...]:
    """The fewest cells that hold the best of them with probability `level`, the likeliest first."""
    share_c = np.bincount(value_cn.argmax(axis=0), minlength=len(cells)) / value_cn.shape[1]
    order = np.argsort(-share_c, kind="stable")
    count = int(np.searchsorted(np.cumsum(share_c[order]), level)) + 1
    return tuple(cells[i] for i in order[:count])


def _growth(
    name: str, best: Sequence[Best], log_Mn: np.ndarray, budgets_M: np.ndarray, level: float
) -> Growth:
    """The slope of the log of the best against log C, over the budgets at which it is within the grid."""
    inside = [i for i, one in enumerate(best) if not (one.at_low or one.at_high)]
    if len(inside) < MIN_BUDGETS:
        why = f"the best is told from both ends of the grid at {len(inside)} of {len(best)} budgets only"
        return Growth(name, None, None, why)
    x = np.log(budgets_M[inside])
    x = x - x.mean()
    slope_n = x @ log_Mn[inside] / (x @ x)
    low, median, high = np.quantile(slope_n, np.insert(tails(level), 1, 0.5)).tolist()
    return Growth(name, median, (low, high), "")
