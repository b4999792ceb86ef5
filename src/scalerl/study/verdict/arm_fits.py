"""The runs of a study, fitted, and every arm's curve over its seeds."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from scalerl.curve.fit import fit
from scalerl.curve.posterior import Draws
from scalerl.curve.quantiles import draw_quantiles, tails
from scalerl.curve.result import Fit
from scalerl.curve.seeds import SEED_PRIOR, SeedPrior
from scalerl.errors import CannotAnswerError, InputError
from scalerl.forecast.sides import PASS_RATES, draw_recipe, given_family, quantities
from scalerl.study.record import StudyRecord, StudyRun
from scalerl.view.facts.frozen import REACHED
from scalerl.view.numbers import as_float, as_mapping
from scalerl.view.table import Estimate

MODEL_PRIOR = SeedPrior(A=0.05, log_b=0.15, log_mid=0.3)
"""How far seeds of an arm are taken to be apart where each has a base model of its own: our own judgement. It
is what an arm by itself is known by; in comparisons the base models drop out."""


@dataclass(frozen=True)
class FittedRun:
    """A run of the study and the fit of all that it has; `why` says what stands in the way of one."""

    run: StudyRun
    fit: Fit | None
    why: str = ""


@dataclass(frozen=True)
class Stability:
    """What went wrong in the runs of an arm, and how often."""

    outcomes: Mapping[str, int]
    """Runs by outcome: finished, failed, stopped, under way, not started."""
    retried: int
    """Attempts that failed, of runs that were tried again."""
    causes: tuple[str, ...]
    """Why runs failed, each once."""
    alarms: Mapping[str, int]
    """Runs that had the alarm, by its kind."""
    truncated: float
    """Mean share of truncated completions over the evaluations of all runs; NaN where it is not logged."""


@dataclass(frozen=True)
class ArmSummary:
    """One arm over its seeds. `quantities` has those of `scalerl.forecast.comparison.Difference`: A (where it
    is not withheld), B, C_mid, compute_to_own, pass_rate (at the budget), compute_to_target (where there is a
    target); it is empty where no run could be fitted."""

    name: str
    runs: tuple[FittedRun, ...]
    quantities: Mapping[str, Estimate]
    identified: int
    """Runs whose ceiling is identified."""
    stability: Stability
    draws: Draws | None = field(default=None, repr=False)
    """Its curves, the effects of its seeds included; None where no run could be fitted."""

    @property
    def fits(self) -> list[Fit]:
        """Of the runs that have one."""
        return [run.fit for run in self.runs if run.fit is not None]

    def reached(self, budget: float) -> int:
        """Runs with a fit that came to this compute; what the others say of it is extrapolated."""
        return sum(float(fit.points.compute_N[-1]) >= budget * (1 - REACHED) for fit in self.fits)

    @property
    def known_ceiling(self) -> float:
        """The ceiling known of its runs (`ceiling` in config.json), the highest; NaN where none is."""
        records = [run.run.record for run in self.runs if run.run.record is not None]
        known = [as_float(as_mapping(record.config.get("ceiling")).get("value")) for record in records]
        return max((value for value in known if value == value), default=math.nan)

    @property
    def above(self) -> float | None:
        """The ceiling known of its runs, where the fitted one is above it."""
        fitted = "A" in self.quantities and self.quantities["A"].interval[0] > self.known_ceiling
        return self.known_ceiling if fitted else None

    @property
    def why(self) -> str:
        """Why none of its runs has a fit, each reason once."""
        reasons = "; ".join(dict.fromkeys(run.why for run in self.runs if run.why))
        return f"none of its {len(self.runs)} runs could be fitted: {reasons or 'there is none'}"


def fit_arms(study: StudyRecord, axis: str, level: float = 0.95) -> dict[str, tuple[FittedRun, ...]]:
    """All runs of every arm, each fitted to all evaluations that it has, failed and stopped ones alike."""
    price = study.plan.get("price")
    return {
        arm.name: tuple(_fitted(run, axis, price, level) for run in study.of_arm(arm.name))
        for arm in study.arms
    }


def _fitted(run: StudyRun, axis: str, price: float | None, level: float) -> FittedRun:
    if run.record is None or not run.record.evals:
        return FittedRun(run, None, run.cause or "no evaluation yet")
    try:
        return FittedRun(run, fit(run.record, x=axis, price=price, level=level))
    except (CannotAnswerError, InputError) as error:
        return FittedRun(run, None, str(error).removeprefix(f"{run.record.evals_file}: "))


def fits_of(
    arms: Mapping[str, Sequence[FittedRun]],
) -> tuple[dict[str, list[Fit]], dict[str, list[Hashable]]]:
    """The fits of the arms that have any, and the block of each, as `compare` takes recipes and blocks.

    A block is a seed, in the group of its base model where seeds have several.
    """
    plans = [run.run.plan for runs in arms.values() for run in runs]
    models = {plan.seed: plan.model for plan in plans}
    # An arm with a base model of its own leaves no base model in common.
    grouped = len(set(models.values())) > 1 and all(models[plan.seed] == plan.model for plan in plans)
    fits, blocks = {}, {}
    for name, runs in arms.items():
        if found := [run for run in runs if run.fit is not None]:
            fits[name] = [run.fit for run in found]
            seeds = [run.run.plan.seed for run in found]
            blocks[name] = [(models[seed], seed) for seed in seeds] if grouped else seeds
    return fits, blocks


def summarise(
    arms: Mapping[str, tuple[FittedRun, ...]], budget: float | None, target: float | None, level: float
) -> tuple[ArmSummary, ...]:
    """Every arm over its seeds; how far seeds are apart is learnt from all arms together.

    Where the seeds of an arm have base models of their own it is learnt from that arm alone: another one has
    the same base models, and is no further evidence of how they scatter.
    """
    recipes, _ = fits_of(arms)
    shared = functools.cache(functools.partial(given_family, recipes, SEED_PRIOR))
    summaries = []
    for name, runs in arms.items():
        fits = recipes.get(name, [])
        estimates: dict[str, Estimate] = {}
        draws = None
        if fits:
            alone = functools.partial(given_family, {name: fits}, MODEL_PRIOR)
            models = {run.run.plan.model for run in runs}
            draws = draw_recipe(fits, name, alone if len(models) > 1 else shared)
            asked = quantities(budget, target)
            if any(result.misfit for result in fits):
                del asked["A"]
            estimates = {key: _estimate(key, quantity(draws), level) for key, quantity in asked.items()}
        identified = sum(result.identified for result in fits)
        summaries.append(ArmSummary(name, runs, estimates, identified, _stability(runs), draws))
    return tuple(summaries)


def _estimate(name: str, value_n: np.ndarray, level: float) -> Estimate:
    median, low, high = draw_quantiles(value_n, np.insert(tails(level), 0, 0.5))
    if name not in PASS_RATES:
        median, low, high = np.exp([median, low, high])
    return Estimate(float(median), (float(low), float(high)))


def _stability(runs: Sequence[FittedRun]) -> Stability:
    planned = [one.run for one in runs]
    # The last attempt of a run was not tried again.
    retried = sum(attempt.outcome == "failed" for run in planned for attempt in run.attempts[:-1])
    causes = tuple(dict.fromkeys(run.cause for run in planned if run.cause))
    records = [run.record for run in planned if run.record is not None]
    alarmed = [{alarm.metric for alarm in record.alarms if alarm.level == "alarm"} for record in records]
    alarms = Counter(metric for of_run in alarmed for metric in sorted(of_run))
    truncated = np.array([point.truncated for record in records for point in record.evals])
    known = truncated[~np.isnan(truncated)]
    return Stability(
        outcomes=dict(Counter(run.outcome for run in planned)),
        retried=retried,
        causes=causes,
        alarms=dict(alarms),
        truncated=float(known.mean()) if len(known) else float("nan"),
    )
