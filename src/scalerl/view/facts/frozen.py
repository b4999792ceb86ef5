"""Forecasts as they were frozen during the run, and their outcomes.

Nothing is fitted again here: a forecast is scored as it was written before its outcome was known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scalerl.numbers import as_float, as_mapping, pair, percent, rate, rate_interval
from scalerl.record.evaluation import EvalPoint
from scalerl.record.reader import RunRecord
from scalerl.view.facts.notices import misfit_in_words

REACHED = 0.05
"""An evaluation counts as the outcome if its compute is within this share of the forecast's target.

Once the run has passed the target, twice this share is allowed.
"""


@dataclass(frozen=True)
class Band:
    """A forecast curve over compute: the median of the mean curve and its interval, each of shape (M,)."""

    compute_M: np.ndarray
    median_M: np.ndarray
    lo_M: np.ndarray
    hi_M: np.ndarray


@dataclass(frozen=True)
class FrozenForecast:
    """One line of forecasts.jsonl; missing values are NaN, and a missing band is None."""

    made_at_step: float
    axis: str
    compute: float
    """Compute spent when it was made, in units of `axis`."""
    target_compute: float
    median: float
    """Median of the mean curve at `target_compute`."""
    prediction: tuple[float, float]
    """Interval of one evaluation at `target_compute`, its noise included."""
    rerun: tuple[float, float] = (math.nan, math.nan)
    """Interval of the mean curve there for another run of the recipe; older forecasts lack it."""
    band: Band | None = None
    fit: Mapping[str, Any] = field(default_factory=dict)
    """The fit behind it, as returned by `Fit.to_json`."""

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> FrozenForecast:
        """Read one parsed line of forecasts.jsonl."""
        fit = as_mapping(row.get("fit_json"))
        made = fit.get("forecast")
        first = made[0] if isinstance(made, list) and made else None  # the one for the target
        return cls(
            made_at_step=as_float(row.get("made_at_step")),
            axis=str(row.get("axis", "gpu_hours")),
            compute=as_float(row.get("compute")),
            target_compute=as_float(row.get("target_compute")),
            median=as_float(row.get("median")),
            prediction=pair(row.get("prediction")),
            rerun=pair(as_mapping(first).get("rerun")),
            band=_band(row.get("curve")),
            fit=fit,
        )

    @property
    def width(self) -> float:
        """Width of the prediction interval."""
        return self.prediction[1] - self.prediction[0]

    @property
    def share(self) -> float:
        """Share of the target compute that had been spent when the forecast was made."""
        return self.compute / self.target_compute if self.target_compute > 0 else math.nan

    @property
    def share_in_words(self) -> str:
        """`half of the compute`, or `24 % of the compute`."""
        share = "half" if abs(self.share - 0.5) < 0.03 else percent(self.share)
        return f"{share} of the compute"

    def covers(self, pass_rate: float) -> bool:
        """Whether `pass_rate` lies inside the prediction interval, its ends included."""
        return self.prediction[0] <= pass_rate <= self.prediction[1]

    @property
    def text(self) -> str:
        """The median and the prediction interval."""
        return f"{rate(self.median)} {rate_interval(self.prediction)}"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a forecast: the evaluation at its target, if the run has reached that."""

    measured: EvalPoint | None
    inside: bool | None
    """Whether the interval covered the measured pass rate; None without a measurement or an interval."""
    progress: float
    """Compute of the run's last evaluation, as a share of the target."""

    @property
    def word(self) -> str:
        """`inside`, `outside` or `not measured`."""
        return "not measured" if self.inside is None else ("inside" if self.inside else "outside")

    @property
    def text(self) -> str:
        """The measured pass rate and whether it lies inside; or the run's progress."""
        if self.measured is None:
            return f"not yet: the run is at {percent(self.progress)} of the forecast's compute"
        return f"{rate(self.measured.pass_rate)}: {self.word}"


def judge(run: RunRecord, forecast: FrozenForecast) -> Outcome:
    """Compare `forecast` with the evaluation nearest its target compute, if made after the forecast.

    Raises:
        InputError: the counters behind the forecast's axis are missing from the run.
    """
    if not run.evals or not forecast.target_compute > 0:
        return Outcome(None, None, math.nan)
    compute_N = run.compute(forecast.axis)
    nearest = int(np.argmin(np.abs(compute_N - forecast.target_compute)))
    progress = float(compute_N.max() / forecast.target_compute)
    off = abs(compute_N[nearest] / forecast.target_compute - 1)
    # A run may overshoot its budget by up to a step, which may be a tenth of a short run.
    if off > (REACHED if progress < 1 else 2 * REACHED) or compute_N[nearest] <= forecast.compute:
        return Outcome(None, None, progress)
    measured = run.evals[nearest]
    inside = forecast.covers(measured.pass_rate) if math.isfinite(forecast.width) else None
    return Outcome(measured, inside, progress)


def frozen_forecasts(run: RunRecord) -> list[FrozenForecast]:
    """Return all forecasts of a run, in the order in which they were made."""
    return [FrozenForecast.from_row(row) for row in run.forecasts]


def main_forecast(forecasts: list[FrozenForecast]) -> FrozenForecast | None:
    """Return the forecast that a report leads with: for the last target, that made nearest half of it."""
    usable = [forecast for forecast in forecasts if math.isfinite(forecast.share)]
    usable = [forecast for forecast in usable if forecast.target_compute == usable[-1].target_compute]
    return min(usable, key=lambda forecast: abs(forecast.share - 0.5), default=None)


def leading_forecast(run: RunRecord | None) -> FrozenForecast | None:
    """Return the `main_forecast` of a run; None for a table, which has none."""
    return main_forecast(frozen_forecasts(run)) if run is not None else None


def sentence(forecast: FrozenForecast, outcome: Outcome) -> str:
    """Return the result in one sentence, for pages and terminals."""
    verb = "measured" if outcome.measured else "not measured"
    result = f"{verb} {outcome.text.removeprefix('not ')}"
    text = f"Forecast at {forecast.share_in_words}: {forecast.text}; {result}."
    if misfit := misfit_in_words(forecast.fit.get("lack_of_fit")):
        text += f" No saturating curve described the run then: {misfit}."
    return text


def _band(curve: Any) -> Band | None:
    """Return the curve from a line, or from `freeze`; None unless it has four lists of equal length."""
    found = (as_mapping(curve).get(name) for name in ("compute", "median", "lo", "hi"))
    listed = [one if isinstance(one, list | np.ndarray) else () for one in found]
    columns = [np.array([as_float(value) for value in one]) for one in listed]
    return Band(*columns) if columns[0].size and len({column.size for column in columns}) == 1 else None
