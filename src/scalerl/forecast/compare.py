"""Comparison of recipes: ceilings and efficiencies, with the uncertainty of fits and of seeds.

Draws of two recipes' posteriors are paired given the same family, so that a difference is never one of
families, except for ceilings (`sides`). Each recipe gets the seed effects that its runs leave open (`seeds`).
Runs that have a partner in the other recipe, with the same base model and prompts, are compared with it.
Holm's correction covers three questions about every recipe: under the assumed spread of seeds, 1 - level is
the family-wise error of all verdicts.

Shapes: n paired draws.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from scalerl.curve.answers import check_level
from scalerl.curve.points import Points
from scalerl.curve.result import Fit
from scalerl.curve.seeds import SEED_PRIOR, SeedPrior
from scalerl.errors import CannotAnswerError, InputError, number_of
from scalerl.forecast.comparison import Claim, Comparison, Difference, Pair, Verdict
from scalerl.forecast.crossing import Crossing, find_crossing
from scalerl.forecast.measured import MeasuredRates, holm, paired_differences, seeds_needed
from scalerl.forecast.sides import (
    PASS_RATES,
    Blocks,
    Quantity,
    Recipes,
    Sides,
    draw_sides,
    given_family,
    mostly_identified,
    quantities,
)
from scalerl.quantiles import draw_quantiles, tails
from scalerl.record.metric import Metric

_CROSSING_DRAWS = 2048
_FEWEST_VALUES = 4  # seeds that stay at 0, or reach the same end at once, agree in fewer pass rates
_BEYOND = 10.0  # crossings are searched up to this many times the last compute


_QUESTIONS: dict[str, tuple[Verdict, Verdict]] = {
    "pass_rate_seen": ("higher at the compute seen", "lower at the compute seen"),
    "A": ("higher ceiling", "lower ceiling"),
    "compute_to_own": ("reaches it later", "reaches it sooner"),
}
"""The quantities that are asked about, and the verdicts where the recipe has more of one, or less."""


def compare(
    recipes: Recipes,
    *,
    base: str | None = None,
    budget: float | None = None,
    target: float | None = None,
    level: float = 0.95,
    seed_prior: SeedPrior = SEED_PRIOR,
    blocks: Blocks | None = None,
    seeds: Blocks | None = None,
) -> Comparison:
    """Compare recipes, each given by the fits of one run or of several that differ by the seed alone.

    Args:
        recipes: fits by the name of their recipe, all on one compute axis.
        base: the recipe that the others are compared with; the first by default.
        budget: compute at which the pass rates are compared too, in the unit of the axis.
        target: pass rate whose compute is compared too.
        level: of the intervals; 1 - level is the verdicts' family-wise error if seeds spread as assumed.
        seed_prior: the spread of seeds, where replicates do not determine it.
        blocks: for each recipe the block of each of its fits (the seed, where runs of one seed share
            their base model, prompts and draws). A recipe that shares two blocks or more with the base is
            compared within them: effects of blocks cancel, and runs without a partner are left out. A block
            may be a pair (group, seed): seeds of one group (a base model) are no evidence about others.
        seeds: the same, but only to pair what was measured (`Pair.measured`); with or without blocks.

    Raises:
        InputError: fewer than two recipes, a recipe without runs or with one run twice, different axes,
            blocks that do not match the runs, or an argument out of range.
        CannotAnswerError: a run has fewer than six evaluations.
    """
    base = _checked(recipes, base, budget, target, level)
    if blocks is None:
        check_copies(recipes)
    else:
        _check_blocks(recipes, blocks)
    # Every pair asks for the same posteriors given a family, and for the same tau.
    given = functools.cache(lambda family: given_family(recipes, seed_prior, family, blocks))
    sides = [draw_sides(recipes, base, name, given, blocks) for name in recipes if name != base]
    known = [quantities(budget, target, side.seen) for side in sides]
    asked = [
        (side.comparing(name), name, of[name])
        for side, of in zip(sides, known, strict=True)
        for name in _QUESTIONS
    ]
    # A withheld question still counts as a test: without it the others would be corrected for too few.
    p = [1.0 if side.misfit else side.p(quantity) for side, _, quantity in asked]
    claims = iter(
        _claim(*one, raw, adjusted, level, tests=len(p))
        for one, raw, adjusted in zip(asked, p, holm(p), strict=True)
    )
    pairs = [
        Pair(
            side.names[1],
            base,
            side.families,
            side.one_family,
            *itertools.islice(claims, len(_QUESTIONS)),
            compute_seen=side.seen,
            differences={
                name: _difference(side.comparing(name), name, quantity, level)
                for name, quantity in of.items()
                # A ceiling beside a withheld one would be read as an answer.
                if not (side.misfit and name == "A")
            },
            crossing=None if side.misfit else _crossing(side, level),
            common_seeds=side.common,
        )
        for side, of in zip(sides, known, strict=True)
    ]
    if seeds is not None:
        _check_blocks(recipes, seeds)
        pairs = _with_measured(pairs, recipes, seeds, base, budget, level)
    runs = {name: len(fits) for name, fits in recipes.items()}
    all_metrics, axis = [fit.metric for fits in recipes.values() for fit in fits], recipes[base][0].axis
    metrics = {(one.name, one.dataset): one for one in all_metrics}
    named = tuple(_of_all(one, all_metrics) for one in metrics.values())
    return Comparison(base, runs, named, axis, level, budget, target, seed_prior, tuple(pairs), dict(recipes))


def _with_measured(
    pairs: Sequence[Pair], recipes: Recipes, seeds: Blocks, base: str, budget: float | None, level: float
) -> list[Pair]:
    """Return the pairs with measured differences, at the budget or the last compute that all runs reach."""
    ends = (float(fit.points.compute_N[-1]) for fits in recipes.values() for fit in fits)
    at = min(math.inf if budget is None else budget, *ends)
    rates = {name: MeasuredRates.of(fits, seeds[name], at) for name, fits in recipes.items()}
    found = paired_differences(rates, base, level)
    return [
        replace(
            pair,
            measured=one.claim,
            measured_at=at,
            differences={"measured": one.difference} | pair.differences,
        )
        if (one := found.get(pair.recipe))
        else pair
        for pair in pairs
    ]


def _of_all(metric: Metric, metrics: Sequence[Metric]) -> Metric:
    """Return a metric with the numbers of prompts and samples that all runs have, where these are known."""
    same = [one for one in metrics if (one.name, one.dataset) == (metric.name, metric.dataset)]
    known = ({one.n_prompts for one in same} - {0}, {one.n_samples for one in same} - {0})
    prompts, samples = (counts.pop() if len(counts) == 1 else 0 for counts in known)
    return replace(metric, others=(), n_prompts=prompts, n_samples=samples)


def _claim(
    side: Sides, name: str, quantity: Quantity, p: float, adjusted: float, level: float, tests: int
) -> Claim:
    """Give the verdict on one question, and the seeds that would detect the difference."""
    if side.misfit:
        return Claim("inconclusive", None, None, None, None, side.misfit)
    base_n, recipe_n = map(quantity, side.recipes)
    difference = float(np.median(recipe_n - base_n))
    # Another run is assumed to be worth as much as these.
    n_base, n_recipe = (len(fits) for fits in side.fits)
    variance = n_base * float(base_n.var()) + n_recipe * float(recipe_n.var())
    why = _vague(side) if name == "A" else ""  # it requires identified ceilings
    more, less = _QUESTIONS[name]
    verdict: Verdict = more if difference > 0 else less
    if why:
        verdict = "inconclusive"
    elif adjusted > 1 - level:
        verdict = "not significant"
    # At the level of Holm's first step, the strictest: the order in a later comparison is not known.
    seeds = seeds_needed(difference, variance, (1 - level) / tests)
    return Claim(verdict, p, adjusted, side.p(quantity, runs_only=True), seeds, why)


def _vague(side: Sides) -> str:
    """Return a reason for each recipe whose ceiling is not identified by more than half of its runs."""
    doubts = []
    for name, fits in zip(side.names, side.fits, strict=True):
        if not mostly_identified(fits):
            first = next(fit for fit in fits if not fit.identified)
            doubts.append(f"the ceiling of {name} is not identified: {first.why}")
    return "; ".join(doubts)


def _crossing(side: Sides, level: float) -> Crossing:
    """Find where the lead changes, from the smallest positive compute of all runs to beyond the largest."""
    computes = [fit.points.compute_N for fits in side.fits for fit in fits]
    first = min(float(compute_N[compute_N > 0].min()) for compute_N in computes)
    within = first, _BEYOND * max(float(compute_N.max()) for compute_N in computes)
    base, recipe = (draws.thinned(_CROSSING_DRAWS) for draws in side.recipes)
    return find_crossing(base, recipe, side.names, within, level)


def _difference(side: Sides, name: str, quantity: Quantity, level: float) -> Difference:
    """Return the medians of both sides, and of their difference with its intervals; logs become ratios."""
    base_n, recipe_n = map(quantity, side.recipes)
    own = [draw_quantiles(value_n, np.array([0.5]))[0] for value_n in (base_n, recipe_n)]
    low, median, high = draw_quantiles(_minus(recipe_n, base_n), np.insert(tails(level), 1, 0.5))
    base_n, recipe_n = map(quantity, side.runs)
    runs_only = draw_quantiles(_minus(recipe_n, base_n), tails(level))
    values = np.array([*own, median, low, high, *runs_only])
    kind = "difference" if name in PASS_RATES else "ratio"
    if kind == "ratio":
        values = np.exp(values)
    base, recipe, median, low, high, least, most = values.tolist()
    return Difference(kind, base, recipe, median, (low, high), (least, most))


def _minus(recipe_n: np.ndarray, base_n: np.ndarray) -> np.ndarray:
    """Return the difference of values that may be infinite, without draws where both are alike infinite."""
    # inf - inf is NaN: where neither reaches the target there is no difference.
    says_n = np.isfinite(recipe_n) | np.isfinite(base_n) | (recipe_n != base_n)
    return recipe_n[says_n] - base_n[says_n]


def _checked(
    recipes: Recipes, base: str | None, budget: float | None, target: float | None, level: float
) -> str:
    """Check all arguments, and return the name of the base."""
    lists = isinstance(recipes, Mapping) and all(isinstance(fits, Sequence) for fits in recipes.values())
    if not lists or not all(isinstance(fit, Fit) for fits in recipes.values() for fit in fits):
        raise InputError("compare takes a list of fits for every recipe: {'old': [fit], 'new': [fit, fit]}")
    names = list(recipes)
    if len(names) < 2:
        which = f": {names[0]}, whose runs count as its seeds" if names else ""
        raise InputError(f"a comparison needs two recipes or more, found {len(names)}{which}")
    if base is not None and base not in recipes:
        raise InputError(f"no recipe '{base}' to compare with; recipes: {', '.join(names)}")
    check_level(level)
    if budget is not None and not (math.isfinite(number_of(budget, "the budget")) and budget > 0):
        raise InputError(f"the budget must be a compute above 0, found {budget:g}")
    if target is not None and not 0 < number_of(target, "the target") < 1:
        raise InputError(f"the target must be a pass rate between 0 and 1, found {target:g}")
    for name, fits in recipes.items():
        if not fits:
            raise InputError(f"recipe '{name}' has no runs")
        if few := next((fit for fit in fits if fit.too_few), None):
            raise CannotAnswerError(f"{few.points.source}: {few.too_few}")
    named = {fit.metric: name for name, fits in recipes.items() for fit in fits}
    (metric, name), *others = named.items()
    for other, another in others:
        if not other.is_comparable(metric):
            raise InputError(
                f"runs of different metrics are not compared: '{name}' has {metric}; '{another}' has "
                f"{other}; name one for each (--y NAME,NAME)"
            )
    axes = {fit.axis: name for name, fits in recipes.items() for fit in fits}
    if len(axes) > 1:
        (axis, name), (other, another) = list(axes.items())[:2]
        raise InputError(f"all runs need one compute axis: '{name}' is on {axis}, '{another}' on {other}")
    return names[0] if base is None else base


def check_copies(recipes: Recipes) -> None:
    """Raise an InputError where a recipe has one run twice."""
    for name, fits in recipes.items():
        # With a misfit nothing is claimed about the recipe, so there is nothing to protect.
        runs = [] if any(fit.misfit for fit in fits) else [fit.points for fit in fits]
        for one, other in itertools.combinations(runs, 2):
            if is_copy(one, other):
                which = f"{one.source} and {other.source} have the same evaluations"
                raise InputError(f"recipe '{name}': {which}, which are no two seeds: give the run once")


def is_copy(one: Points, other: Points) -> bool:
    """Return whether two runs have the same evaluations, with too many values to agree by chance.

    The longer one may have gone on: then the shorter one is the same run at an earlier time.
    """
    n = min(len(one), len(other))
    same = all(
        np.array_equal(getattr(one, name)[:n], getattr(other, name)[:n])
        for name in ("compute_N", "pass_rate_N")
    )
    return same and len(np.unique(one.pass_rate_N[:n])) >= _FEWEST_VALUES


def without_copies(fits: Iterable[Fit]) -> list[Fit]:
    """Return fits, the longest first, and of copies of one run, which are not seeds, only the longest."""
    found: dict[bytes, list[Fit]] = {}
    for fit in sorted(fits, key=lambda fit: -len(fit.points)):
        # Copies start alike: comparing all pairs of 2,000 runs would take a minute.
        alike = found.setdefault(fit.points.pass_rate_N[:_FEWEST_VALUES].tobytes(), [])
        if not any(is_copy(fit.points, other.points) for other in alike):
            alike.append(fit)
    return [fit for alike in found.values() for fit in alike]


def _check_blocks(recipes: Recipes, blocks: Blocks) -> None:
    for name, fits in recipes.items():
        mine = blocks.get(name, ())
        if len(mine) != len(fits) or len(set(mine)) < len(mine):
            raise InputError(f"recipe '{name}' needs a block of its own for each of its {len(fits)} runs")
