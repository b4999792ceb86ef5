"""The parameters of recipes as a small LaTeX table, to be pasted into a paper."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from scalerl.view import formats
from scalerl.view.numbers import percent, unit_for
from scalerl.view.table import (
    Cell,
    Estimate,
    Row,
    Table,
    TableColumn,
    amount_cell,
    rate_cell,
    spread_keys,
    words,
)

if TYPE_CHECKING:
    from scalerl.curve import Fit


def latex(fits: Mapping[str, Fit | Sequence[Fit]], at: float | None = None) -> str:
    """Return a table with booktabs: a row for every recipe, with A, B, C_mid and the mean curve at `at`.

    One run has its posterior median and credible interval, several (seeds) have the mean of the medians and
    their standard deviation. A ceiling has a star where the runs do not identify it, and is withheld where no
    saturating curve describes them. The preamble needs booktabs.

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
        TableColumn("recipe", ("recipe",), prose=True),
        TableColumn("A", spread_keys("A")),
        TableColumn("B", spread_keys("B")),
        TableColumn(f"C_mid ({unit.name})", spread_keys("C_mid")),
    ]
    if at is not None:
        columns.append(TableColumn(f"at {unit.show(at)}", spread_keys("pass_rate")))
    rows = []
    for name, own in recipes.items():
        sound = [fit for fit in own if fit.misfit is None]
        star = "" if all(fit.identified for fit in sound) else "*"
        cells = [
            words(f"{name} ({len(own)} seeds)" if len(own) > 1 else name),
            _cell([Estimate(fit.median.A, fit.intervals.A) for fit in sound], rate_cell, star),
            _cell([Estimate(fit.median.B, fit.intervals.B) for fit in own], amount_cell),
            _cell(
                [Estimate(fit.median.C_mid, fit.intervals.C_mid) for fit in own],
                lambda one: amount_cell(one, unit),
            ),
        ]
        if at is not None:
            found = [fit.forecast(at) for fit in own]
            cells.append(_cell([Estimate(one.median, one.interval) for one in found], rate_cell))
        rows.append(Row(tuple(cells)))
    level = percent(every[0].intervals.level)
    note = (
        f"One run: posterior median and {level} credible interval; seeds: mean and standard deviation of "
        "their medians. *: the data do not identify the ceiling."
    )
    return formats.latex(Table("recipes", "Parameters of the curves", tuple(columns), tuple(rows), note))


def _cell(found: Sequence[Estimate], cell: Callable[[Estimate | None], Cell], mark: str = "") -> Cell:
    """The median of one run with its interval, or mean and standard deviation of several."""
    if len(found) < 2:
        one = cell(found[0] if found else None)
        return replace(one, text=f"{one.text}{mark if found else ''}")
    median_N = np.array([one.median for one in found])
    mean, sd = (cell(Estimate(x, (math.nan, math.nan))).text for x in (median_N.mean(), median_N.std(ddof=1)))
    return Cell(f"{mean} ± {sd}{mark}", (float(median_N.mean()), None, None))
