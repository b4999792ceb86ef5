"""Scores of the frozen forecasts of a study, from the evaluations made after them."""

import functools
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scalerl.curve.fit import fit
from scalerl.errors import CannotAnswerError, InputError
from scalerl.forecast.rivals import RIVALS, PointForecast
from scalerl.forecast.scores import interval_score
from scalerl.numbers import as_float, as_mapping
from scalerl.record.reader import RunRecord
from scalerl.study.record import StudyRecord
from scalerl.view.facts.frozen import FrozenForecast, Outcome, judge

ALIKE = 0.08
"""Forecasts whose shares of the target differ by at most this are pooled."""


@dataclass(frozen=True)
class JudgedForecast:
    """A frozen forecast of a run, its outcome, and the rivals' forecasts from the same evaluations.

    `rivals` has the names of `scalerl.forecast.rivals.RIVALS`, without rivals that could not answer.
    """

    arm: str
    seed: int
    forecast: FrozenForecast
    outcome: Outcome
    rivals: Mapping[str, float]


@dataclass(frozen=True)
class ForecastScore:
    """Scores of the forecasts that were made at one share of their target compute, over all runs."""

    share: float
    forecasts: int
    """Number of forecasts whose target was measured; the scores are means over these, NaN without any."""
    open: int
    """Forecasts without a measurement: the run failed, was stopped, or has not reached the target yet."""
    coverage: float
    width: float
    score: float
    """Mean interval score, in pass rate; lower is better."""
    rms: float
    bias: float
    rivals_rms: Mapping[str, float]
    """Root mean square error of each rival over the forecasts for which it has an answer."""


def judged_forecasts(study: StudyRecord) -> tuple[JudgedForecast, ...]:
    """Return the recorded forecasts of runs and study, each once, by run and compute."""
    judged = []
    for run in study.runs:
        if (record := run.record) is None:
            continue
        rows = [row for row in study.forecasts if row.get("run") == run.plan.key]
        # Forecasts made at one budget for several later ones share the rivals' fits.
        rivals_then = functools.cache(functools.partial(_rivals, record))
        for forecast in _frozen(record, rows):
            outcome = judge(record, forecast)
            points = {}
            if outcome.measured is not None:
                target_1 = np.array([forecast.target_compute])
                rivals = rivals_then(forecast.axis, forecast.made_at_step)
                points = {name: float(rival(target_1)[0]) for name, rival in rivals.items()}
            judged.append(JudgedForecast(run.plan.arm, run.plan.seed, forecast, outcome, points))
    return tuple(judged)


def _frozen(record: RunRecord, rows: Sequence[Mapping[str, Any]]) -> list[FrozenForecast]:
    """Return the forecasts of a run, each once: its own, and those of the study, which may be the same."""
    found: dict[tuple[str, float, float], FrozenForecast] = {}
    for row in (*record.forecasts, *rows):
        forecast = FrozenForecast.from_row(row)
        # The run's own comes first; the same forecast must not count twice in the coverage.
        found.setdefault((forecast.axis, forecast.made_at_step, forecast.target_compute), forecast)
    return sorted(found.values(), key=lambda forecast: (forecast.compute, forecast.target_compute))


def _rivals(record: RunRecord, axis: str, made_at_step: float) -> dict[str, PointForecast]:
    """Fit the rivals to the evaluations up to a step; return those that have an answer."""
    # The rivals must not see later evaluations than the forecast saw.
    known = sum(point.step <= made_at_step for point in record.evals)
    seen = replace(record, evals=record.evals[:known], lines=record.lines[:known])
    rivals = {}
    try:
        result = fit(seen, x=axis)
    except (CannotAnswerError, InputError):
        return rivals
    for name, rival in RIVALS.items():
        with suppress(CannotAnswerError, InputError):
            rivals[name] = rival(result)
    return rivals


def score_forecasts(judged: Sequence[JudgedForecast]) -> tuple[ForecastScore, ...]:
    """Score the forecasts, pooled by the share of the target compute at which they were made."""
    groups: list[list[JudgedForecast]] = []
    placed = [one for one in judged if math.isfinite(one.forecast.share)]
    for one in sorted(placed, key=lambda one: one.forecast.share):
        if groups and one.forecast.share - groups[-1][0].forecast.share <= ALIKE:
            # Compare with the first of the group, so that a chain of small differences does not pool all.
            groups[-1].append(one)
        else:
            groups.append([one])
    return tuple(_score(group) for group in groups)


def _score(made: Sequence[JudgedForecast]) -> ForecastScore:
    group = [one for one in made if one.outcome.inside is not None and math.isfinite(one.forecast.median)]
    errors, scores = [], []
    rivals: dict[str, list[float]] = {}
    for one in group:
        measured = one.outcome.measured.pass_rate if one.outcome.measured else math.nan
        errors.append(one.forecast.median - measured)
        level = as_float(as_mapping(one.forecast.fit.get("intervals")).get("level"))
        level = level if 0 < level < 1 else 0.95  # the default, if a forecast does not record its level
        low_1, high_1 = (np.array([end]) for end in one.forecast.prediction)
        scores.append(float(interval_score(low_1, high_1, np.array([measured]), level)[0]))
        for name, point in one.rivals.items():
            rivals.setdefault(name, []).append(point - measured)
    return ForecastScore(
        share=round(float(np.median([one.forecast.share for one in made])), 2),
        forecasts=len(group),
        open=len(made) - len(group),
        coverage=_mean([bool(one.outcome.inside) for one in group]),
        width=_mean([one.forecast.width for one in group]),
        score=_mean(scores),
        rms=math.sqrt(_mean(np.square(errors))),
        bias=_mean(errors),
        rivals_rms={name: math.sqrt(_mean(np.square(rivals[name]))) for name in RIVALS if name in rivals},
    )


def _mean(values: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else math.nan
