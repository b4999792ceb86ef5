"""A run to be shown, with its fit, and groups of runs in one colour; N evaluations, M computes of a curve."""

import functools
import hashlib
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from scalerl.curve.points import Points
from scalerl.curve.posterior import Draws
from scalerl.curve.result import Fit
from scalerl.errors import CannotAnswerError, printable
from scalerl.forecast.compare import without_copies
from scalerl.quantiles import tails
from scalerl.record.reader import RunRecord
from scalerl.view.assets import without_folders
from scalerl.view.facts.fit_rows import own_budget
from scalerl.view.facts.frozen import Band, FrozenForecast, Outcome, judge, leading_forecast
from scalerl.view.facts.notices import part_that_holds

_DRAWS = 2048


@dataclass(frozen=True, eq=False)
class ShownRun:
    """A run, or a table, with its fit or the reason why there is none."""

    name: str
    """The displayed name, unique among the runs shown together."""
    points: Points = field(repr=False)
    """All of its evaluations, on the axis of the fit."""
    record: RunRecord | None = field(default=None, repr=False)
    """None for a table."""
    fit: Fit | None = field(default=None, repr=False)
    reason: str = ""
    """Why there is no `fit`, in words."""

    @property
    def used(self) -> Points:
        """The fitted evaluations; without a fit, all of them."""
        return self.points if self.fit is None else self.fit.points

    @property
    def compute(self) -> float:
        """Compute at the last evaluation, in the unit of the axis."""
        return float(self.points.compute_N.max(initial=0.0))

    @property
    def budget(self) -> float:
        """The run's own budget on its axis; NaN if not known."""
        return own_budget(self.record, self.points.axis)

    @property
    def key(self) -> str:
        """The key under which a browser stores its name: a hash, so that a page does not show the path."""
        own = self.record
        names = (self.name,) if own is None else (own.config.get("name"), own.task)
        path = Path(self.points.source if own is None else own.path)
        text = repr((str(path.absolute()), *names))
        return hashlib.blake2b(text.encode(errors="replace"), digest_size=8).hexdigest()

    @property
    def not_compared(self) -> str:
        """Why comparisons leave it out: it has no fit, or too few evaluations; empty if they do not."""
        return self.fit.too_few if self.fit is not None else self.reason

    @functools.cached_property
    def part(self) -> Fit | None:
        """The fit to the part that holds, for a run that no curve describes as a whole."""
        return part_that_holds(self.fit) if self.fit is not None else None

    @functools.cached_property
    def frozen(self) -> FrozenForecast | None:
        """The forecast that a report of it leads with, as it was frozen."""
        return leading_forecast(self.record)

    def outcome(self, forecast: FrozenForecast) -> Outcome:
        """Return the outcome of a forecast; unknown if a copy of the run lacks the counters of its axis."""
        if self.record is None or forecast.axis not in self.record.logged_axes():
            return Outcome(None, None, math.nan)
        return judge(self.record, forecast)

    @property
    def warnings_of_fit(self) -> tuple[str, ...]:
        """Warnings of reading and fitting it."""
        return self.points.warnings if self.fit is None else self.fit.warnings

    def fitted_with(self, **options: Any) -> Self:
        """Return the run with a fit to its evaluations, or with the reason why there is none.

        Raises:
            InputError: an option is not valid.
        """
        from scalerl.curve import fit

        try:
            return replace(self, fit=fit(self.points, **options), reason="")
        except CannotAnswerError as error:
            source = printable(Path(self.points.source).name)
            return replace(self, fit=None, reason=self.local(str(error)).removeprefix(f"{source}: "))

    def local(self, message: str) -> str:
        """Return a message without the folders of the run, as pages are read on other machines."""
        own = () if self.record is None else (self.record.path,)
        return without_folders(message, Path(self.points.source).parent, *own)


@dataclass(frozen=True, eq=False)
class RunGroup:
    """Runs of one recipe, or with one value of a key: one colour of a chart."""

    name: str
    runs: tuple[ShownRun, ...]
    draws: Draws | None = None
    """Draws of the mean curve; None for one run, without fits, or if no curve describes one of the runs."""

    @functools.cached_property
    def fits(self) -> list[Fit]:
        """The fits of its runs; of copies of one run, which are not seeds, only the longest."""
        return without_copies(run.fit for run in self.runs if run.fit is not None)

    @property
    def compute_N(self) -> np.ndarray:
        """All computes above 0 with an evaluation, sorted."""
        compute_N = np.concatenate([run.points.compute_N for run in self.runs])
        return np.unique(compute_N[compute_N > 0])

    def mean_curve(self, compute_M: np.ndarray, level: float) -> Band:
        """Return the mean curve and its interval; the group must have `draws`."""
        assert self.draws is not None
        curve_nM = self.draws.thinned(_DRAWS).curves_at(compute_M)
        return Band(compute_M, *np.quantile(curve_nM, [0.5, *tails(level)], axis=0))
