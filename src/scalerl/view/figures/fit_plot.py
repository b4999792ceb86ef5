"""A fit on axes of matplotlib, drawn as the page draws it: what `Fit.plot` and a notebook show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from scalerl.view.facts.curve_view import CurveView, fit_view
from scalerl.view.facts.frozen import Band
from scalerl.view.figures.curve_figure import (
    draw_change,
    draw_curve,
    draw_evaluations,
    draw_intervals,
    draw_levels,
    finish_linear,
    limits,
    sign,
)
from scalerl.view.numbers import plain, unit_for
from scalerl.view.style import CEILING, FORECAST, MUTED, inline_svg, new_figure, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

    from scalerl.curve import Fit, Forecast

_SIZE = (6.4, 4.0)


def plot_fit(fit: Fit, ax: Axes | None = None, at: float | Sequence[float] = ()) -> Axes:
    """`Fit.plot`: see there."""
    asked = [fit.forecast(compute) for compute in np.atleast_1d(np.asarray(at, dtype=object)).ravel()]
    with style():
        if ax is None:
            import matplotlib.pyplot as plt

            _, ax = plt.subplots(figsize=_SIZE, layout="constrained")
        _draw(ax, fit, asked)
    return ax


def fit_svg(fit: Fit) -> str:
    """The same as an `<svg>` element, its colours as they are."""
    with style():
        figure = new_figure(*_SIZE)
        figure.subplots_adjust(left=0.09, right=0.985, bottom=0.125, top=0.98)
        _draw(figure.add_subplot(), fit, [])
    described = f"Pass rate against {fit.axis}, {fit.n_points} evaluations"
    return inline_svg(figure, "fit", described, themed=False)


def _draw(axes: Axes, fit: Fit, asked: Sequence[Forecast]) -> None:
    before = (axes.get_xlim(), axes.get_ylim()) if axes.has_data() else None
    view = fit_view(fit, max((forecast.compute for forecast in asked), default=0.0))
    view = replace(view, band=_from_zero(fit, view.band))
    draw_curve(axes, view)
    draw_evaluations(axes, view, 3.8)
    draw_levels(axes, view)
    if view.change:
        draw_change(axes, view.change)
    entries = [*_ceiling(axes, view), *_excluded(axes, fit), *_forecasts(axes, asked)]
    finish_linear(axes, view, entries)
    _in_words(axes, fit, view)
    low, high = limits(view)
    ends = [end for forecast in asked for end in forecast.prediction]
    axes.set_ylim(min([low, *(end - 0.02 for end in ends)]), max([high, *(end + 0.02 for end in ends)]))
    if before:  # what was drawn there already stays in sight
        (left, right), (bottom, top) = before
        axes.set_xlim(min(left, axes.get_xlim()[0]), max(right, axes.get_xlim()[1]))
        axes.set_ylim(min(bottom, axes.get_ylim()[0]), max(top, axes.get_ylim()[1]))


def _from_zero(fit: Fit, band: Band | None) -> Band | None:
    """The curve from the evaluation before any training on, where there is one: this axis is linear."""
    if band is None or fit.points.compute_N[0] > 0:
        return band
    columns = (np.zeros(1), *fit.band(np.zeros(1)))
    there = (band.compute_M, band.median_M, band.lo_M, band.hi_M)
    return Band(*(np.append(start, rest) for start, rest in zip(columns, there, strict=True)))


def _ceiling(axes: Axes, view: CurveView) -> list[tuple[Line2D, str]]:
    """The interval of the ceiling, behind all."""
    low, high = view.ceilings[-1].interval if view.ceilings else (math.nan, math.nan)
    if not math.isfinite(low + high):
        return []
    axes.axhspan(low, high, color=CEILING, alpha=0.1, lw=0, zorder=0)
    return [(sign(CEILING, lw=6, alpha=0.25), "interval of the ceiling")]


def _excluded(axes: Axes, fit: Fit) -> list[tuple[Line2D, str]]:
    """The evaluations that were not fitted."""
    if not len(fit.excluded):
        return []
    axes.plot(fit.excluded.compute_N, fit.excluded.pass_rate_N, "o", ms=3.8, mfc="none", mec=MUTED)
    return [(sign(MUTED, marker="o", mfc="none"), "evaluation left out")]


def _forecasts(axes: Axes, asked: Sequence[Forecast]) -> list[tuple[Line2D, str]]:
    """The interval of one evaluation at every compute that was asked for."""
    if not asked:
        return []
    draw_intervals(axes, [one.compute for one in asked], [one.prediction for one in asked])
    return [(sign(FORECAST, marker="_", ms=8, mew=1.6), "interval, one evaluation")]


def _in_words(axes: Axes, fit: Fit, view: CurveView) -> None:
    """Ticks in a unit that keeps them short, on axes whose data stay in the unit of the fit."""
    from matplotlib.ticker import FuncFormatter

    unit = unit_for(fit.axis, float(axes.get_xlim()[1]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plain(round(value / unit.size, 9))))
    axes.set_xlabel(f"training compute ({unit.name})")
