"""The mean curves of an arm over its seeds, and what of its runs is drawn.

Shapes: N evaluations of a run, M computes of a curve.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from scalerl.curve.families import FAMILIES, Curve
from scalerl.curve.posterior import Draws
from scalerl.curve.quantiles import tails
from scalerl.curve.seeds import SEED_PRIOR, pooled, shifted
from scalerl.curve.sides import GivenFamily, Recipes, given_family
from scalerl.report.frozen import Band
from scalerl.report.numbers import Unit
from scalerl.study.labels import short_names
from scalerl.study.verdict import ArmSummary, StudyVerdict

_DRAWS, _LITTLE = 4096, 1e-3
_MOST_POINTS = 2400
"""Evaluations that are drawn in one figure, all runs together; more are thinned."""


@dataclass(frozen=True)
class RunPoints:
    """The evaluations of one run that are drawn, compute in units of the figure, and its least squares."""

    compute_N: np.ndarray
    pass_rate_N: np.ndarray
    curve: Curve | None
    """The paper's curve, compute in units of the figure; None without a fit, or where none describes it."""


@dataclass(frozen=True)
class ArmCurve:
    """An arm as it is drawn: its runs, and its mean curve over seeds with the band, where it has one."""

    name: str
    """As it fits beside a figure."""
    base: bool
    runs: tuple[RunPoints, ...]
    band: Band | None


def arm_curves(verdict: StudyVerdict, unit: Unit) -> list[ArmCurve]:
    """The arms that have an evaluation, compute in `unit`; the base first."""
    recipes = {arm.name: fits for arm in verdict.arms if (fits := [f for f in arm.fits if not f.misfit])}
    prior = verdict.comparison.seed_prior if verdict.comparison else SEED_PRIOR
    given = functools.cache(lambda family: given_family(recipes, prior, family))
    level = verdict.comparison.level if verdict.comparison else 0.95
    count = sum(run.run.record is not None for arm in verdict.arms for run in arm.runs)
    most = max(_MOST_POINTS // max(count, 1), 6)
    names = short_names([arm.name for arm in verdict.arms])
    found = []
    for arm in verdict.arms:
        runs = tuple(_points(verdict, arm, unit, most))
        if not runs:
            continue
        # Beyond what its own runs have measured a curve is a forecast, which the tables give.
        compute_M = _grid(runs)
        draws = recipe_draws(recipes, arm.name, given) if arm.name in recipes and len(compute_M) else None
        band = None if draws is None else _band(draws, compute_M, unit, level)
        found.append(ArmCurve(names[arm.name], arm.name == verdict.study.plan["base"], runs, band))
    return sorted(found, key=lambda arm: not arm.base)


def recipe_draws(recipes: Recipes, name: str, given: Callable[[int], GivenFamily], n: int = _DRAWS) -> Draws:
    """Mean curves of a recipe, the effects of its seeds included: about n draws of equal weight."""
    fits = recipes[name]
    log_F = np.zeros(len(FAMILIES))
    for fit in fits:  # all seeds of a recipe share the family
        weights = fit.posterior.family_weights()
        log_F += np.log([max(weights[family.name], 1e-300) for family in FAMILIES])
    weight_F = np.exp(log_F - log_F.max())
    parts = []
    for family, weight in enumerate(weight_F / weight_F.sum()):
        if weight > _LITTLE and (size := round(n * weight)):
            shared = given(family)
            posteriors = shared.posteriors[name]
            runs = [post.draws(size, seed=seed) for seed, post in enumerate(posteriors)]
            mean, share = pooled(runs, shared.spread)
            (effect_3n,) = shared.spread.effects(size, seed=family)
            parts.append(shifted(mean, math.sqrt(share) * effect_3n))
    names = ("family_n", "A_n", "log_b_n", "log_mid_n", "R_0_n")
    return Draws(FAMILIES, *(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def _band(draws: Draws, compute_M: np.ndarray, unit: Unit, level: float) -> Band:
    low, high = tails(level)
    curve_nM = draws.curves_at(compute_M * unit.size)
    return Band(compute_M, *np.quantile(curve_nM, [0.5, low, high], axis=0))


def _grid(runs: tuple[RunPoints, ...]) -> np.ndarray:
    compute_N = np.concatenate([run.compute_N for run in runs])
    positive_N = compute_N[compute_N > 0]
    return np.geomspace(positive_N.min(), positive_N.max(), 81) if positive_N.size else positive_N


def _points(verdict: StudyVerdict, arm: ArmSummary, unit: Unit, most: int) -> list[RunPoints]:
    found = []
    for fitted in arm.runs:
        record, fit = fitted.run.record, fitted.fit
        if fit is not None:
            compute_N, pass_rate_N = fit.points.compute_N, fit.points.pass_rate_N
        elif record is not None and record.evals and verdict.axis in record.logged_axes():
            compute_N = record.compute(verdict.axis)
            pass_rate_N = np.array([point.pass_rate for point in record.evals])
        else:
            continue
        keep_N = np.unique(np.linspace(0, len(compute_N) - 1, min(most, len(compute_N))).round().astype(int))
        curve = None if fit is None or fit.misfit else _in_unit(fit.curve, unit)
        found.append(RunPoints(compute_N[keep_N] / unit.size, pass_rate_N[keep_N], curve))
    return found


def _in_unit(curve: Curve, unit: Unit) -> Curve:
    return Curve(curve.family, curve.A, curve.B, curve.C_mid / unit.size, curve.R_0)
