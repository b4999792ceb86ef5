"""The parameters of recipes as a small LaTeX table, to be pasted into a paper."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from scalerl.curve.quantiles import Interval
from scalerl.view.formats import latex_text
from scalerl.view.numbers import unit_for

if TYPE_CHECKING:
    from scalerl.curve import Fit

Value = tuple[float, Interval] | None
"""The median of a fit with its credible interval; None where it is withheld."""


@dataclass(frozen=True)
class _Quantity:
    header: str
    value: Callable[[Fit], Value]
    shown: Callable[[float], str]


def latex(fits: Mapping[str, Fit | Sequence[Fit]], at: float | None = None) -> str:
    """Return a table with booktabs: a row for every recipe, with A, B, C_mid and the mean curve at `at`.

    One run has its posterior median and credible interval, several (seeds) have the mean of the medians and
    their standard deviation. A ceiling is marked where the runs do not identify it, and withheld where no
    saturating curve describes them. Numbers are in math mode; the preamble needs booktabs.

    Args:
        fits: a fit, or the fits of the seeds, by the name of the recipe; all on one axis.
        at: a compute in the unit of the axis, for the last column.

    Raises:
        InputError: `at` is negative or not finite.
    """
    recipes = {name: list(own) if isinstance(own, Sequence) else [own] for name, own in fits.items()}
    every = [fit for own in recipes.values() for fit in own]
    unit = unit_for(every[0].axis, max(at or 0.0, *(fit.median.C_mid for fit in every)))
    columns = [
        _Quantity("$A$", lambda fit: None if fit.misfit else (fit.median.A, fit.intervals.A), _share),
        _Quantity("$B$", lambda fit: (fit.median.B, fit.intervals.B), _amount),
        _Quantity(
            f"$C_\\mathrm{{mid}}$ ({latex_text(unit.name)})", lambda fit: _mid(fit, unit.size), _amount
        ),
    ]
    if at is not None:
        shown = f"at ${_amount(at / unit.size)}$ {latex_text(unit.name)}"
        columns.append(_Quantity(shown, lambda fit: _mean_curve(fit, at), _share))
    lines = [
        "\\begin{table}",
        "\\centering",
        f"\\caption{{{_caption(list(recipes.values()))}}}",
        f"\\begin{{tabular}}{{l{'c' * len(columns)}}}",
        "\\toprule",
        " & ".join(["recipe", *(column.header for column in columns)]) + " \\\\",
        "\\midrule",
        *(" & ".join(_row(name, own, columns)) + " \\\\" for name, own in recipes.items()),
        "\\bottomrule",
        "\\end{tabular}",
        "\\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _mid(fit: Fit, size: float) -> Value:
    low, high = fit.intervals.C_mid
    return fit.median.C_mid / size, (low / size, high / size)


def _mean_curve(fit: Fit, compute: float) -> Value:
    found = fit.forecast(compute)
    return found.median, found.interval


def _row(name: str, own: Sequence[Fit], columns: Sequence[_Quantity]) -> list[str]:
    doubt = any(not fit.misfit and not fit.identified for fit in own)
    cells = [_cell(own, column, "^\\ast" if doubt and not n else "") for n, column in enumerate(columns)]
    return [latex_text(name) + (f" ({len(own)} seeds)" if len(own) > 1 else ""), *cells]


def _cell(own: Sequence[Fit], column: _Quantity, mark: str) -> str:
    """Return a median with its interval, or mean and standard deviation of several."""
    values, shown = [value for fit in own if (value := column.value(fit)) is not None], column.shown
    if not values:
        return "--"
    median, (low, high) = values[0]
    if len(values) == 1:
        return f"${shown(median)}{mark}$ $[{shown(low)}, {shown(high)}]$"
    median_N = np.array([value for value, _ in values])
    return f"${shown(median_N.mean())} \\pm {shown(median_N.std(ddof=1))}{mark}$"


def _caption(recipes: Sequence[Sequence[Fit]]) -> str:
    """Return one line that says what the cells are."""
    level = recipes[0][0].intervals.level
    single = f"posterior median and ${100 * level:.3g}\\,\\%$ credible interval"
    several = "mean and standard deviation of the seeds' medians"
    kinds = {len(own) > 1 for own in recipes}
    what = single if kinds == {False} else several if kinds == {True} else f"{single}, or {several}"
    every = [fit for own in recipes for fit in own]
    open_ones = any(not fit.misfit and not fit.identified for fit in every)
    star = "; $\\ast$ the data do not identify the ceiling" if open_ones else ""
    return f"{what[0].upper()}{what[1:]}{star}."


def _share(value: float) -> str:
    return f"{value:.3f}"


def _amount(value: float) -> str:
    """Return three significant digits, or all of a larger whole number, without powers of ten."""
    if not math.isfinite(value):
        return "\\infty"
    digits = 2 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{max(digits, 0)}f}"
