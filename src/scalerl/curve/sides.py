"""The two sides of a comparison as paired draws: given one family, of these runs and of their recipes.

Shapes: n paired draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scalerl.curve.families import FAMILIES, inverses, log_compute_to
from scalerl.curve.posterior import Draws, Posterior
from scalerl.curve.result import Fit
from scalerl.curve.seeds import SeedPrior, SeedSpread, pooled, shifted, theta_moments

Recipes = Mapping[str, Sequence[Fit]]
"""The fits of the runs of every recipe, one for each seed."""
Quantity = Callable[[Draws], np.ndarray]
"""A number for every curve, (n,)."""
OWN_SHARE = 0.75
"""Efficiency is judged by the compute to this share of a recipe's own gain: compute to an absolute pass rate
would mix in the ceiling."""
_DRAWS = 16_384
_LITTLE = 1e-3  # weight of a family that is not worth drawing from


@dataclass(frozen=True)
class Sides:
    """Paired draws (base, recipe) of equal weight: `runs` the mean curves of these runs, `recipes` of any.

    `families` are the weights of the family that both sides share.
    """

    names: tuple[str, str]
    fits: tuple[Sequence[Fit], Sequence[Fit]]
    families: dict[str, float]
    runs: tuple[Draws, Draws]
    recipes: tuple[Draws, Draws]

    @property
    def misfit(self) -> str:
        """Which recipes have a run that no saturating curve describes, and why; empty if there is none."""
        unfit = [
            (name, next(fit for fit in fits if fit.misfit))  # one is enough: it is no curve of the recipe
            for name, fits in zip(self.names, self.fits, strict=True)
            if any(fit.misfit for fit in fits)
        ]
        return "; ".join(f"no saturating curve describes a run of {name}: {fit.why}" for name, fit in unfit)

    def p(self, quantity: Quantity, runs_only: bool = False) -> float:
        """Two-sided tail mass at no difference, not below the resolution of the draws."""
        base_n, recipe_n = map(quantity, self.runs if runs_only else self.recipes)
        above = float(np.mean(recipe_n > base_n) + 0.5 * np.mean(recipe_n == base_n))
        return min(1.0, max(2 * min(above, 1 - above), 1 / len(base_n)))

    def thinned(self, n: int) -> tuple[Draws, Draws]:
        """About n of the recipes' draws, still paired, for what is asked at many computes."""
        base, recipe = (_of(draws, slice(None, None, len(draws.A_n) // n)) for draws in self.recipes)
        return base, recipe


@dataclass(frozen=True)
class GivenFamily:
    """What all pairs of a comparison share, given one family: posteriors of the runs, and the seeds' tau."""

    posteriors: Mapping[str, Sequence[Posterior]]
    spread: SeedSpread


def given_family(recipes: Recipes, prior: SeedPrior, family: int) -> GivenFamily:
    """Posteriors given one family; tau by the replicates of all recipes, where there are any."""
    posts = {name: [fit.posterior.only(family) for fit in fits] for name, fits in recipes.items()}
    replicated = [of_recipe for of_recipe in posts.values() if len(of_recipe) > 1]
    if not replicated:
        return GivenFamily(posts, prior.spread())
    runs = [post.draws(1024) for of_recipe in replicated for post in of_recipe]
    recipe_R = np.repeat(np.arange(len(replicated)), [len(of_recipe) for of_recipe in replicated])
    return GivenFamily(posts, prior.spread().given(*theta_moments(runs), recipe_R))


def draw_sides(recipes: Recipes, base: str, name: str, given: Callable[[int], GivenFamily]) -> Sides:
    """Draw the base and one recipe in pairs; each pair has one family, and one tau of its seeds' effects.

    `given` answers for the index of a family, and is asked for those alone that are worth drawing from.
    """
    weight_F = _joint_weights([*recipes[base], *recipes[name]])
    parts = [
        _draw_given(given(family), (base, name), family, round(_DRAWS * weight))
        for family, weight in enumerate(weight_F)
        if weight > _LITTLE
    ]
    runs_base, runs_name, recipe_base, recipe_name = (_joined(part) for part in zip(*parts, strict=True))
    families = {family.name: float(w) for family, w in zip(FAMILIES, weight_F, strict=True)}
    fits = recipes[base], recipes[name]
    return Sides((base, name), fits, families, (runs_base, runs_name), (recipe_base, recipe_name))


def ceiling(draws: Draws) -> np.ndarray:
    """A."""
    return draws.A_n


def log_b(draws: Draws) -> np.ndarray:
    """log B."""
    return draws.log_b_n


def log_mid(draws: Draws) -> np.ndarray:
    """log C_mid."""
    return draws.log_mid_n


def efficiency(draws: Draws) -> np.ndarray:
    """log C at which a curve has three quarters of its own gain: B and C_mid together, without A."""
    b, share_n = np.exp(draws.log_b_n), np.full(len(draws.A_n), OWN_SHARE)
    return draws.log_mid_n + inverses(draws.families, draws.family_n, b, share_n)


def pass_rate_at(budget: float) -> Quantity:
    """The mean curve at a compute."""
    return lambda draws: draws.curves_at(np.array([budget]))[:, 0]


def log_compute_at(target: float) -> Quantity:
    """log C at which a curve reaches a pass rate; -inf from R_0 down, inf from A up."""
    return lambda draws: log_compute_to(
        draws.families,
        draws.family_n,
        draws.A_n,
        np.exp(draws.log_b_n),
        draws.log_mid_n,
        draws.R_0_n,
        target,
    )


def _joint_weights(fits: Sequence[Fit]) -> np.ndarray:
    """Weight of every family if all runs share it: the product of theirs, as the families' prior is flat."""
    log_F = np.zeros(len(FAMILIES))
    for fit in fits:
        weights = fit.posterior.family_weights()
        log_F += np.log([max(weights[family.name], 1e-300) for family in FAMILIES])
    weight_F = np.exp(log_F - log_F.max())
    return weight_F / weight_F.sum()


def _draw_given(
    given: GivenFamily, names: tuple[str, str], family: int, n: int
) -> tuple[Draws, Draws, Draws, Draws]:
    """Given one family: mean curves of the runs of base and recipe, then the curves of the two recipes."""
    means, shares = [], []
    for side, name in enumerate(names):
        runs = [post.draws(n, seed=2 * run + side) for run, post in enumerate(given.posteriors[name])]
        mean, share = pooled(runs, given.spread)
        means.append(mean)
        shares.append(share)
    effects = given.spread.effects(n, seed=family, runs=2)
    moved = [shifted(m, math.sqrt(s) * e) for m, s, e in zip(means, shares, effects, strict=True)]
    return means[0], means[1], moved[0], moved[1]


_ARRAYS = ("family_n", "A_n", "log_b_n", "log_mid_n", "R_0_n")


def _joined(parts: Sequence[Draws]) -> Draws:
    return Draws(FAMILIES, *(np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS))


def _of(draws: Draws, keep: slice) -> Draws:
    return Draws(draws.families, *(getattr(draws, name)[keep] for name in _ARRAYS))
