"""Which arms are worth more: those whose ceiling may be that of the best arm, and those ahead of the base."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from scalerl.curve.result import Fit
from scalerl.curve.seeds import SEED_PRIOR
from scalerl.forecast.sides import Sides, draw_sides, given_family, mostly_identified
from scalerl.study.record import StudyRecord
from scalerl.study.verdict.arm_fits import fit_arms, fits_of


def below_best(study: StudyRecord, axis: str) -> dict[str, float | None]:
    """For every arm the posterior probability that its ceiling is below that of the best; 0 for that one.

    The best is the arm with the highest median A among those whose ceiling is known: identified in more than
    half of the runs, and no run a misfit. It is None for the others, and for all if there is no best one.
    Runs are paired by block throughout, so that no arm is best by the base models it happens to have.

    The best of many arms that are alike is the luckiest: of six, the last is below it with probability .95
    about one time in two. To stop it loses nothing but a comparison; a verdict is what `compare` gives.
    """
    recipes, blocks = fits_of(fit_arms(study, axis))
    known = [name for name, fits in recipes.items() if _is_known(fits)]
    answer: dict[str, float | None] = dict.fromkeys(arm.name for arm in study.arms)
    if not known:
        return answer
    given = functools.cache(lambda family: given_family(recipes, SEED_PRIOR, family, blocks))

    def against(base: str) -> dict[str, Sides]:
        return {name: draw_sides(recipes, base, name, given, blocks) for name in known if name != base}

    # Medians are compared within blocks as well: by the lead over the arm that has the most runs.
    common = max(known, key=lambda name: len(recipes[name]))
    leads = {name: float(np.median(_lead(sides))) for name, sides in against(common).items()} | {common: 0.0}
    best = max(known, key=lambda name: leads[name])
    return answer | {best: 0.0} | {name: float(np.mean(_lead(s) < 0)) for name, s in against(best).items()}


def _lead(sides: Sides) -> np.ndarray:
    """A of the recipe less A of the base, (n,)."""
    base, recipe = sides.recipes
    return recipe.A_n - base.A_n


def _is_known(fits: Sequence[Fit]) -> bool:
    return not any(fit.misfit for fit in fits) and mostly_identified(fits)


def last_gains(study: StudyRecord) -> dict[str, float]:
    """Of every arm with a finished run what it gained on the base: pass rates of the last evaluations.

    The mean over the seeds that both have finished, as measured; an arm without one is left out.
    """
    base = str(study.plan["base"])
    last = {
        arm.name: {
            run.plan.seed: run.record.evals[-1].pass_rate
            for run in study.of_arm(arm.name)
            if run.record is not None and run.outcome == "finished"
        }
        for arm in study.arms
    }
    gains = {}
    for arm, own in last.items():
        if arm != base and (common := own.keys() & last[base].keys()):
            gains[arm] = float(np.mean([own[seed] - last[base][seed] for seed in sorted(common)]))
    return gains
