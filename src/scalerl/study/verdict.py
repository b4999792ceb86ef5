"""What a study says: every arm's curve over its seeds, the verdicts against the base, and how forecasts held.

It reads the folder of a study alone, and never imports what trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from scalerl.curve.comparison import Comparison
from scalerl.curve.quantiles import Interval
from scalerl.curve.result import Fit
from scalerl.report.frozen import FrozenForecast, Outcome
from scalerl.study.record import StudyRecord, StudyRun


@dataclass(frozen=True)
class Estimate:
    """Median and interval of a quantity of a recipe: over its seeds, their variance included."""

    median: float
    interval: Interval


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
    """One arm over its seeds. `quantities` has those of `scalerl.curve.comparison.Difference`: A (where it is
    not withheld), B, C_mid, compute_to_own, pass_rate (at the budget), compute_to_target (where there is a
    target); it is empty where no run could be fitted."""

    name: str
    runs: tuple[FittedRun, ...]
    quantities: Mapping[str, Estimate]
    identified: int
    """Runs whose ceiling is identified."""
    stability: Stability

    @property
    def fits(self) -> list[Fit]:
        """Of the runs that have one."""
        return [run.fit for run in self.runs if run.fit is not None]


@dataclass(frozen=True)
class JudgedForecast:
    """A frozen forecast of a run, what it came to, and the points of the rivals from the same evaluations.

    `rivals` are by the names of `scalerl.curve.backtest.RIVALS`; one that could not answer is missing.
    """

    arm: str
    seed: int
    forecast: FrozenForecast
    outcome: Outcome
    rivals: Mapping[str, float]


@dataclass(frozen=True)
class ForecastScore:
    """Forecasts made at one share of their target, all runs pooled: how their intervals and points did."""

    share: float
    forecasts: int
    coverage: float
    width: float
    score: float
    """Mean interval score, in pass rate; lower is better."""
    rms: float
    bias: float
    rivals_rms: Mapping[str, float]
    """Of the rivals, each where it answered."""


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
