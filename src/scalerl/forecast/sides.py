"""The two sides of a comparison as paired draws, given one family: of these runs and of their recipes.

Ceilings lie beyond the data, where the family decides. Given one family, the recipe with the slower end would
look lower even if both had one ceiling, so each side may have a family of its own there (`ONE_FAMILY`).

Where runs are in blocks and two recipes share two or more of them, only the runs of these are drawn, and a
block has the same weight on both sides: its effect cancels in every difference.

Shapes: n paired draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from scalerl.curve.families import of_families
from scalerl.curve.posterior import Draws, Posterior
from scalerl.curve.result import Fit
from scalerl.curve.seeds import SeedPrior, SeedSpread, pooled, pooled_alike, shifted, theta_moments
from scalerl.errors import InputError

Recipes = Mapping[str, Sequence[Fit]]
"""The fits of the runs of every recipe, one for each seed."""
Blocks = Mapping[str, Sequence[Hashable]]
"""The block of each run, by recipe: what it shares with a run of another recipe. A block that is a
pair is (group, itself): the effect of a recipe is the same in all blocks of a group (a base model)."""
Quantity = Callable[[Draws], np.ndarray]
"""A number for every curve, (n,)."""
OWN_SHARE = 0.75
"""Efficiency is the compute to this share of a recipe's own gain: compute to an absolute pass rate would
depend on the ceiling too."""
PASS_RATES = ("A", "pass_rate_seen", "pass_rate")
"""The quantities that are pass rates; the others are logarithms."""
ONE_FAMILY = 0.7
"""The prior probability that both recipes have one family. Chosen by `benchmarks/comparison.py`: .5 costs
power; from .8 on, recipes with one ceiling and different ends are given different ceilings."""
LEAST_COMMON = 2
"""Blocks that two recipes need in common to be compared within them."""
_DRAWS = 16_384
_LITTLE = 1e-3  # weight up to which a family gets no draws


@dataclass(frozen=True)
class Sides:
    """Paired draws (base, recipe) of equal weight: `runs` of these runs' mean curves, `recipes` of any.

    `fits` are the runs that were drawn from, and `common` the number of blocks that both sides have, None
    where they are not paired. `families` are the weights of the family that both sides share, and
    `one_family` is the probability that they share one. `ceilings` has `runs` and `recipes` where each side
    may have its own family.
    """

    names: tuple[str, str]
    fits: tuple[Sequence[Fit], Sequence[Fit]]
    common: int | None
    families: dict[str, float]
    one_family: float
    runs: tuple[Draws, Draws]
    recipes: tuple[Draws, Draws]
    ceilings: tuple[tuple[Draws, Draws], tuple[Draws, Draws]]

    @property
    def seen(self) -> float:
        """The largest compute that all runs of both sides have reached."""
        return min(float(fit.points.compute_N.max()) for fits in self.fits for fit in fits)

    @property
    def misfit(self) -> str:
        """The recipes with a run that no saturating curve describes, and why; empty if there is none."""
        sides = zip(self.names, self.fits, strict=True)
        first = [(name, next((fit for fit in fits if fit.misfit), None)) for name, fits in sides]
        return "; ".join(
            f"no saturating curve describes a run of {name}: {fit.why}" for name, fit in first if fit
        )

    def comparing(self, name: str) -> Sides:
        """Return the sides with the draws that a quantity is compared in."""
        return replace(self, runs=self.ceilings[0], recipes=self.ceilings[1]) if name == "A" else self

    def p(self, quantity: Quantity, runs_only: bool = False) -> float:
        """Return the two-sided tail mass at no difference; at least the resolution of the draws."""
        base_n, recipe_n = map(quantity, self.runs if runs_only else self.recipes)
        # Ties count half: ceilings of 1 on both sides are common, and would otherwise be a difference.
        above = float(np.mean(recipe_n > base_n) + 0.5 * np.mean(recipe_n == base_n))
        return min(1.0, max(2 * min(above, 1 - above), 1 / len(base_n)))


@dataclass(frozen=True)
class GivenFamily:
    """The posteriors of all runs of a comparison given one family, and that of the seeds' tau."""

    posteriors: Mapping[str, Sequence[Posterior]]
    spread: SeedSpread
    within: SeedSpread
    """tau of the runs of one block, without the block's effect; `spread` where there are no blocks."""


def given_family(
    recipes: Recipes, prior: SeedPrior, family: int, blocks: Blocks | None = None
) -> GivenFamily:
    """Return posteriors given one family, and tau updated by the replicates of all recipes, if any."""
    posts = {name: [fit.posterior.only(family) for fit in fits] for name, fits in recipes.items()}
    replicated = {name: of_recipe for name, of_recipe in posts.items() if len(of_recipe) > 1}
    spread = prior.spread()
    if not replicated:
        return GivenFamily(posts, spread, spread)
    # Runs without a replicate say nothing about seeds.
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
    """Draw the base and one recipe in pairs; each pair has one family, and one tau for its seed effects.

    `given` is called with the index of every family that gets draws.
    """
    names = base, name
    chosen, groups = [range(len(recipes[side])) for side in names], None
    common = [block for block in blocks[base] if block in blocks[name]] if blocks else []
    if blocks and len(common) >= LEAST_COMMON:
        # In the order of the base: row i of one side is the partner of row i of the other.
        chosen = [[list(blocks[side]).index(block) for block in common] for side in names]
        groups = [block[0] if isinstance(block, tuple) else block for block in common]
    own, other = ([recipes[side][i] for i in of_side] for side, of_side in zip(names, chosen, strict=True))
    weight_F = joint_weights([*own, *other])
    # The evidence for one family of both, against a family for each.
    favour = ONE_FAMILY * np.sum(joint_weights(own) * joint_weights(other) / _family_prior(own))
    one_family = float(favour / (favour + 1 - ONE_FAMILY))
    # Seeds of one recipe share a shape that no family has exactly, so their evidence does not add up.
    apart_FF = np.outer(_weights_of_one(own), _weights_of_one(other))

    def drawn(weight_FF: np.ndarray) -> tuple[tuple[Draws, Draws], tuple[Draws, Draws]]:
        of = _draws_of(weight_FF)
        parts = [_draw_pair((given(f), given(g)), names, chosen, groups, f + g, n) for (f, g), n in of]
        base_mean, mean, base_moved, moved = map(Draws.joined, zip(*parts, strict=True))
        return (base_mean, mean), (base_moved, moved)

    runs, of_recipes = drawn(np.diag(weight_F))
    shared = own[0].posterior.families
    return Sides(
        names,
        fits=(own, other),
        common=len(common) if groups else None,
        families={family.name: float(w) for family, w in zip(shared, weight_F, strict=True)},
        one_family=one_family,
        runs=runs,
        recipes=of_recipes,
        ceilings=drawn(one_family * np.diag(weight_F) + (1 - one_family) * apart_FF),
    )


def draw_recipe(fits: Sequence[Fit], name: str, given: Callable[[int], GivenFamily]) -> Draws:
    """Draw curves of one recipe alone, with seed effects and the family weights of its own runs."""
    parts = []
    # The runs' evidence does not add up: together they would choose a family for certain.
    for (family,), n in _draws_of(_weights_of_one(fits)):
        # Given the family, as B and C_mid of several families cannot be averaged over runs.
        known = given(family)
        runs = [post.draws(n, seed=run) for run, post in enumerate(known.posteriors[name])]
        mean, share = pooled(runs, known.spread)
        parts.append(shifted(mean, math.sqrt(share) * known.spread.effects(n, seed=family)[0]))
    return Draws.joined(parts)


def mostly_identified(fits: Sequence[Fit]) -> bool:
    """Return whether more than half of the runs identify their ceiling: one cut short does not decide."""
    return 2 * sum(fit.identified for fit in fits) > len(fits)


def all_described(fits: Sequence[Fit]) -> bool:
    """Return whether curves describe all runs; else a mean of the others would be of the lucky ones."""
    return not any(fit.misfit for fit in fits)


def efficiency(draws: Draws) -> np.ndarray:
    """Return log C at which a curve has three quarters of its own gain: B and C_mid together, without A."""
    b, share_n = np.exp(draws.log_b_n), np.full(len(draws.A_n), OWN_SHARE)
    return draws.log_mid_n + of_families(draws.families, draws.family_n, "inverse", b, share_n)


def quantities(budget: float | None, target: float | None, seen: float | None = None) -> dict[str, Quantity]:
    """Return the quantities of a recipe by name; those that are not `PASS_RATES` are logarithms.

    `pass_rate_seen` is the pass rate at the compute `seen`, `pass_rate` that at the budget.
    `compute_to_target` is log C at which a curve reaches a pass rate: -inf up to R_0, inf from A on.
    """
    found: dict[str, Quantity] = {
        "A": lambda draws: draws.A_n,
        "B": lambda draws: draws.log_b_n,
        "C_mid": lambda draws: draws.log_mid_n,
        "compute_to_own": efficiency,
    }
    for name, compute in (("pass_rate_seen", seen), ("pass_rate", budget)):
        if compute is not None:
            found[name] = lambda draws, c=compute: draws.curves_at(np.array([c]))[:, 0]
    if target is not None:
        found["compute_to_target"] = lambda draws: draws.log_compute_to(target)
    return found


def joint_weights(fits: Sequence[Fit]) -> np.ndarray:
    """Return family weights if all runs share the family: the product of theirs, the prior counted once."""
    log_RF = _log_weights(fits)
    return _normalised(log_RF.sum(axis=0) + (1 - len(fits)) * np.log(_family_prior(fits)))


def _weights_of_one(fits: Sequence[Fit]) -> np.ndarray:
    """Return the family weights of one run like these: the geometric mean of theirs."""
    return _normalised(_log_weights(fits).mean(axis=0))


def _family_prior(fits: Sequence[Fit]) -> np.ndarray:
    posterior = fits[0].posterior
    return np.maximum(posterior.prior.families(posterior.families)[1], 1e-300)


def _log_weights(fits: Sequence[Fit]) -> np.ndarray:
    """Return the logarithms of the family weights of every run, (R, F)."""
    families = fits[0].posterior.families
    for fit in fits:
        if fit.posterior.families != families:
            raise InputError(f"{fit.points.source}: fit all runs with the same families to compare them")
    weights = [fit.posterior.family_weights() for fit in fits]
    # A family without weight in one run gets none in the product, but log 0 would make sums of -inf.
    return np.log([[max(of_run[family.name], 1e-300) for family in families] for of_run in weights])


def _normalised(log_F: np.ndarray) -> np.ndarray:
    weight_F = np.exp(log_F - log_F.max())
    return weight_F / weight_F.sum()


def _draws_of(weight: np.ndarray) -> list[tuple[tuple[int, ...], int]]:
    """Return the families (one for each axis) that get draws, with the number of draws."""
    return [(at, round(_DRAWS * w)) for at, w in np.ndenumerate(weight) if w > _LITTLE]


def _draw_pair(
    given: tuple[GivenFamily, GivenFamily],
    names: tuple[str, str],
    chosen: Sequence[Sequence[int]],
    groups: Sequence[Hashable] | None,
    seed: int,
    n: int,
) -> tuple[Draws, Draws, Draws, Draws]:
    """Draw mean curves of the chosen runs of base and recipe, then curves of their recipes."""
    # A seed for every run and side: shuffles are independent, while families and tau stay paired.
    base, recipe = (
        [known.posteriors[name][row].draws(n, seed=2 * row + side) for row in rows]
        for side, (known, name, rows) in enumerate(zip(given, names, chosen, strict=True))
    )
    spreads = [known.spread if groups is None else known.within for known in given]
    if groups is not None:
        means, share = pooled_alike(base, recipe, spreads[0], groups)
        shares = share, share
    else:
        means, shares = zip(*map(pooled, (base, recipe), spreads), strict=True)
    # One seed for both: they get the same quantile of tau, whatever their families.
    effects = [spread.effects(n, seed=seed, runs=2)[side] for side, spread in enumerate(spreads)]
    moved = [shifted(m, math.sqrt(s) * e) for m, s, e in zip(means, shares, effects, strict=True)]
    return means[0], means[1], moved[0], moved[1]
