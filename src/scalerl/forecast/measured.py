"""What is measured of a recipe against the base, without a curve: paired differences over common seeds.

With few seeds the variance of each recipe is hardly known. It is moderated by those of the others, which are
taken as draws of one scaled inverse chi-squared distribution (Smyth, Stat. Appl. Genet. Mol. Biol. 2004):

    s~^2 = (d_0 s_0^2 + d s^2) / (d_0 + d),    t = difference / (s~ / sqrt(S)) with d_0 + d degrees of freedom

Shapes: S seeds, A recipes.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from scalerl.curve.result import Fit
from scalerl.forecast.comparison import Claim, Difference, Verdict

POWER, MOST_SEEDS = 0.8, 100
NEAR = 0.05
"""A run counts at a compute if it falls short of it by no more than this share."""
_MOST_DEGREES = 1000.0


@dataclass(frozen=True)
class MeasuredDifference:
    """A recipe less the base at one compute: mean over common seeds with its interval, and the claim."""

    seeds: int
    difference: Difference
    claim: Claim


@dataclass(frozen=True)
class MeasuredRates:
    """The pass rates of a recipe's runs at one compute, by seed; NaN where a run did not get that far."""

    rates: Mapping[Any, float]
    models: Mapping[Any, str]
    """The base model of every seed: seeds of one model are no evidence about others."""
    completions: float
    """The fewest completions of any evaluation; infinite if none is known."""

    @classmethod
    def of(cls, fits: Sequence[Fit], blocks: Sequence[Hashable], compute: float) -> "MeasuredRates":
        """Interpolate the evaluations of runs, each with its block: a seed, or (base model, seed)."""
        rates: dict[Hashable, float] = {}
        completions = math.inf
        for fit, block in zip(fits, blocks, strict=True):
            points = fit.points
            reached = compute <= points.compute_N[-1] * (1 + NEAR)
            rate = np.interp(compute, points.compute_N, points.pass_rate_N)
            rates[block] = float(rate) if reached else math.nan
            known_N = points.samples_N[points.samples_N > 0]
            completions = min(completions, float(known_N.min(initial=math.inf)))
        models = {block: str(block[0]) if isinstance(block, tuple) else "" for block in blocks}
        return cls(rates, models, completions)


def paired_differences(
    recipes: Mapping[str, MeasuredRates], base: str, level: float
) -> dict[str, MeasuredDifference]:
    """Return the paired difference of every recipe to the base, by its name.

    Each interval holds with `level`; p-values are corrected (Holm) over the recipes that differ at all. A
    recipe with fewer than two seeds in common with the base is left out.

    A pass rate is a multiple of 1 / n for n completions, so two seeds may differ equally by chance: the
    variance between seeds is at least that of rounding both rates, 1 / (6 n^2).
    """
    reference = recipes.get(base, MeasuredRates({}, {}, math.inf))
    of_base = reference.rates
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    variances, degrees = [], []
    for name, own in recipes.items():
        seeds = [s for s in own.rates if s in of_base and math.isfinite(own.rates[s] - of_base[s])]
        if name == base or len(seeds) < 2:
            continue
        base_S = np.array([of_base[seed] for seed in seeds])
        value_S = np.array([own.rates[seed] for seed in seeds]) - base_S
        groups = [own.models[seed] for seed in seeds]
        found[name] = value_S, base_S
        rounding = 1 / (6 * min(own.completions, reference.completions) ** 2)
        variances.append(max(len(seeds) * standard_error(value_S, groups) ** 2, value_S.any() * rounding))
        # The independent parts are base models, or seeds where all have one model.
        different = len(set(groups))
        degrees.append((different if different > 1 else len(groups)) - 1)
    variance_A, degrees_A = np.array(variances), np.array(degrees, dtype=float)
    moderated_A, total_A = moderated(variance_A, degrees_A)
    p_of: dict[str, float] = {}
    for (name, (value_S, _)), variance, total in zip(found.items(), moderated_A, total_A, strict=True):
        # Exactly 0 in all seeds: the recipe changes nothing, so the difference is 0 for certain.
        if variance > 0:
            p_of[name] = t_tail(float(value_S.mean()) / math.sqrt(variance / len(value_S)), total)
    adjusted = dict(zip(p_of, holm(list(p_of.values())), strict=True))
    made = {}
    for (name, (value_S, base_S)), variance, total in zip(found.items(), moderated_A, total_A, strict=True):
        start, mean, se = float(base_S.mean()), float(value_S.mean()), math.sqrt(variance / len(value_S))
        half = t_quantile(level, total) * se
        interval = (mean - half, mean + half)
        p, p_adjusted = p_of.get(name, 1.0), adjusted.get(name, 1.0)
        verdict: Verdict = "higher as measured" if mean > 0 else "lower as measured"
        if p_adjusted > 1 - level:
            verdict = "not significant"
        seeds = paired_seeds(mean, se, len(value_S), total, (1 - level) / max(len(p_of), 1))
        claim = Claim(verdict, p, p_adjusted, p, seeds, "")
        difference = Difference("difference", start, start + mean, mean, interval, interval)
        made[name] = MeasuredDifference(len(value_S), difference, claim)
    return made


def holm(p: Sequence[float]) -> list[float]:
    """Return adjusted p-values in the given order (Holm 1979): the smallest times m, the next m - 1, ..."""
    order = np.argsort(p, kind="stable")
    adjusted = np.empty(len(p))
    factor = np.arange(len(p), 0, -1)
    adjusted[order] = np.minimum(np.maximum.accumulate(factor * np.asarray(p)[order]), 1.0)
    return adjusted.tolist()


def seeds_needed(difference: float, variance: float, alpha: float) -> int | None:
    """Return the seeds per side that detect a difference with power .8, two-sided; None above 100.

    `variance` is that of the difference of one run per side, seed and fit together.
    """
    normal = NormalDist()
    z = normal.inv_cdf(1 - alpha / 2) + normal.inv_cdf(POWER)
    if difference == 0:
        return None
    n = z * z * variance / max(difference * difference, 1e-300)
    return None if n > MOST_SEEDS else max(math.ceil(n), 1)


def paired_seeds(mean: float, se: float, seeds: int, degrees: float, alpha: float) -> int | None:
    """Return the seeds with which this test detects a difference with power .8; None above 100.

    The normal distribution gives too few: with three seeds the spread is hardly known. One seed is no test.
    """
    least = seeds_needed(mean, seeds * se**2, alpha)
    for n in range(max(least, 2), MOST_SEEDS + 1) if least else ():
        d = max(degrees + n - seeds, 1.0)
        if abs(mean) >= se * math.sqrt(seeds / n) * (t_quantile(1 - alpha, d) + t_quantile(2 * POWER - 1, d)):
            return n
    return None


def standard_error(value_S: np.ndarray, models: Sequence[str]) -> float:
    """Return the standard error of the mean, with seeds of one base model as a cluster; NaN for one value.

    sqrt(G / (G - 1) sum_g (sum of the deviations in g)^2) / S over G models (Liang and Zeger, Biometrika
    1986); with one seed each it is sd / sqrt(S). If all seeds have one model, it is for that model alone.
    """
    names, group_S = np.unique(models, return_inverse=True)
    # One cluster has no spread between clusters: the spread of its seeds is what is left.
    if len(names) == 1:
        group_S = np.arange(len(models))
    sum_G = np.bincount(group_S, value_S - value_S.mean())
    if len(sum_G) < 2:
        return math.nan
    return float(np.sqrt(len(sum_G) / (len(sum_G) - 1) * (sum_G**2).sum()) / len(value_S))


def moderated(variance_A: np.ndarray, degrees_A: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the moderated variances and their degrees of freedom, (A,) each; zeros are left as they are.

    d_0 and s_0^2 match the mean and the variance of log s^2 over the recipes; this needs three.
    """
    some_A = variance_A > 0
    s_A, d_A = variance_A[some_A], degrees_A[some_A]
    found, degrees = variance_A.astype(float), degrees_A.astype(float)
    if len(s_A) < 3:
        return found, degrees
    psi_A, psi1_A = np.array([polygamma(d / 2) for d in d_A]).T
    e_A = np.log(s_A) - psi_A + np.log(d_A / 2)
    spread = float(e_A.var(ddof=1) - psi1_A.mean())
    d_0 = _MOST_DEGREES if spread <= 0 else min(2 * _inverse_trigamma(spread), _MOST_DEGREES)
    s_0 = math.exp(float(e_A.mean()) + polygamma(d_0 / 2)[0] - math.log(d_0 / 2))
    found[some_A] = (d_0 * s_0 + d_A * s_A) / (d_0 + d_A)
    degrees[some_A] = np.minimum(d_0 + d_A, d_A.sum())  # no more than all recipes have together
    return found, degrees


def polygamma(x: float) -> tuple[float, float]:
    """Return the digamma and the trigamma function of x > 0, by recurrence and asymptotic series."""
    first = second = 0.0
    while x < 10:
        first, second, x = first - 1 / x, second + 1 / x**2, x + 1
    r = 1 / x**2
    digamma = math.log(x) - 1 / (2 * x) - r * (1 / 12 - r * (1 / 120 - r / 252))
    trigamma = 1 / x + r / 2 + r / x * (1 / 6 - r * (1 / 30 - r / 42))
    return first + digamma, second + trigamma


def _inverse_trigamma(value: float) -> float:
    low, high = 1e-3, _MOST_DEGREES
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if polygamma(middle)[1] > value else (low, middle)
    return low


def t_tail(t: float, degrees: float) -> float:
    """Return the probability that |t| is at least this large, for Student's t.

    With t = sqrt(d) tan(a) it is 2 c times the integral of cos(a)^(d - 1) from a to pi / 2.
    """
    degrees = min(degrees, _MOST_DEGREES)
    a_M = np.linspace(math.atan(abs(t) / math.sqrt(degrees)), math.pi / 2, 4001)
    log_c = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(math.pi)
    y_M = np.exp(log_c + (degrees - 1) * np.log(np.maximum(np.cos(a_M), 1e-300)))
    return min(1.0, 2 * float(np.sum((y_M[1:] + y_M[:-1]) / 2) * (a_M[1] - a_M[0])))


def t_quantile(level: float, degrees: float) -> float:
    """Return the t that |t| does not exceed with probability `level`."""
    low, high = 0.0, 1e5
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, degrees) > 1 - level else (low, middle)
    return high
