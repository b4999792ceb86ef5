"""The two sides of a comparison as paired draws: given one family, of these runs and of their recipes.

Where runs are in blocks, and two recipes have two or more of them in common, only the runs of these are
drawn, and a block has the same weight on both sides: its effect cancels in every difference.

Shapes: n paired draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scalerl.curve.families import of_families
from scalerl.curve.posterior import Draws, Posterior
from scalerl.curve.result import Fit
from scalerl.curve.seeds import SeedPrior, SeedSpread, pooled, pooled_alike, shifted, theta_moments
from scalerl.errors import InputError

Recipes = Mapping[str, Sequence[Fit]]
"""The fits of the runs of every recipe, one for each seed."""
Blocks = Mapping[str, Sequence[Hashable]]
"""For every recipe the block of each of its runs: what they have in common with a run of another recipe. A
block that is a pair is (group, itself): blocks of a group (a base model) share what a recipe does to it."""
Quantity = Callable[[Draws], np.ndarray]
"""A number for every curve, (n,)."""
OWN_SHARE = 0.75
"""Efficiency is the compute to this share of a recipe's own gain: compute to an absolute pass rate would mix
in the ceiling."""
PASS_RATES = ("A", "pass_rate")
"""The quantities that are pass rates; the others are logarithms."""
LEAST_COMMON = 2
"""Blocks that two recipes need in common to be compared within them."""
_DRAWS = 16_384
_LITTLE = 1e-3  # weight up to which a family gets no draws


@dataclass(frozen=True)
class Sides:
    """Paired draws (base, recipe) of equal weight: `runs` the mean curves of these runs, `recipes` of any.

    `fits` are the runs that were drawn from, and `common` the number of blocks that both sides have, None
    where they are not paired. `families` are the weights of the family that both sides share.
    """

    names: tuple[str, str]
    fits: tuple[Sequence[Fit], Sequence[Fit]]
    common: int | None
    families: dict[str, float]
    alone: float
    """By how much the recipe's A is higher where each side has the families that its own runs favour."""
    runs: tuple[Draws, Draws]
    recipes: tuple[Draws, Draws]

    @property
    def misfit(self) -> str:
        """The recipes with a run that no saturating curve describes, and why; empty if there is none."""
        sides = zip(self.names, self.fits, strict=True)
        first = [(name, next((fit for fit in fits if fit.misfit), None)) for name, fits in sides]
        return "; ".join(
            f"no saturating curve describes a run of {name}: {fit.why}" for name, fit in first if fit
        )

    def p(self, quantity: Quantity, runs_only: bool = False) -> float:
        """Return the two-sided tail mass at no difference, not below the resolution of the draws."""
        base_n, recipe_n = map(quantity, self.runs if runs_only else self.recipes)
        # Ties count half: ceilings of 1 on both sides are common, and would else be a difference.
        above = float(np.mean(recipe_n > base_n) + 0.5 * np.mean(recipe_n == base_n))
        return min(1.0, max(2 * min(above, 1 - above), 1 / len(base_n)))


@dataclass(frozen=True)
class GivenFamily:
    """The posteriors of all runs of a comparison, given one family, and that of the seeds' tau."""

    posteriors: Mapping[str, Sequence[Posterior]]
    spread: SeedSpread
    within: SeedSpread
    """tau of the runs of one block, whose effect it excludes; `spread` where there are no blocks."""


def given_family(
    recipes: Recipes, prior: SeedPrior, family: int, blocks: Blocks | None = None
) -> GivenFamily:
    """Return posteriors given one family, and tau by the replicates of all recipes, where there are any."""
    posts = {name: [fit.posterior.only(family) for fit in fits] for name, fits in recipes.items()}
    replicated = {name: of_recipe for name, of_recipe in posts.items() if len(of_recipe) > 1}
    spread = prior.spread()
    if not replicated:
        return GivenFamily(posts, spread, spread)
    # Runs without a replicate say nothing of seeds.
    moments = theta_moments([post.draws(1024) for of_recipe in replicated.values() for post in of_recipe])
    recipe_R = np.repeat(np.arange(len(replicated)), [len(of_recipe) for of_recipe in replicated.values()])
    found = spread.given(*moments, recipe_R)
    if blocks is None:
        return GivenFamily(posts, found, found)
    number = {block: i for i, block in enumerate(dict.fromkeys(b for name in recipes for b in blocks[name]))}
    block_R = np.array([number[block] for name in replicated for block in blocks[name]])
    return GivenFamily(posts, found, spread.given(*moments, recipe_R, block_R))


def draw_sides(
    recipes: Recipes, base: str, name: str, given: Callable[[int], GivenFamily], blocks: Blocks | None = None
) -> Sides:
    """Draw the base and one recipe in pairs; each pair has one family, and one tau of its seeds' effects.

    `given` is called with the index of every family that gets draws.
    """
    names = base, name
    rows = _common_rows(blocks, names) if blocks else None
    chosen = rows or tuple(range(len(recipes[side])) for side in names)
    own, other = ([recipes[side][i] for i in of_side] for side, of_side in zip(names, chosen, strict=True))
    groups = None
    if blocks and rows:
        common = [blocks[base][i] for i in rows[0]]
        groups = [block[0] if isinstance(block, tuple) else block for block in common]
    weight_F = joint_weights([*own, *other])
    parts = [_draw_pair(given(family), names, chosen, groups, family, n) for family, n in _draws_of(weight_F)]
    runs_base, runs_name, recipe_base, recipe_name = map(Draws.joined, zip(*parts, strict=True))
    shared = own[0].posterior.families
    return Sides(
        names,
        fits=(own, other),
        common=len(rows[0]) if rows else None,
        families={family.name: float(w) for family, w in zip(shared, weight_F, strict=True)},
        # `compare` calls a verdict inconclusive where this has the other sign: the family decides then.
        alone=_own_ceiling(other) - _own_ceiling(own),
        runs=(runs_base, runs_name),
        recipes=(recipe_base, recipe_name),
    )


def _own_ceiling(fits: Sequence[Fit]) -> float:
    """Return the posterior mean of A over runs, with the family weights of these runs alone."""
    weight_F = joint_weights(fits)
    means_F = [
        float(np.mean([(post.A * post.weight).sum() for post in posts]))
        for posts in ([fit.posterior.only(family) for fit in fits] for family in range(len(weight_F)))
    ]
    return float(weight_F @ means_F)


def draw_recipe(fits: Sequence[Fit], name: str, given: Callable[[int], GivenFamily]) -> Draws:
    """Draw curves of one recipe alone, with the effects of seeds, and the family weights of its own runs."""
    parts = []
    for family, n in _draws_of(joint_weights(fits)):
        # Given the family, as B and C_mid of several families cannot be averaged over runs.
        known = given(family)
        runs = [post.draws(n, seed=run) for run, post in enumerate(known.posteriors[name])]
        mean, share = pooled(runs, known.spread)
        parts.append(shifted(mean, math.sqrt(share) * known.spread.effects(n, seed=family)[0]))
    return Draws.joined(parts)


def mostly_identified(fits: Sequence[Fit]) -> bool:
    """Return whether more than half of the runs identify their ceiling: one cut short does not decide."""
    return 2 * sum(fit.identified for fit in fits) > len(fits)


def _common_rows(blocks: Blocks, names: tuple[str, str]) -> tuple[Sequence[int], Sequence[int]] | None:
    """Return the runs of either side that have a partner, in the same order; None where too few have."""
    base, recipe = (list(blocks[name]) for name in names)
    # In the order of the base: row i of one side is the partner of row i of the other.
    common = [block for block in base if block in recipe]
    if len(common) < LEAST_COMMON:
        return None
    return [base.index(block) for block in common], [recipe.index(block) for block in common]


def ceiling(draws: Draws) -> np.ndarray:
    """Return A, (n,)."""
    return draws.A_n


def efficiency(draws: Draws) -> np.ndarray:
    """Return log C at which a curve has three quarters of its own gain: B and C_mid together, without A."""
    b, share_n = np.exp(draws.log_b_n), np.full(len(draws.A_n), OWN_SHARE)
    return draws.log_mid_n + of_families(draws.families, draws.family_n, "inverse", b, share_n)


def quantities(budget: float | None, target: float | None) -> dict[str, Quantity]:
    """Return the quantities of a recipe by name; those that are not `PASS_RATES` are logarithms.

    `compute_to_target` is log C at which a curve reaches a pass rate: -inf from R_0 down, inf from A up.
    """
    found: dict[str, Quantity] = {
        "A": ceiling,
        "B": lambda draws: draws.log_b_n,
        "C_mid": lambda draws: draws.log_mid_n,
        "compute_to_own": efficiency,
    }
    if budget is not None:
        found["pass_rate"] = lambda draws: draws.curves_at(np.array([budget]))[:, 0]
    if target is not None:
        found["compute_to_target"] = lambda draws: draws.log_compute_to(target)
    return found


def joint_weights(fits: Sequence[Fit]) -> np.ndarray:
    """Return family weights if all runs share the family: the product of theirs, its prior counted once."""
    families = fits[0].posterior.families
    log_F = (1 - len(fits)) * np.log(fits[0].posterior.prior.families(families)[1])
    for fit in fits:
        if fit.posterior.families != families:
            raise InputError(f"{fit.points.source}: fit all runs with the same families to compare them")
        # A family without weight in one run gets none together, but log 0 would make sums of -inf.
        weights = fit.posterior.family_weights()
        log_F += np.log([max(weights[family.name], 1e-300) for family in families])
    weight_F = np.exp(log_F - log_F.max())
    return weight_F / weight_F.sum()


def _draws_of(weight_F: np.ndarray) -> list[tuple[int, int]]:
    """Return the families that get draws, and how many."""
    return [(family, round(_DRAWS * weight)) for family, weight in enumerate(weight_F) if weight > _LITTLE]


def _draw_pair(
    given: GivenFamily,
    names: tuple[str, str],
    chosen: Sequence[Sequence[int]],
    groups: Sequence[Hashable] | None,
    family: int,
    n: int,
) -> tuple[Draws, Draws, Draws, Draws]:
    """Draw mean curves of the chosen runs of base and recipe, then curves of the recipes, of one family."""
    # A seed for every run and side: shuffles are independent, while families and tau stay paired.
    base, recipe = (
        [given.posteriors[name][row].draws(n, seed=2 * row + side) for row in rows]
        for side, (name, rows) in enumerate(zip(names, chosen, strict=True))
    )
    if groups is not None:
        spread = given.within
        means, share = pooled_alike(base, recipe, spread, groups)
        shares = share, share
    else:
        spread = given.spread
        means, shares = zip(*(pooled(runs, spread) for runs in (base, recipe)), strict=True)
    effects = spread.effects(n, seed=family, runs=2)
    moved = [shifted(m, math.sqrt(s) * e) for m, s, e in zip(means, shares, effects, strict=True)]
    return means[0], means[1], moved[0], moved[1]
