"""The verdict of a study: every arm's curve over its seeds, arms against the base, and scores of forecasts.

It is made from the folder of the study alone, without torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from scalerl.curve.answers import check_level
from scalerl.forecast.compare import compare
from scalerl.forecast.comparison import Comparison, Pair
from scalerl.forecast.measured import MeasuredDifference
from scalerl.jsonl import plain
from scalerl.numbers import rate
from scalerl.study.record import StudyRecord
from scalerl.study.verdict.arm_fits import ArmSummary, FittedRun, fit_arms, fits_of, summarise
from scalerl.study.verdict.cautions import cautions, same_runs, unmoved
from scalerl.study.verdict.differences import measured_differences
from scalerl.study.verdict.forecast_scores import (
    ForecastScore,
    JudgedForecast,
    judged_forecasts,
    score_forecasts,
)
from scalerl.view.facts.fit_rows import beyond
from scalerl.view.facts.notices import is_made
from scalerl.view.runs.tables import latex

BY_CURVES = ("lower at the compute seen", "higher at the compute seen")
"""Verdicts by the fitted curves, if the measured pass rates show no difference."""
KINDS = (
    *("lower as measured", "higher as measured", "lower ceiling", "higher ceiling"),
    *("reaches it later", "reaches it sooner", *BY_CURVES),
    *("not significant", "inconclusive", "never acted", "not compared", "the base"),
)
"""The verdicts on an arm, in the order of the page; a significant one states its direction."""


def kind_of(pair: Pair, measured: MeasuredDifference | None = None) -> str:
    """Return the verdict on a pair: as measured at the budget, else the first claim of the curves."""
    asked = [pair.ceiling, pair.efficiency, pair.seen]
    made = [claim.verdict for claim in ([measured.claim] if measured else []) + asked if is_made(claim)]
    # Not significant only if all questions could be answered.
    is_open = any(claim.verdict == "inconclusive" for claim in pair.claims.values())
    return made[0] if made else "inconclusive" if is_open else "not significant"


@dataclass(frozen=True)
class StudyVerdict:
    """The verdict of a study, made by `judge_study`."""

    study: StudyRecord
    axis: str
    budget: float
    """Compute at which pass rates are compared."""
    arms: tuple[ArmSummary, ...]
    """Arms in the order of the plan; the others are compared with `study.plan["base"]`."""
    comparison: Comparison | None
    """Comparison of all fitted arms with the base."""
    not_compared: Mapping[str, str]
    """Why each arm that is not in the comparison is missing."""
    never_acted: frozenset[str]
    """The arms whose runs equal those of the base, evaluation for evaluation and step for step."""
    still: Mapping[str, str]
    """If the base's pass rate never changed, the base and all arms that stayed at its value, in words."""
    forecasts: tuple[JudgedForecast, ...]
    scores: tuple[ForecastScore, ...]
    cautions: tuple[str, ...] = field(default=())
    """Limits of what the study shows, in sentences: for one, importance ratios that never left 1."""
    target: float | None = None
    level: float = 0.95
    measured: Mapping[str, MeasuredDifference] = field(default_factory=dict)
    """The paired difference of every arm to the base at the budget, as measured."""

    def kind(self, arm: str) -> str:
        """Return the verdict on an arm, one of `KINDS`."""
        base = str(self.study.plan["base"])
        if arm == base:
            return "the base"
        if arm in self.never_acted:
            return "never acted"
        pair = self.pairs.get(arm)
        return kind_of(pair, self.measured.get(arm)) if pair else "not compared"

    @property
    def pairs(self) -> dict[str, Pair]:
        """The comparison of every arm with the base, by the arm's name."""
        return {pair.recipe: pair for pair in self.comparison.pairs} if self.comparison else {}

    def to_json(self) -> dict[str, Any]:
        """Return all numbers as listed in docs/reference/json.md; None for infinite or unknown ones."""
        return plain(
            {
                "name": self.study.plan["name"],
                "base": self.study.plan["base"],
                "axis": self.axis,
                "budget": self.budget,
                "target": self.target,
                "level": self.level,
                "arms": [self.arm_json(arm) for arm in self.arms],
                "comparison": self.comparison and self.comparison.to_json(),
                "not_compared": [{"arm": arm, "why": why} for arm, why in self.not_compared.items()],
                "forecasts": [_forecast_json(one) for one in self.forecasts],
                "scores": [asdict(score) for score in self.scores],
                "cautions": list(self.cautions),
            }
        )

    def to_latex(self) -> str:
        """Return a small table for a paper, with the pass rate of each arm at the budget: `scalerl.latex`."""
        return latex({arm.name: arm.fits for arm in self.arms if arm.fits}, self.budget)

    def arm_json(self, arm: ArmSummary) -> dict[str, Any]:
        """Return the numbers of an arm, including infinite ones: a member of `arms` in `to_json`."""
        stability = asdict(arm.stability)
        # Lists instead of mappings, as docs/reference/json.md lists every key, and these keys are data.
        stability["alarms"] = [{"metric": m, "runs": n} for m, n in arm.stability.alarms.items()]
        stability["outcomes"] = [{"outcome": o, "runs": n} for o, n in arm.stability.outcomes.items()]
        kind, measured = self.kind(arm.name), self.measured.get(arm.name)
        return {
            "arm": arm.name,
            "verdict": None if kind in ("the base", "not compared") else kind,
            "measured": measured
            and {
                "seeds": measured.seeds,
                "difference": measured.difference.median,
                "interval": list(measured.difference.interval),
                "verdict": measured.claim.verdict,
                "p": measured.claim.p,
                "p_adjusted": measured.claim.p_adjusted,
            },
            "quantities": {name: asdict(estimate) for name, estimate in arm.quantities.items()},
            "identified": arm.identified,
            "reached": arm.reached(self.budget),
            "stability": stability,
            "runs": [_run_json(run) for run in arm.runs],
        }


def judge_study(
    study: StudyRecord,
    *,
    axis: str | None = None,
    budget: float | None = None,
    target: float | None = None,
    level: float = 0.95,
    progress: Callable[[float], None] | None = None,
) -> StudyVerdict:
    """Fit all runs, compare the arms with the base seed by seed, and score the forecasts.

    Every run counts with the evaluations that it has, even a failed one. The arguments are those of
    `scalerl.study.entry.verdict`.

    Raises:
        InputError: an argument is out of range.
    """
    check_level(level)
    plan, base = study.plan, str(study.plan["base"])
    axis = axis or str(plan["axis"])
    target = plan.get("target") if target is None else target
    runs = fit_arms(study, axis, level, progress)
    fits, seeds = fits_of(runs)
    asked = [budget] if budget is not None else []
    if budget is None:
        reached = [max(float(fit.points.compute_N.max()) for fit in of_arm) for of_arm in fits.values()]
        # On another axis the plan's budget has no meaning; beyond the shortest arm, pass rates are forecasts.
        budget = float(plan["budgets"][-1]) if axis == plan["axis"] or not reached else min(reached)
    arms = summarise(runs, budget, target, level)
    rates = unmoved(study)
    still = {
        name: f"no pass rate ever left {rate(value)}"
        for name, value in rates.items()
        if value == rates.get(base)
    }
    # Arms with the same runs as the base test nothing, and would only raise the p-values of the others.
    never_acted = frozenset(arm for pair in same_runs(study) if base in pair for arm in pair) - {base}
    apart = dict.fromkeys(never_acted, "its runs are those of the base") | still
    # The base stays, for the comparison with other arms.
    fits = {name: of_arm for name, of_arm in fits.items() if name == base or name not in apart}
    blocks = {name: seeds[name] for name in fits}
    comparison = None
    if base in fits and len(fits) > 1:
        found = compare(fits, base=base, budget=budget, target=target, level=level, blocks=blocks)
        comparison = _possible(found, {arm.name: arm for arm in arms})
    forecasts = judged_forecasts(study)
    fitted = [(run.fit.points, run.run.record) for arm in arms for run in arm.runs if run.fit]
    far = beyond(asked, fitted) if fitted else ""
    return StudyVerdict(
        study=study,
        axis=axis,
        budget=budget,
        arms=arms,
        comparison=comparison,
        never_acted=never_acted,
        still=still,
        not_compared=_not_compared(arms, base, apart),
        forecasts=forecasts,
        scores=score_forecasts(forecasts),
        cautions=(*cautions(study, arms, axis), *filter(None, [far])),
        target=target,
        level=level,
        measured=measured_differences(arms, base, axis, budget, level),
    )


def _possible(comparison: Comparison, arms: Mapping[str, ArmSummary]) -> Comparison:
    """Make claims inconclusive if a fitted ceiling is above the highest that is known to be possible."""
    pairs = []
    for pair in comparison.pairs:
        arm = next((arms[name] for name in (pair.recipe, pair.base) if arms[name].above), None)
        if arm is not None and pair.ceiling.p is not None:
            why = (
                f"the fitted ceiling of {arm.name} is above the {arm.above:.3f} that is known to be possible"
            )
            # Its own gain is then too large, and the compute to a share of it too: both claims are in doubt.
            ceiling, efficiency = (
                replace(claim, verdict="inconclusive", why=why) for claim in (pair.ceiling, pair.efficiency)
            )
            pair = replace(pair, ceiling=ceiling, efficiency=efficiency)
        pairs.append(pair)
    return replace(comparison, pairs=tuple(pairs))


def _not_compared(arms: tuple[ArmSummary, ...], base: str, apart: Mapping[str, str]) -> dict[str, str]:
    """Return why arms are not compared; this includes the base if it or all others cannot be compared."""
    without = {arm.name: arm.why for arm in arms if not arm.fits}
    if base in without:
        # Without the base no arm can be compared, so every arm needs a reason.
        return {arm.name: without.get(arm.name, f"no run of {base} could be fitted") for arm in arms}
    without |= {name: why for name, why in apart.items() if name != base}
    if len(without) == len(arms) - 1:
        return without | {base: apart.get(base, "no other arm could be fitted")}
    return without


def _run_json(run: FittedRun) -> dict[str, Any]:
    fit, plan, own = run.fit, run.run.plan, run.run
    found = {"seed": plan.seed, "model": plan.model, "folder": plan.folder, "outcome": own.outcome}
    found |= {"attempts": len(own.attempts), "cause": own.cause, "pass_rate": own.last_pass_rate}
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
        "median": forecast.median,
        "prediction": list(forecast.prediction),
        "measured": measured and measured.pass_rate,
        "inside": one.outcome.inside,
        "rivals": dict(one.rivals),
    }
