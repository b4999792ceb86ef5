"""The answer of a fit, as it is printed, drawn and written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from scalerl._views import views
from scalerl.curve.answers import span
from scalerl.curve.families import Curve
from scalerl.curve.fitted import FittedCurve
from scalerl.frames import data_frame
from scalerl.numbers import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, eq=False)
class Fit(FittedCurve):
    """A fitted compute-performance curve, and what the data say of it. Made by `fit`."""

    campaign: Fit | None = field(default=None, repr=False)
    """The same fit with the prior of sibling runs, if they were given."""

    @property
    def least_squares(self) -> str:
        """The paper's point estimate in one line, to stand apart from the intervals."""
        curve, ceiling = self.paper_curve, "withheld" if self.misfit else f"{self.paper_curve.A:.3f}"
        return f"A {ceiling}  B {curve.B:.3g}  C_mid {curve.C_mid:.4g}  rmse {self.rmse:.2g}"

    def to_json(
        self, at: Sequence[float] = (), target: float | None = None, budget: float | None = None
    ) -> dict[str, Any]:
        """Return the object that `scalerl fit --json` prints (docs/reference/json.md lists its keys).

        A value that is not computed, or withheld because no family describes the run, is None.
        """

        # The least-squares A too: beside a withheld ceiling, a number would be read as the ceiling.
        def withheld(*names: str) -> dict[str, None]:
            return dict.fromkeys(names) if self.misfit else {}

        def curve(found: Curve, rss: dict[str, float]) -> dict[str, Any]:
            parameters = {"A": found.A, "B": found.B, "C_mid": found.C_mid, "R_0": found.R_0}
            return {"family": found.family.name} | parameters | rss | withheld("A")

        intervals = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self.intervals).items()}
        changed = self.misfit or self.suspected
        return {
            "metric": self.metric.to_json(),
            "points": self.n_points,
            "axis": self.axis,
            "min_compute": self.min_compute,
            "max_compute": _finite(self.max_compute),
            "r0": {"value": self.r0_value, "source": self.r0_source},
            "fit": curve(self.paper_curve, {"rmse": self.rmse}),
            "basins": [curve(found, {"rss": rss}) for found, rss in self.basins],
            "intervals": intervals | withheld("A", "A_given_family"),
            "median": asdict(self.median) | withheld("A", "A_given_family"),
            "families": dict(self.families),
            "prior": self.prior,
            "noise": asdict(self.noise) | {"floor": _finite(self.noise.floor)},
            "identified": self.identified,
            "why": self.why,
            "c_max_over_c_mid": self.c_max_over_c_mid,
            "c_max_over_c_mid_interval": list(self.identification.ratio_interval),
            "at_bounds": dict(self.identification.at_bounds),
            "compute_to_identify": None if self.misfit else self.compute_to_identify,
            "lack_of_fit": self.lack_of_fit,
            "suspected": self.suspected.kind if self.suspected else None,
            "part_that_holds": list(changed.keep) if changed and changed.keep else None,
            "forecast": [self.forecast(compute).to_json() for compute in at],
            "target": None if target is None or budget is None else self._target(target, budget),
            "campaign": self.campaign.to_json(at, target, budget) if self.campaign else None,
            "left_out": self.left_out.to_json(),
            "warnings": list(self.warnings),
        }

    def _target(self, target: float, budget: float) -> dict[str, Any]:
        reached = [_finite(compute) for compute in self.compute_to(target)]
        asked = {"reward": float(target), "budget": float(budget), "compute_to_target": reached}
        chance = asdict(self.chance(target, budget))
        del chance["withheld"]  # `lack_of_fit`, `metric` and `left_out` say it
        return asked | chance

    def plot(
        self,
        ax: Axes | None = None,
        *,
        log: bool = False,
        color: str | None = None,
        label: str | None = None,
        ceiling: bool = True,
        forecast: float | str | Sequence[float | str] = (),
        legend: bool = True,
    ) -> Axes:
        """Draw the evaluations, the curve with its interval, and the ceiling: see `scalerl.plot`.

        Returns:
            The axes: those given, or those of a new pyplot figure. Their compute is in the unit of the fit's
            axis, so that more can be drawn there, such as other fits.

        Raises:
            InputError: a compute of `forecast` is negative or not finite.
        """
        options = {"color": color, "label": label, "ceiling": ceiling, "forecast": forecast}
        return views().plot(self, log=log, ax=ax, legend=legend, **options)

    def to_dict(self) -> dict[str, Any]:
        """Return the parameters as one flat row: `pandas.DataFrame([fit.to_dict() for fit in fits])`.

        Keys: `A`, `B`, `C_mid` (posterior medians; A is None where it is withheld), each with `_low` and
        `_high` at `level`; `R_0`; `identified`; `axis`, `max_compute_seen`, `points`, `metric`. `to_json` has
        everything.
        """
        row: dict[str, Any] = {}
        for name in ("A", "B", "C_mid"):
            low, high = getattr(self.intervals, name)
            found = [None] * 3 if name == "A" and self.misfit else [getattr(self.median, name), low, high]
            row |= dict(zip((name, f"{name}_low", f"{name}_high"), found, strict=True))
        row |= {"R_0": self.r0_value, "level": self.intervals.level, "identified": self.identified}
        row |= {"axis": self.axis, "max_compute_seen": float(self.points.compute_N.max())}
        return row | {"points": self.n_points, "metric": self.metric.name}

    def to_frame(self) -> Any:
        """Make a `pandas.DataFrame` with a row for every evaluation, by compute.

        Columns: the compute (named by the axis), `pass_rate`, `noise_sd`, whether it was `fitted`, and the
        `median` of the curve there with its interval, `low` and `high`.

        Raises:
            InputError: pandas is not installed.
        """

        def column(name: str) -> np.ndarray:
            return np.concatenate([getattr(self.points, name), getattr(self.excluded, name)])

        order_N = np.argsort(column("compute_N"), kind="stable")
        compute_N = column("compute_N")[order_N]
        median_N, low_N, high_N = self.band(compute_N)
        columns = {self.axis: compute_N, "pass_rate": column("pass_rate_N")[order_N]}
        columns |= {"noise_sd": column("noise_sd_N")[order_N], "fitted": order_N < self.n_points}
        return data_frame(columns | {"median": median_N, "low": low_N, "high": high_N})

    def to_latex(self, name: str = "run", at: float | None = None) -> str:
        """Return a small table for a paper: A, B, C_mid and, with `at`, the forecast there; see `latex`.

        Raises:
            InputError: `at` is negative or not finite.
        """
        return views().latex({name: self}, at)

    def _repr_html_(self) -> str:
        return views().fit_html(self)

    def __str__(self) -> str:
        median, intervals, own = self.median, self.intervals, self.paper_curve.family
        state = "identified" if self.identified else "not identified"
        ceiling = "withheld"
        if not self.misfit:
            ceiling = f"{median.A:.3f}  {percent(intervals.level)} {span(intervals.A)}"
        return (
            f"{self.metric}\n"
            f"A {ceiling}, {state}: {self.why}\n"
            f"B {median.B:.3g}  {span(intervals.B, '.3g')}   "
            f"C_mid {median.C_mid:.4g}  {span(intervals.C_mid, '.4g')}   given {own.label}\n"
            f"least squares (paper)  {self.least_squares}  ({self.n_points} points on {self.axis})"
        )


def _finite(value: float) -> float | None:
    # JSON has neither infinity nor NaN.
    return value if math.isfinite(value) else None
