"""Forecasts inside a training loop: evaluations are added one by one, and fitted for a forecast.

forecaster = Forecaster(axis="gpu_hours")
forecaster.add(compute, pass_rate)              after every evaluation; computes nothing
print(forecaster.line(12_000))                  fits the evaluations so far
"""

import sys
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Literal, TextIO

import numpy as np

from scalerl.curve.answers import Forecast, span
from scalerl.curve.fit import fit
from scalerl.curve.points import Points
from scalerl.curve.result import Fit
from scalerl.curve.sample import MIN_TO_FIT
from scalerl.errors import CannotAnswerError, InputError
from scalerl.numbers import amount_text


class Forecaster:
    """The evaluations of a run so far, and their fit: exactly what `fit` returns for the same points.

    A fit is made when it is first used, and kept until the next evaluation. It takes tens of milliseconds. It
    does not start from the previous fit, so that no answer depends on when forecasts were made.
    """

    def __init__(
        self,
        *,
        axis: str = "compute",
        level: float = 0.95,
        r0: float | Literal["free"] | None = None,
        min_compute: float = 0.0,
        source: str = "run",
        points: Points | None = None,
    ) -> None:
        """Take the arguments of `fit`; `axis` names the unit of compute, and `source` the run in errors.

        `points` are evaluations to start from, with their own axis and source.
        """
        self._options: dict[str, Any] = {"r0": r0, "min_compute": min_compute, "level": level}
        none = np.empty(0)
        if points is None:
            # With a column of steps, though empty: one that is None would stay None.
            points = Points.from_arrays(none, none, step=none, source=source, axis=axis)
        self._points = points
        self._fit: Fit | None = None

    def __len__(self) -> int:
        return len(self._points)

    @property
    def points(self) -> Points:
        """The evaluations so far, in the order in which they came."""
        return self._points

    @property
    def fit(self) -> Fit:
        """The fit of the evaluations so far.

        Raises:
            InputError: an option is not valid.
            CannotAnswerError: as for `fit`.
        """
        if self._fit is None:
            self._fit = fit(self._points, **self._options)
        return self._fit

    def add(
        self,
        compute: float,
        pass_rate: float,
        noise_sd: float | None = None,
        step: float | None = None,
        samples: float | None = None,
    ) -> None:
        """Add one evaluation.

        Args:
            compute: cumulative, in the unit of the axis; 0 before any training.
            pass_rate: mean over the held-out prompts, in [0, 1].
            noise_sd: sampling noise of the pass rate, where it is known.
            step: trainer step; of use if every evaluation has one.
            samples: completions behind the pass rate, all prompts together.

        Raises:
            InputError: a value is not a number, or out of range; then nothing is added.
        """
        source = self._points.source
        try:
            new = Points.from_arrays(
                [compute],
                [pass_rate],
                noise_sd=None if noise_sd is None else [noise_sd],
                samples=None if samples is None else [samples],
                step=None if step is None else [step],
                source=source,
                axis=self._points.axis,
            )
        except (InputError, TypeError, ValueError) as error:
            # `Points` numbers the point of its own arrays, which is 1 here always.
            head, _, reason = str(error).partition(": ")
            what = reason if reason and head.startswith(source) else error
            raise InputError(f"{source}, evaluation {len(self) + 1}: {what}") from None
        joined: dict[str, Any] = {}
        for name in (f.name for f in fields(Points) if f.name.endswith("_N")):
            column, value = getattr(self._points, name), getattr(new, name)
            # A column that one evaluation lacks is of no use to the others.
            joined[name] = None if column is None or value is None else np.append(column, value)
        # Replaced at the end, so that an evaluation that is refused has changed nothing.
        self._points = replace(self._points, **joined)
        self._fit = None

    def forecast(self, compute: float) -> Forecast:
        """Forecast at `compute`, as `Fit.forecast`.

        Raises:
            InputError: `compute` is negative or not finite.
            CannotAnswerError: as for `fit`.
        """
        return self.fit.forecast(compute)

    def line(self, end: float) -> str:
        """Return the forecast of the end of the run, at compute `end`, in one line; or why there is none."""
        try:
            return forecast_line(self._points, self.fit, "", end)
        except CannotAnswerError as error:
            return forecast_line(self._points, None, str(error), end)

    def callback(self, end: float, file: TextIO | None = None) -> Callable[..., None]:
        """Return a function for a training loop: it takes what `add` takes, and prints `line(end)`.

        It prints to standard error by default, and raises what `add` raises.
        """

        def evaluated(compute: float, pass_rate: float, **known: float) -> None:
            self.add(compute, pass_rate, **known)
            print(self.line(end), file=file or sys.stderr, flush=True)

        return evaluated


def forecast_line(
    points: Points, found: Fit | None, reason: str, end: float, where: str = "of the end"
) -> str:
    """Return the forecast at compute `end`, `where` in words, in one line; or why there is none yet."""
    if found is None:
        distinct = len(np.unique(points.compute_N))
        if distinct < MIN_TO_FIT:
            return f"too early: {distinct} of {MIN_TO_FIT} evaluations"
        return f"no forecast: {reason.removeprefix(f'{points.source}: ')}"
    forecast = found.forecast(end)
    # `yet` would promise what more compute cannot bring to a run whose last evaluations are NaN.
    ceiling = "ceiling not identified" if found.reservation else "ceiling not identified yet"
    if found.identified:
        ceiling = f"ceiling {found.ceiling:.3f} {span(found.intervals.A)}"
    if found.misfit:
        ceiling = f"no curve describes the run: {found.lack_of_fit}"
    reservation = f"{found.reservation}; " * bool(found.reservation)
    at = amount_text(points.axis, end)
    made = f"forecast {where} ({at}): {forecast.median:.3f} {span(forecast.prediction)}"
    return f"{reservation}{made}; {ceiling}"
