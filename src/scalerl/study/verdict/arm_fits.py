"""The fits of a study's runs, every arm's curve over its seeds, and which arms are ahead."""

import functools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from scalerl.curve.points import Points
from scalerl.curve.posterior import Draws
from scalerl.curve.result import Fit
from scalerl.curve.seeds import MODEL_PRIOR, SEED_PRIOR
from scalerl.errors import InputError
from scalerl.forecast.sides import (
    PASS_RATES,
    Sides,
    all_described,
    draw_recipe,
    draw_sides,
    given_family,
    mostly_identified,
    quantities,
)
from scalerl.quantiles import draw_quantiles, tails
from scalerl.study.record import StudyRecord, StudyRun
from scalerl.view.facts.facts import known_ceiling
from scalerl.view.facts.frozen import REACHED
from scalerl.view.facts.shown import ShownRun
from scalerl.view.table import Estimate


@dataclass(frozen=True)
class FittedRun:
    """A run of the study and the fit to all its evaluations, or `why` there is none."""

    run: StudyRun
    why: str = ""
    shown: ShownRun | None = field(default=None, repr=False)
    """Its evaluations and their fit; None if it has no evaluation on the axis of the study."""

    @property
    def fit(self) -> Fit | None:
        """The fit to all its evaluations."""
        return self.shown.fit if self.shown is not None else None


@dataclass(frozen=True)
class Stability:
    """Failures and alarms in the runs of an arm."""

    outcomes: Mapping[str, int]
    """Runs by outcome: finished, failed, stopped, under way, not started."""
    retried: int
    """Failed attempts that were followed by another."""
    causes: tuple[str, ...]
    """Why runs failed, each once."""
    alarms: Mapping[str, int]
    """Number of runs with an alarm, by its metric."""
    truncated: float
    """Mean share of truncated completions over the evaluations of all runs; NaN if it is not logged."""


@dataclass(frozen=True)
class ArmSummary:
    """One arm over its seeds. `quantities` are those of `scalerl.forecast.comparison.Difference`: A (unless
    withheld), B, C_mid, compute_to_own, pass_rate (at the budget), compute_to_target (if there is a target);
    empty if no run could be fitted."""

    name: str
    runs: tuple[FittedRun, ...]
    quantities: Mapping[str, Estimate]
    identified: int
    """Number of runs whose ceiling is identified."""
    stability: Stability
    draws: Draws | None = field(default=None, repr=False)
    """Draws of the arm's curves, seed effects included; None if no run could be fitted."""

    @property
    def fits(self) -> list[Fit]:
        """The fits of all runs that have one."""
        return [run.fit for run in self.runs if run.fit is not None]

    def reached(self, budget: float) -> int:
        """Return the number of fitted runs that reached this compute; other fits are extrapolated to it."""
        return sum(float(fit.points.compute_N[-1]) >= budget * (1 - REACHED) for fit in self.fits)

    @property
    def known_ceiling(self) -> float:
        """The highest known ceiling of its runs (`ceiling` in config.json); NaN if none is known."""
        known = [known_ceiling(run.run.record) for run in self.runs]
        return max((value for value in known if value == value), default=math.nan)

    @property
    def above(self) -> float | None:
        """The known ceiling if the fitted one is above it, else None."""
        fitted = "A" in self.quantities and self.quantities["A"].interval[0] > self.known_ceiling
        return self.known_ceiling if fitted else None

    @property
    def why(self) -> str:
        """Why none of its runs has a fit, naming each reason once."""
        reasons = "; ".join(dict.fromkeys(run.why for run in self.runs if run.why))
        return f"none of its {len(self.runs)} runs could be fitted: {reasons or 'there is none'}"


def fit_arms(
    study: StudyRecord, axis: str, level: float = 0.95, progress: Callable[[float], None] | None = None
) -> dict[str, tuple[FittedRun, ...]]:
    """Fit all runs of every arm to all of their evaluations, including failed and stopped runs.

    `progress` is called with the share of the runs that have been fitted.
    """

    def fitted(run: StudyRun) -> FittedRun:
        if run.record is None or not run.record.evals:
            return FittedRun(run, run.unread or run.cause or "no evaluation yet")
        try:
            points = Points.from_record(run.record, axis, study.plan["price"])
        except InputError as error:
            return FittedRun(run, str(error).removeprefix(f"{run.record.evals_file}: "))
        # All evaluations of any run: one that failed late has most of its information.
        shown = ShownRun(f"{run.plan.arm} seed {run.plan.seed}", points, run.record).fitted_with(level=level)
        why = shown.not_compared
        return FittedRun(run, why, replace(shown, fit=None, reason=why) if why else shown)

    found: dict[str, tuple[FittedRun, ...]] = {arm.name: () for arm in study.arms}
    for done, run in enumerate(study.runs, start=1):
        found[run.plan.arm] += (fitted(run),)
        if progress is not None:
            progress(done / len(study.runs))
    return found


def fits_of(
    arms: Mapping[str, Sequence[FittedRun]],
) -> tuple[dict[str, list[Fit]], dict[str, list[Hashable]]]:
    """Return the fits of the arms that have any, and the block of each fit, as arguments for `compare`.

    A block is a seed, together with its base model if seeds have several models.
    """
    plans = [run.run.plan for runs in arms.values() for run in runs]
    models = {plan.seed: plan.model for plan in plans}
    # If an arm has a base model of its own, a seed does not determine the model.
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
    """Summarise every arm over its seeds; the variance between seeds is learnt from all arms together.

    If the seeds of an arm have different base models, it is learnt from that arm alone: the other arms have
    the same models, and so no further evidence of the variance between models.
    """
    recipes, _ = fits_of(arms)
    shared = functools.cache(functools.partial(given_family, recipes, SEED_PRIOR))
    summaries = []
    for name, runs in arms.items():
        fits = recipes.get(name, [])
        estimates: dict[str, Estimate] = {}
        draws = None
        if fits:
            # From this arm alone, as arms share base models and each model would count once for every arm.
            alone = functools.partial(given_family, {name: fits}, MODEL_PRIOR)
            models = {run.run.plan.model for run in runs}
            draws = draw_recipe(fits, name, alone if len(models) > 1 else shared)
            asked = quantities(budget, target)
            if not all_described(fits):
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
    # The last attempt of a run was not followed by another.
    retried = sum(attempt.outcome == "failed" for run in planned for attempt in run.attempts[:-1])
    causes = tuple(dict.fromkeys(run.cause for run in planned if run.cause))
    records = [run.record for run in planned if run.record is not None]
    alarmed = [{alarm.metric for alarm in record.alarms if alarm.is_alarm} for record in records]
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


def below_best(study: StudyRecord, axis: str) -> dict[str, float | None]:
    """Return for every arm the posterior probability that its ceiling is below that of the best.

    The best is the arm with the highest median A among those whose ceiling is known: identified in more than
    half of the runs, with no run a misfit. The result is 0 for the best, and None for arms whose ceiling is
    not known. Runs are paired by block throughout, so that no arm wins by the base models it happens to have.

    Among many equal arms the best is the luckiest: of six, the last is below it with probability .95 about
    one time in two. Stopping such an arm only loses a comparison; verdicts come from `compare`.
    """
    recipes, blocks = fits_of(fit_arms(study, axis))
    known = [name for name, fits in recipes.items() if mostly_identified(fits) and all_described(fits)]
    answer: dict[str, float | None] = dict.fromkeys(arm.name for arm in study.arms)
    if not known:
        return answer
    given = functools.cache(lambda family: given_family(recipes, SEED_PRIOR, family, blocks))

    def against(base: str) -> dict[str, Sides]:
        return {name: draw_sides(recipes, base, name, given, blocks) for name in known if name != base}

    # To compare medians within blocks too, take the lead over the arm with the most runs.
    common = max(known, key=lambda name: len(recipes[name]))
    leads = {name: float(np.median(_lead(sides))) for name, sides in against(common).items()} | {common: 0.0}
    best = max(known, key=lambda name: leads[name])
    return answer | {best: 0.0} | {name: float(np.mean(_lead(s) < 0)) for name, s in against(best).items()}


def _lead(sides: Sides) -> np.ndarray:
    """Return A of the recipe minus A of the base, (n,)."""
    base, recipe = sides.recipes
    return recipe.A_n - base.A_n


def last_gains(study: StudyRecord) -> dict[str, float]:
    """Return the mean difference of every arm to the base in the pass rate of the last evaluation.

    It is taken over the seeds that both have finished; an arm without such a seed is left out.
    """
    base = str(study.plan["base"])
    last = {
        arm.name: {
            run.plan.seed: run.record.evals[-1].pass_rate
            for run in study.of_arm(arm.name)
            # An unfinished run would be compared at less compute.
            if run.record is not None and run.outcome == "finished"
        }
        for arm in study.arms
    }
    gains = {}
    for arm, own in last.items():
        if arm != base and (common := own.keys() & last[base].keys()):
            gains[arm] = float(np.mean([own[seed] - last[base][seed] for seed in sorted(common)]))
    return gains
