"""What a study says: every arm's curve over its seeds, the verdicts against the base, and how forecasts held.

It reads the folder of a study alone, and never imports what trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from scalerl.curve.answers import check_level
from scalerl.forecast.compare import compare
from scalerl.forecast.comparison import Comparison, Pair
from scalerl.jsonl import plain
from scalerl.study.record import StudyRecord
from scalerl.study.verdict.arm_fits import ArmSummary, FittedRun, fit_arms, fits_of, summarise
from scalerl.study.verdict.cautions import cautions
from scalerl.study.verdict.forecast_scores import (
    ForecastScore,
    JudgedForecast,
    judged_forecasts,
    score_forecasts,
)
from scalerl.study.verdict.kinds import WORDS, kind_of


@dataclass(frozen=True)
class StudyVerdict:
    """The answer of a study. Made by `judge_study`."""

    study: StudyRecord
    axis: str
    budget: float
    """Compute at which pass rates are compared."""
    arms: tuple[ArmSummary, ...]
    """As planned; the one that the others are compared with is `study.plan["base"]`."""
    comparison: Comparison | None
    """Of the arms that could be fitted, with the base."""
    not_compared: Mapping[str, str]
    """Arms that are not in the comparison, and why."""
    forecasts: tuple[JudgedForecast, ...]
    scores: tuple[ForecastScore, ...]
    cautions: tuple[str, ...] = field(default=())
    """What the study cannot tell, in sentences: above all, runs whose importance ratios never left 1."""
    target: float | None = None
    level: float = 0.95

    @property
    def pairs(self) -> dict[str, Pair]:
        """Every arm against the base, by its name."""
        return {pair.recipe: pair for pair in self.comparison.pairs} if self.comparison else {}

    def to_json(self) -> dict[str, Any]:
        """All that is numeric, as docs/json.md lists it; what is infinite or not known is None."""
        pairs = self.pairs
        return plain(
            {
                "name": self.study.plan["name"],
                "base": self.study.plan["base"],
                "axis": self.axis,
                "budget": self.budget,
                "target": self.target,
                "level": self.level,
                "arms": [_arm_json(arm, pairs.get(arm.name), self.budget) for arm in self.arms],
                "comparison": self.comparison and self.comparison.to_json(),
                "not_compared": [{"arm": arm, "why": why} for arm, why in self.not_compared.items()],
                "forecasts": [_forecast_json(one) for one in self.forecasts],
                "scores": [asdict(score) for score in self.scores],
                "cautions": list(self.cautions),
            }
        )


def judge_study(
    study: StudyRecord,
    *,
    axis: str | None = None,
    budget: float | None = None,
    target: float | None = None,
    level: float = 0.95,
) -> StudyVerdict:
    """Fit all runs, compare the arms with the base seed by seed, and judge what was forecast.

    Args:
        study: finished or not; every run counts with the evaluations that it has, a failed one as well.
        axis: of compute; that of the plan by default.
        budget: compute at which pass rates are compared; the last of the plan by default, or on another axis
            the largest compute that all arms with a fit have reached.
        target: pass rate whose compute is compared; that of the plan by default.
        level: of the intervals; 1 - level is the family-wise error of the verdicts.

    Raises:
        InputError: an argument is out of range.
    """
    check_level(level)
    plan, base = study.plan, str(study.plan["base"])
    axis = axis or str(plan["axis"])
    target = plan.get("target") if target is None else target
    runs = fit_arms(study, axis, level)
    fits, seeds = fits_of(runs)
    if budget is None:
        reached = [max(float(fit.points.compute_N.max()) for fit in of_arm) for of_arm in fits.values()]
        budget = float(plan["budgets"][-1]) if axis == plan["axis"] or not reached else min(reached)
    arms = summarise(runs, budget, target, level)
    comparison = None
    if base in fits and len(fits) > 1:
        asked = compare(fits, base=base, budget=budget, target=target, level=level, blocks=seeds)
        comparison = _possible(asked, {arm.name: arm for arm in arms})
    forecasts = judged_forecasts(study)
    return StudyVerdict(
        study=study,
        axis=axis,
        budget=budget,
        arms=arms,
        comparison=comparison,
        not_compared=_not_compared(arms, base),
        forecasts=forecasts,
        scores=score_forecasts(forecasts),
        cautions=cautions(study, arms, axis),
        target=target,
        level=level,
    )


def _possible(comparison: Comparison, arms: Mapping[str, ArmSummary]) -> Comparison:
    """Without claims where a fitted ceiling is above what is known to be possible."""
    pairs = []
    for pair in comparison.pairs:
        astray = [arms[name] for name in (pair.recipe, pair.base) if arms[name].above]
        if astray and pair.ceiling.p is not None:
            arm = astray[0]
            why = (
                f"the fitted ceiling of {arm.name} is above the {arm.above:.3f} that is known to be possible"
            )
            # Its own gain is too large then, and the compute to a share of that too long.
            withheld = {"verdict": "inconclusive", "why": why}
            pair = replace(
                pair,
                ceiling=replace(pair.ceiling, **withheld),
                efficiency=replace(pair.efficiency, **withheld),
            )
        pairs.append(pair)
    return replace(comparison, pairs=tuple(pairs))


def _not_compared(arms: tuple[ArmSummary, ...], base: str) -> dict[str, str]:
    """Arms without a fit; all of them, where the base or all of the others have none."""
    without = {arm.name: arm.why for arm in arms if not arm.fits}
    if base in without:
        return {arm.name: without.get(arm.name, f"no run of {base} could be fitted") for arm in arms}
    if len(without) == len(arms) - 1:
        return without | {base: "no other arm could be fitted"}
    return without


def _arm_json(arm: ArmSummary, pair: Pair | None, budget: float) -> dict[str, Any]:
    stability = asdict(arm.stability)
    stability["alarms"] = [{"metric": m, "runs": n} for m, n in arm.stability.alarms.items()]
    stability["outcomes"] = [{"outcome": o, "runs": n} for o, n in arm.stability.outcomes.items()]
    return {
        "arm": arm.name,
        "verdict": pair and WORDS[kind_of(pair)],
        "quantities": {name: asdict(estimate) for name, estimate in arm.quantities.items()},
        "identified": arm.identified,
        "reached": arm.reached(budget),
        "stability": stability,
        "runs": [_run_json(run) for run in arm.runs],
    }


def _run_json(run: FittedRun) -> dict[str, Any]:
    fit, plan = run.fit, run.run.plan
    found = {"seed": plan.seed, "model": plan.model, "folder": plan.folder, "outcome": run.run.outcome}
    if fit is None:
        return found | {"why": run.why, "fit": None}
    values = {
        "evaluations": fit.n_points,
        "compute": float(fit.points.compute_N.max()),
        "A": fit.ceiling,
        "A_interval": None if fit.misfit else list(fit.intervals.A),
        "B": fit.median.B,
        "C_mid": fit.median.C_mid,
        "noise_sd": fit.noise.sd,
        "identified": fit.identified,
        "c_max_over_c_mid": fit.c_max_over_c_mid,
        "lack_of_fit": fit.lack_of_fit,
    }
    return found | {"why": fit.why, "fit": values}


def _forecast_json(one: JudgedForecast) -> dict[str, Any]:
    forecast, measured = one.forecast, one.outcome.measured
    return {
        "arm": one.arm,
        "seed": one.seed,
        "axis": forecast.axis,
        "compute": forecast.compute,
        "target_compute": forecast.target_compute,
        "mean": forecast.mean,
        "prediction": list(forecast.prediction),
        "measured": measured and measured.pass_rate,
        "inside": one.outcome.inside,
        "rivals": dict(one.rivals),
    }
