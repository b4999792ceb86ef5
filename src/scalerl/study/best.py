"""Which arms can be stopped early: those whose ceiling is below that of the best arm."""

from __future__ import annotations

import functools

import numpy as np

from scalerl.curve.seeds import SEED_PRIOR, SeedPrior
from scalerl.curve.sides import Blocks, Recipes, Sides, draw_sides, given_family
from scalerl.study.arm_fits import fit_arms, fits_of
from scalerl.study.record import StudyRecord


def below_best(study: StudyRecord, axis: str) -> dict[str, float | None]:
    """`probability_below_best` of every arm of a study by what its runs have so far; None without a fit."""
    recipes, seeds = fits_of(fit_arms(study, axis))
    return dict.fromkeys(arm.name for arm in study.arms) | probability_below_best(recipes, seeds)


def probability_below_best(
    recipes: Recipes, blocks: Blocks, seed_prior: SeedPrior = SEED_PRIOR
) -> dict[str, float | None]:
    """For every recipe the posterior probability that its ceiling is below that of the best; 0 for that one.

    The best is the recipe with the highest median A among those whose ceiling is known: identified in half of
    the runs or more, and no run a misfit. It is told None of the others, and of all if there is no best one.
    Runs are paired by block throughout, so that no recipe is best by the base models it happens to have.

    The best of many recipes that are alike is the luckiest: of six, the last is below it with probability .95
    about one time in two. To stop it loses nothing but a comparison; a verdict is what `compare` gives.
    """
    known = [name for name, fits in recipes.items() if _is_known(recipes, name)]
    answer: dict[str, float | None] = dict.fromkeys(recipes)
    if not known:
        return answer
    given = functools.cache(lambda family: given_family(recipes, seed_prior, family, blocks))

    def against(base: str) -> dict[str, Sides]:
        return {name: draw_sides(recipes, base, name, given, blocks) for name in known if name != base}

    # Medians are compared within blocks as well: by the lead over the recipe that has the most runs.
    common = max(known, key=lambda name: len(recipes[name]))
    leads = {name: float(np.median(_lead(sides))) for name, sides in against(common).items()} | {common: 0.0}
    best = max(known, key=lambda name: leads[name])
    return answer | {best: 0.0} | {name: float(np.mean(_lead(s) < 0)) for name, s in against(best).items()}


def _lead(sides: Sides) -> np.ndarray:
    """A of the recipe less A of the base, (n,)."""
    base, recipe = sides.recipes
    return recipe.A_n - base.A_n


def _is_known(recipes: Recipes, name: str) -> bool:
    fits = recipes[name]
    return not any(fit.misfit for fit in fits) and 2 * sum(fit.identified for fit in fits) >= len(fits)
