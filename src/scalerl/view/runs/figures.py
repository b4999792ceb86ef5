"""Figures of runs for papers and slides, as SVG, PNG and PDF, each drawn by `scalerl.view.plotting`.

The figure of one run, recipes over one another, and the paper's linearised plot:

    F = C_mid^B / ((A - R_0) / (R_C - R_0) - 1)        log F against log C has slope B (arXiv 2510.13786)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scalerl.curve.families import Curve
from scalerl.curve.points import Points
from scalerl.curve.result import Fit
from scalerl.errors import InputError, counted
from scalerl.files import writing
from scalerl.forecast.paper import linearised
from scalerl.numbers import Unit, as_float, as_mapping, plain, rate, unit_for
from scalerl.view.facts.facts import known_ceiling
from scalerl.view.facts.frozen import FrozenForecast
from scalerl.view.facts.notices import ceiling_text
from scalerl.view.facts.sampled import places_between
from scalerl.view.facts.shown import RunGroup, ShownRun
from scalerl.view.plotting import RATE, DrawnCurve, draw, draw_interval, key_of
from scalerl.view.runs.gathered import RunsView
from scalerl.view.style import (
    CEILING,
    FIGURES,
    MUTED,
    WINDOW,
    new_figure,
    plain_rates,
    run_look,
    save_figure,
    short_names,
    style,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_POINTS = 2400
"""Most evaluations drawn in one figure, of all runs together; more are thinned."""
_APART, _MOST_PANELS, _COLUMNS = 6, 24, 4
"""Most curves in one frame; most panels, each with one curve beside the first; and panels in a row."""
_LARGEST_LOG = 600.0
_F = "F = C_mid^B / ((A − R_0) / (R_C − R_0) − 1)\nR_C: pass rate at compute C; B by least squares"
_DECADES = 0.7
"""Decades that the linearised plot extends beyond its lines, as evaluations near A scatter without bound."""


def run_figure(
    run: ShownRun,
    frozen: FrozenForecast | None = None,
    budget: float | None = None,
    target: float | None = None,
) -> Figure:
    """Return the figure of a run on a linear and a logarithmic axis, with a budget and a target marked.

    With `frozen`, a forecast on the axis of the run, the stored curve and band of the forecast are drawn.
    """
    points, fit = run.points, run.fit
    if frozen is not None and frozen.axis != points.axis:
        frozen = None
    reach = points.compute_N.max(initial=0.0), frozen.target_compute if frozen else 0.0, budget or 0.0
    end = float(np.nanmax(reach)) or 1.0
    name = "fitted curve" if fit is not None and fit.misfit is None else "evaluations"
    if frozen is not None:
        step = frozen.made_at_step
        name = f"forecast, frozen at step {step:.0f}" if math.isfinite(step) else "forecast, as frozen"
    compute_N = np.sort(points.compute_N)
    one = DrawnCurve(
        name,
        (run,),
        look=run_look(0),
        compute_M=places_between(compute_N, end) if (compute_N > 0).any() else np.empty(0),
        band=frozen.band if frozen else None,
        cut=frozen.compute if frozen else math.inf,
        most=_MOST_POINTS,
    )
    A, about = _ceiling(run, frozen)
    known = known_ceiling(run.record)
    levels = [
        (A, f"ceiling A {about}", CEILING, (0, (6, 3))),
        (known, f"ceiling known beforehand {rate(known)}", MUTED, (0, (1, 1.6))),
    ]
    unit = unit_for(points.axis, end)
    with style():
        figure = new_figure(10.0, 3.9)
        linear, log = figure.subplots(1, 2, sharey=True, width_ratios=[5.6, 3.2])
        for axes in (linear, log):
            if frozen is not None:
                axes.axvspan(0, frozen.compute, color=WINDOW, lw=0, zorder=0)
            draw(axes, one, ceiling=False)
            if frozen is not None and math.isfinite(frozen.width):
                draw_interval(axes, one, frozen.target_compute, frozen.prediction)
            for height, text, colour, dashes in levels:
                if math.isfinite(height):
                    axes.axhline(height, color=colour, lw=1.1, ls=dashes, zorder=1, label=text)
            _mark(axes, unit, budget, target)
        _compute_axis(linear, unit, (-0.015 * end, 1.03 * end))
        if (positive_N := compute_N[compute_N > 0]).size:
            _compute_axis(log, unit, (positive_N[0] / 1.3, end * 1.15), log=True)
        plain_rates(linear)
        about = f"training compute ({unit.name}; right: logarithmic)"
        later = "evaluation made later" if frozen else "evaluation after the cut"
        _finish(figure, key_of(linear, later), about, RATE)
    return figure


def _ceiling(run: ShownRun, frozen: FrozenForecast | None) -> tuple[float, str]:
    """Return the median of A (NaN if withheld), and in words its interval and its basis."""
    sound = run.part or (run.fit if run.fit is not None and run.fit.misfit is None else None)
    if sound is not None:
        return sound.median.A, f"{ceiling_text(sound.to_json())}{' (part fitted)' if run.part else ''}"
    then = frozen.fit if frozen and run.fit is None else {}
    return as_float(as_mapping(then.get("median")).get("A")), f"{ceiling_text(then)} (as frozen)"


def write_figures(view: RunsView, path: Path) -> list[Path]:
    """Write the first of `runs_figures` to the file `path`, or all of them in all formats to a folder.

    Raises:
        InputError: the format of `path` is unknown, or no run has an evaluation after compute 0.
        WriteError: a file cannot be written.
    """
    if path.suffix and not path.is_dir():
        return [save_figure(next(iter(runs_figures(view).values())), path)]
    made = runs_figures(view)
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
    return [
        save_figure(figure, path / f"{name}{ending}") for name, figure in made.items() for ending in FIGURES
    ]


def runs_figures(view: RunsView) -> dict[str, Figure]:
    """Return the figures by name: the run, or runs in one frame; and the linearised curves if there are any.

    Raises:
        InputError: no run has an evaluation after compute 0.
    """
    curves = drawn_groups(view.recipe_groups, view.budget or 0.0, view.level)
    if len(view.runs) == 1:
        (run,) = view.runs
        # As in the sentence of the page, a new question is answered by the fit, not by the frozen forecast.
        anew = view.budget is not None or view.target is not None or view.max_compute < math.inf
        frozen = None if anew else run.frozen
        first = {"run": run_figure(run, frozen, view.budget, view.target)}
    elif curves:
        first = {"overlay": framed(curves, view.unit, view.budget, view.target)}
    else:
        raise InputError("there is nothing to draw: no run has an evaluation after compute 0")
    lines = linearised_figure(curves, view.unit)
    return first | ({"linearised": lines[0]} if lines else {})


def drawn_groups(groups: Sequence[RunGroup], end: float, level: float) -> list[DrawnCurve]:
    """Return groups of runs as drawn curves, up to `end` or as far as the runs reach."""
    names = short_names([group.name for group in groups])
    most = max(_MOST_POINTS // max(sum(len(group.runs) for group in groups), 1), 6)
    found = []
    for place, group in enumerate(groups):
        if not group.compute_N.size:
            continue
        compute_M = places_between(group.compute_N, max(float(group.compute_N[-1]), end))
        band = group.mean_curve(compute_M, level) if group.draws is not None else None
        drawn = {"look": run_look(place), "compute_M": compute_M, "band": band, "most": most}
        found.append(DrawnCurve(names[group.name], group.runs, **drawn))
    return found


def linearised_figure(curves: Sequence[DrawnCurve], unit: Unit) -> tuple[Figure, str] | None:
    """Return the paper's linearised plot, by the least-squares curve of every run; None if no run has one."""
    known = ((one, tuple(run for run in one.runs if run.fit and not run.fit.misfit)) for one in curves)
    curves = [replace(one, runs=runs) for one, runs in known if runs]
    every = [fit for one in curves for fit in one.curves]
    straight = [linear_points(fit.points, fit.paper_curve, unit.size) for fit in every]
    if not any(len(found[0]) for found in straight):
        return None
    ends = np.concatenate([_line(fit, unit.size)[1] for fit in every])
    low, high = float(ends.min()) / 10**_DECADES, float(ends.max()) * 10**_DECADES

    def panel(axes: Axes, drawn: DrawnCurve) -> None:
        colour, marker, dashes = drawn.look
        for fit in drawn.curves:
            x_N, F_N, _ = linear_points(fit.points, fit.paper_curve, unit.size)
            axes.plot(x_N, F_N, marker, zorder=2, ms=3.0, mfc=colour, mec="none", alpha=0.4)
            axes.plot(*_line(fit, unit.size), color=colour, lw=1.3, ls=dashes, zorder=3)
        slope = float(np.median([fit.paper_curve.B for fit in drawn.curves]))
        named = f"{drawn.name}  B {plain(slope)}" if drawn.name else "_"
        axes.plot([], [], color=colour, ls=dashes, label=named)
        axes.set_yscale("log")
        axes.set_ylim(low, high)
        # Not $10^3$, as dollar signs are plain text here: a run's name may contain them.
        raised = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
        axes.yaxis.set_major_formatter(
            lambda F, _: f"10{f'{math.log10(F):.0f}'.translate(raised)}" if F > 0 else ""
        )

    out = sum(found[2] for found in straight)
    beyond = sum(int(np.sum((found[1] < low) | (found[1] > high))) for found in straight)
    text = (
        "F = C_mid^B / ((A − R_0) / (R_C − R_0) − 1), by the least-squares log-logistic curve of each run: "
        "on these axes a run is a straight line, and its slope is B (the number beside the name: median over "
        f"seeds). Left out: {counted(out, 'evaluation')} not between R_0 and A, where F has no value"
        f"{f', and {beyond} beyond the frame' if beyond else ''}. Near A a small error moves F far; "
        "verdicts are not read off this plot."
    )
    return framed(curves, unit, label=_F, panel=panel), text


def linear_points(points: Points, curve: Curve, size: float = 1.0) -> tuple[np.ndarray, np.ndarray, int]:
    """Return compute and F of the evaluations with a value of F, and the number after step 0 without one.

    C_mid in F is in units of `size`, so that its power does not overflow even on an axis of FLOPs.
    """
    after = points.select(points.compute_N > 0)
    F_N = linearised(after, curve, size)
    has_N = ~np.isnan(F_N)
    return after.compute_N[has_N], F_N[has_N], int((~has_N).sum())


def _line(fit: Fit, size: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of the line of a run, at its first evaluation after step 0 and at its last."""
    ends = fit.points.compute_N[fit.points.compute_N > 0][[0, -1]]
    return ends, _power(fit.paper_curve.B, ends / size)


def _power(B: float, compute: np.ndarray | float) -> np.ndarray:
    """Return C^B, clipped, as it overflows for a steep curve in small units."""
    return np.exp(np.clip(B * np.log(compute), -_LARGEST_LOG, _LARGEST_LOG))


def framed(
    curves: Sequence[DrawnCurve],
    unit: Unit,
    budget: float | None = None,
    target: float | None = None,
    label: str = RATE,
    panel: Callable[[Axes, DrawnCurve], None] = draw,
) -> Figure:
    """Return pass rate against compute, with all curves in one frame, and a budget and a target marked.

    Too many curves for one frame have a panel each, beside the first one; too many for panels are all grey.
    `label` and `panel` draw another quantity than the pass rate.
    """
    compute_N = np.concatenate([run.used.compute_N for one in curves for run in one.runs])
    limits = compute_N[compute_N > 0].min() / 1.25, max(compute_N.max(), budget or 0.0) * 1.12
    shown, crowd = [list(curves)], len(curves) > _MOST_PANELS + 1
    if crowd:
        shown = [[replace(one, name="", band=None, look=(f"{MUTED}50", "o", "-")) for one in curves]]
    elif len(curves) > _APART:
        first = replace(curves[0], look=run_look(0))
        shown = [[first, replace(one, look=run_look(1))] for one in curves[1:]]
    columns = min(len(shown), _COLUMNS)
    rows = math.ceil(len(shown) / columns)
    with style():
        figure = new_figure(10.0, 4.0 if len(shown) == 1 else 2.0 * rows)
        panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
        for axes, own in zip(panels, shown, strict=False):
            for drawn in own:
                panel(axes, drawn)
            if len(shown) > 1:
                axes.set_title(key_of(axes)[1][1], loc="left", color=own[1].look[0], fontsize=9)
            _mark(axes, unit, budget, target)
        if label == RATE:
            plain_rates(panels[0])
        _compute_axis(panels[0], unit, limits, log=True)
        for axes in panels[len(shown) :]:
            axes.remove()
        for axes in panels[max(len(shown) - columns, 0) : len(shown)]:
            axes.tick_params(labelbottom=True)
        handles, texts = key_of(panels[0])
        if len(shown) > 1:
            del handles[1], texts[1]
        about = f"{unit.name}, logarithmic{f'; {len(curves)} runs' if crowd else ''}"
        _finish(figure, (handles, texts), f"training compute ({about})", label)
    return figure


def _mark(axes: Axes, unit: Unit, budget: float | None, target: float | None) -> None:
    look: dict[str, Any] = {"color": MUTED, "lw": 1.0, "zorder": 1}
    if budget is not None:
        axes.axvline(budget, **look, label=f"budget {unit.show(budget)}")
    if target is not None:
        axes.axhline(target, **look, ls="-.", label=f"target {rate(target)}")


def _compute_axis(axes: Axes, unit: Unit, limits: tuple[float, float], log: bool = False) -> None:
    """Set round ticks in a unit that keeps them short; the data stay in the unit of the fit."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    if log:
        axes.set_xscale("log")
    axes.set_xlim(*limits)
    low, high = (end / unit.size for end in limits)
    subs = (1.0, 2.0, 5.0) if axes.get_position().width > 0.3 else (1.0, 3.0)
    locator = LogLocator(subs=subs) if log else MaxNLocator(8, steps=[1, 2, 5, 10])
    ticks = [tick for tick in locator.tick_values(low, high) if low <= tick <= high]
    axes.set_xticks([tick * unit.size for tick in ticks], [f"{tick:,.9g}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())


def _finish(figure: Figure, key: tuple[list[Any], list[str]], x_label: str, y_label: str) -> None:
    """Label the axes, and add the key below the frames, where it covers nothing."""
    below = 0.45 + 0.19 * math.ceil(len(key[1]) / 2)
    height = figure.get_figheight() + below
    figure.set_figheight(height)
    titled = any(axes.get_title(loc="left") for axes in figure.axes)
    figure.subplots_adjust(
        left=0.062 + 0.02 * y_label.count("\n"),
        right=0.99,
        bottom=(below + 0.12) / height,
        top=1 - (0.26 if titled else 0.08) / height,
        wspace=0.07,
        hspace=0.26,
    )
    figure.supxlabel(x_label, fontsize=9, color=MUTED, y=(below - 0.28) / height)
    figure.supylabel(y_label, fontsize=9, color=MUTED, x=0.006)
    if key[1]:
        figure.legend(*key, loc="lower center", ncols=2, frameon=False)
