"""The curves of several runs as figures for papers and slides: SVG, PNG and PDF."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from scalerl.errors import InputError
from scalerl.view.assets import writing
from scalerl.view.facts.frozen import Band
from scalerl.view.figures.overlay_figures import ArmCurve, RunPoints, linearised_figure, overlay_figure
from scalerl.view.numbers import Unit
from scalerl.view.runs.gathered import RunsView
from scalerl.view.runs.groups import RunGroup
from scalerl.view.runs.overlay import places_between, thin
from scalerl.view.runs.run import OverlayRun
from scalerl.view.style import FIGURES, run_look, save_figure, short_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_POINTS = 2400
"""Evaluations that are drawn in one figure, all runs together; more are thinned."""


def write_figures(view: RunsView, path: Path) -> list[Path]:
    """Write the overlay to the file `path`, or overlay and linearised curves in all formats to a folder.

    Raises:
        InputError: no run has an evaluation after compute 0.
        WriteError: the disk does not take a file.
    """
    made = runs_figures(view)
    if path.suffix in FIGURES:
        return [save_figure(made["overlay"], path)]
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
    return [
        save_figure(figure, path / f"{name}{ending}") for name, figure in made.items() for ending in FIGURES
    ]


def runs_figures(view: RunsView) -> dict[str, Figure]:
    """The figures by name: the overlay, and the linearised curves where a run has one.

    Raises:
        InputError: no run has an evaluation after compute 0.
    """
    unit = view.unit
    groups = view.recipe_groups
    curves = arm_curves(groups, unit, view.budget or 0.0, view.level, looks=True)
    if (overlay := overlay_figure(curves, unit, view.budget, view.target)) is None:
        raise InputError("there is nothing to draw: no run has an evaluation after compute 0")
    lines = linearised_figure(curves, unit)
    return {"overlay": overlay} | ({"linearised": lines[0]} if lines else {})


def arm_curves(
    groups: Sequence[RunGroup], unit: Unit, end: float, level: float, looks: bool = False, base: str = ""
) -> list[ArmCurve]:
    """Return groups of runs as they are drawn, up to `end` or as far as they reach, with compute in `unit`.

    With `looks` each has the look that the chart of a page gives it.
    """
    names = short_names([group.name for group in groups])
    most = max(_MOST_POINTS // max(sum(len(group.runs) for group in groups), 1), 6)
    found = []
    for place, group in enumerate(groups):
        if not group.compute_N.size:
            continue
        known, band = float(group.compute_N[-1]), None
        compute_M = places_between(group.compute_N, max(known, end))
        sound = [fit for fit in group.fits if fit.misfit is None]
        if group.draws is not None:
            band = group.band(compute_M, level)
        elif len(group.runs) == 1 and sound:
            compute_M = places_between(
                sound[0].points.compute_N[sound[0].points.compute_N > 0], max(known, end)
            )
            band = Band(compute_M, *sound[0].band(compute_M))
        if band is not None:
            band = replace(band, compute_M=band.compute_M / unit.size)
        runs = tuple(_points(run, unit, most) for run in group.runs)
        look = run_look(place) if looks else None
        found.append(
            ArmCurve(names[group.name], group.name == base, runs, band, look, known=known / unit.size)
        )
    return found


def _points(run: OverlayRun, unit: Unit, most: int) -> RunPoints:
    order_N = np.argsort(run.points.compute_N, kind="stable")
    chosen = order_N[thin(run.points.pass_rate_N[order_N], most)]
    curve = None
    if run.fit is not None and run.fit.misfit is None:
        own = run.fit.paper_curve
        curve = replace(own, C_mid=own.C_mid / unit.size)
    return RunPoints(run.points.compute_N[chosen] / unit.size, run.points.pass_rate_N[chosen], curve)
