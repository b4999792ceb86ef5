"""The status of a run in progress: measured pass rates, forecasts, and speed.

    run = stand(points, record, StandingQuery(target=0.6)).fitted()
    run.forecast, run.chance, run.eta(now), run.to_json(now)

`scalerl watch` shows it in a terminal or as lines, `scalerl serve` in a page.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from scalerl.curve.answers import Chance, Forecast
from scalerl.curve.points import Points
from scalerl.curve.result import Fit
from scalerl.jsonl import read_last
from scalerl.numbers import Unit, as_float, unit_for
from scalerl.record.alarms import Alarm
from scalerl.record.devices import is_of_one_device
from scalerl.record.evaluation import EvalPoint
from scalerl.record.reader import RunRecord
from scalerl.view.facts.fit_rows import beyond
from scalerl.view.facts.shown import ShownRun

_RECENT = 6
"""Evaluations over which the speed is measured: few, so that it soon excludes those before a resume."""


@dataclass(frozen=True)
class StandingQuery:
    """The question about a followed run: a target, a budget, and options of the fit."""

    target: float | None = None
    """Pass rate to reach."""
    budget: float | None = None
    """Compute at which the run ends, in the unit of `axis`; None for the run's own budget."""
    level: float = 0.95
    r0: Any = None
    min_compute: float = 0.0
    axis: str | None = None
    """The axis of `budget` if runs are read on several axes; None for the axis on which the run is read."""


@dataclass(frozen=True, eq=False)
class Standing(ShownRun):
    """The status of a run, made by `stand`."""

    reason: str = "not fitted yet"
    asked: StandingQuery = field(repr=False, default=StandingQuery())
    row: dict[str, Any] = field(repr=False, default_factory=dict)
    """The last line of steps.jsonl; empty if there is none."""
    sample: dict[str, Any] = field(repr=False, default_factory=dict)
    """The last line of samples.jsonl; empty if there is none."""
    ended: bool = False
    written: float = math.nan
    """Unix seconds of the last write to its files; NaN if times are logged instead."""

    @property
    def step(self) -> int | None:
        """Trainer step of the last evaluation; None if not known."""
        steps_N = self.points.step_N
        return int(steps_N[-1]) if steps_N is not None and len(steps_N) else None

    @property
    def last_step(self) -> int | None:
        """Trainer step of the last line of the run, for an evaluation or a step; None if not known."""
        row = as_float(self.row.get("step"))
        if not math.isfinite(row):
            return self.step
        return int(row) if self.step is None else max(int(row), self.step)

    @property
    def pass_rate(self) -> float:
        """Pass rate of the last evaluation; NaN before the first."""
        return float(self.points.pass_rate_N[-1]) if len(self.points) else math.nan

    @property
    def unit(self) -> Unit:
        """The unit for the compute of the run."""
        axis = self.points.axis
        return unit_for(axis, max(self.compute, self.end), is_of_one_device(self.record, axis))

    @property
    def budget(self) -> float:
        """Compute at which the run ends; NaN if not known on this axis."""
        if self.asked.budget is not None:
            return self.asked.budget if self.asked.axis in (None, self.points.axis) else math.nan
        return super().budget

    @property
    def end(self) -> float:
        """Compute of the forecast: the budget, else twice the compute so far."""
        return self.budget if math.isfinite(self.budget) else 2 * self.compute

    @property
    def beyond(self) -> str:
        """A warning if the requested budget lies far beyond the compute so far; else empty."""
        asked = [] if self.asked.budget is None or math.isnan(self.budget) else [self.budget]
        return beyond(asked, [(self.points, self.record)])

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings of reading and fitting the run, and `beyond`."""
        return (*self.warnings_of_fit, *filter(None, [self.beyond]))

    @property
    def where(self) -> str:
        """The meaning of `end` as text: the budget, or twice the compute so far."""
        return "at the end" if math.isfinite(self.budget) else "at twice the compute so far"

    @property
    def share(self) -> float:
        """Share of the budget at the last evaluation; NaN without a budget."""
        return self.compute / self.budget if self.budget > 0 else math.nan

    @functools.cached_property
    def forecast(self) -> Forecast | None:
        """Forecast of one evaluation at `end`; None without a fit."""
        return self.fit.forecast(self.end) if self.fit is not None else None

    @functools.cached_property
    def chance(self) -> Chance | None:
        """The chance of the target at the budget; None without either of these, or without a fit."""
        if self.fit is None or self.asked.target is None or not math.isfinite(self.budget):
            return None
        return self.fit.chance(self.asked.target, self.end)

    @property
    def evals(self) -> tuple[EvalPoint, ...]:
        """The recorded evaluations; a table has none."""
        return self.record.evals if self.record is not None else ()

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """Alarms and warnings that started by the last line."""
        step = math.inf if self.last_step is None else self.last_step
        known = self.record.alarms if self.record is not None else ()
        return tuple(alarm for alarm in known if alarm.first <= step)

    @property
    def health_is_watched(self) -> bool:
        """Whether the trainer checks its health; if not, an empty list of alarms says nothing."""
        return self.record is not None and self.record.health_is_watched

    @property
    def time(self) -> float:
        """Unix seconds of the last evaluation; NaN if not logged."""
        return self.evals[-1].time if self.evals else math.nan

    @property
    def last_line(self) -> float:
        """Unix seconds of the last line of the run, for an evaluation or a step; else `written`."""
        logged = float(np.fmax(self.time, as_float(self.row.get("time"))))
        return self.written if math.isnan(logged) else logged

    def health(self, name: str) -> float:
        """Return `truncated`, `entropy` or `mean_length` of the last step, else of the last evaluation."""
        value = as_float(self.row.get(name))
        if math.isfinite(value) or not self.evals:
            return value
        return as_float(getattr(self.evals[-1], name))

    @property
    def speed(self) -> float:
        """Compute per second of wall time, over the last evaluations; NaN if times were not logged."""
        return self._per_second(self.points.compute_N)

    @property
    def tokens_per_second(self) -> float:
        """Tokens generated per second of wall time, over the last evaluations."""
        return self._per_second(np.array([point.tokens.generated for point in self.evals]))

    def _per_second(self, amount_N: np.ndarray) -> float:
        time_N = np.array([point.time for point in self.evals])[-_RECENT:]
        if len(time_N) < 2 or not time_N[-1] > time_N[0]:
            return math.nan
        recent_N = amount_N[-_RECENT:]
        return float((recent_N[-1] - recent_N[0]) / (time_N[-1] - time_N[0]))

    def eta(self, now: float) -> float:
        """Return the seconds from `now` to the budget at the present speed; NaN if not known."""
        if self.ended or not self.speed > 0:
            return math.nan
        return max((self.budget - self.compute) / self.speed - (now - self.time), 0.0)

    def until(self, n: int) -> Standing:
        """Return the run as of its `n`-th evaluation, fitted to the evaluations up to there."""
        if n == len(self.points):
            return self
        own = self.record
        record = own and replace(own, evals=own.evals[:n], lines=own.lines[:n])
        then = replace(self, points=self.points.select(np.arange(n)), record=record, row={}, ended=False)
        return then.fitted()

    def fitted(self) -> Standing:
        """Return this with a fit to all evaluations, or with the reason why there is none."""
        asked = self.asked
        return self.fitted_with(r0=asked.r0, min_compute=asked.min_compute, level=asked.level)

    def to_json(self, now: float) -> dict[str, Any]:
        """Return the object for a line of `scalerl watch --json` and for the run's row in a server's list."""
        target = None
        if (chance := self.chance) is not None:
            target = {"pass_rate": self.asked.target, "compute": self.end, "verdict": chance.verdict}
            target["probability"] = chance.probability
        return {
            "name": self.name,
            "metric": self.points.metric.to_json(),
            "step": self.step,
            "last_step": self.last_step,
            "evaluations": len(self.points),
            "pass_rate": self.pass_rate,
            "axis": self.points.axis,
            "compute": self.compute,
            "end": self.end,
            "share": self.share,
            "forecast": self.forecast.to_json() if self.forecast else None,
            "no_forecast": self.reason,
            "ceiling": self.fit and _ceiling(self.fit),
            "target": target,
            "alarms": [_alarm(alarm) for alarm in self.alarms] if self.health_is_watched else None,
            "truncated": self.health("truncated"),
            "entropy": self.health("entropy"),
            "mean_length": self.health("mean_length"),
            "time": self.time,
            "last_line": self.last_line,
            "compute_per_second": self.speed,
            "tokens_per_second": self.tokens_per_second,
            "eta": self.eta(now),
            "ended": self.ended,
        }


def _ceiling(fit: Fit) -> dict[str, Any]:
    return {
        "A": fit.ceiling,
        "interval": None if fit.misfit else list(fit.intervals.A),
        "identified": fit.identified,
        "why": fit.why,
        "lack_of_fit": fit.lack_of_fit,
    }


def _alarm(alarm: Alarm) -> dict[str, Any]:
    about = {"metric": alarm.metric, "level": alarm.level}
    return about | {"since": alarm.first, "until": alarm.last, "text": str(alarm)}


def stand(points: Points, record: RunRecord | None, asked: StandingQuery) -> Standing:
    """Return the status of the run of these points, not fitted yet (`Standing.fitted`).

    From a run folder it reads the last lines of steps.jsonl and samples.jsonl, and whether the run has ended.

    Raises:
        InputError: one of these files cannot be read.
    """
    path = record.path if record is not None else Path(points.source)
    own = record is not None and (path / "evals.jsonl").is_file()
    row, sample = (read_last(path / name) if own else {} for name in ("steps.jsonl", "samples.jsonl"))
    name = str((record is not None and record.config.get("name")) or path.name)
    ended = own and record is not None and record.has_ended
    return Standing(name, points, record, asked=asked, row=row, sample=sample, ended=ended)
