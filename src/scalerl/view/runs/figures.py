"""The curves of several runs as figures for papers and slides: SVG, PNG and PDF."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from scalerl.curve.families import Curve
from scalerl.errors import InputError
from scalerl.view.assets import writing
from scalerl.view.facts.frozen import Band
from scalerl.view.figures.overlay_figures import ArmCurve, Look, RunPoints, linearised_figure, overlay_figure
from scalerl.view.runs.gathered import RunsView
from scalerl.view.runs.overlay import OverlayRun, places_between, thin
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
    unit, names = view.unit, short_names([run.name for run in view.runs])
    most = max(_MOST_POINTS // len(view.runs), 6)
    curves = [
        _arm(run, names[run.name], view, most, run_look(place))
        for place, run in enumerate(view.runs)
        if (run.points.compute_N > 0).any()
    ]
    if (overlay := overlay_figure(curves, unit, view.budget, view.target)) is None:
        raise InputError("there is nothing to draw: no run has an evaluation after compute 0")
    lines = linearised_figure(curves, unit)
    return {"overlay": overlay} | ({"linearised": lines[0]} if lines else {})


def _arm(run: OverlayRun, name: str, view: RunsView, most: int, look: Look) -> ArmCurve:
    """A run as a recipe of one; it is drawn up to the budget, or its last evaluation."""
    unit, known = view.unit, math.inf
    order_N = np.argsort(run.points.compute_N, kind="stable")
    chosen = order_N[thin(run.points.pass_rate_N[order_N], most)]
    compute_N, fit = run.points.compute_N[chosen], run.fit
    band = curve = None
    if fit is not None and fit.misfit is None:
        positive_N = fit.points.compute_N[fit.points.compute_N > 0]
        known = float(positive_N.max())
        compute_M = places_between(positive_N, max(known, view.budget or 0.0))
        band = Band(compute_M / unit.size, *fit.band(compute_M))
        own = fit.curve
        curve = Curve(own.family, own.A, own.B, own.C_mid / unit.size, own.R_0)
    points = RunPoints(compute_N / unit.size, run.points.pass_rate_N[chosen], curve)
    return ArmCurve(name, False, (points,), band, look, known=known / unit.size)
