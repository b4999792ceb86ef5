"""Figures of curves: recipes or runs over one another, and the paper's linearised plot.

With more of them (arms, here) than colours that stay apart, each has a panel of its own, against the base.

    F = C_mid^B / ((A - R_0) / (R_C - R_0) - 1)        log F against log C has slope B (arXiv 2510.13786)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from scalerl.curve.families import Curve
from scalerl.errors import counted
from scalerl.view.facts.frozen import Band
from scalerl.view.numbers import Unit, plain, rate
from scalerl.view.style import LOOKS, MUTED, label_ends, new_figure, note, plain_rates, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Look = tuple[str, str, str]
"""Colour, marker and dashes."""
_COLUMNS = 4
_MOST_PANELS = 24
_LARGEST_LOG = 600.0
_CROWD = 120
"""Evaluations of an arm from which on they are faint, so that its curve is seen."""
_F = "F = C_mid^B / ((A − R_0) / (R_C − R_0) − 1)\nR_C: pass rate at compute C; logarithmic"
_DECADES = 0.7
"""How far the linearised plot reaches beyond its lines: evaluations near A scatter without bound."""


@dataclass(frozen=True)
class RunPoints:
    """The evaluations of one run that are drawn, compute in units of the figure, and its least squares."""

    compute_N: np.ndarray
    pass_rate_N: np.ndarray
    curve: Curve | None
    """The paper's curve, compute in units of the figure; None without a fit, or where none describes it."""


@dataclass(frozen=True)
class ArmCurve:
    """An arm as it is drawn: its runs, and its mean curve over seeds with the band, where it has one."""

    name: str
    """As it fits beside a figure."""
    base: bool
    runs: tuple[RunPoints, ...]
    band: Band | None
    look: Look | None = None
    """Its own, where it is shown elsewhere too; by default one that is free."""
    whole_name: str = ""
    """Its name where there is room."""
    known: float = math.inf
    """Compute in units of the figure up to which there are evaluations: beyond it the line is thin."""


@dataclass(frozen=True)
class _Plot:
    """What tells the two figures apart."""

    label: str
    draw: Callable[[Axes, ArmCurve, Look, bool], float]
    """Draws one arm, large or small, and returns the height at which it ends."""
    axis: Callable[[Axes], None]
    """Lays out the upright axis."""
    name: Callable[[ArmCurve], str]
    """The label of an arm's line."""
    beside: Callable[[ArmCurve], str]
    """What stands in the corner of an arm's own panel."""
    budget: float = math.nan
    """Compute in units of the figure, and the pass rate to reach there, to be marked; NaN is none."""
    target: float = math.nan


def overlay_figure(
    arms: Sequence[ArmCurve], unit: Unit, budget: float | None = None, target: float | None = None
) -> Figure | None:
    """Pass rate against compute in `unit`, arm over arm. None without an evaluation.

    `budget`, in the unit of the axis, and the pass rate `target` are marked.
    """
    if not any(len(run.compute_N[run.compute_N > 0]) for arm in arms for run in arm.runs):
        return None
    plot = _Plot(
        "pass rate on the held-out prompts",
        _overlay,
        plain_rates,
        _name,
        lambda arm: "",
        math.nan if budget is None else budget / unit.size,
        math.nan if target is None else target,
    )
    return _drawn(arms, unit, plot)


def linearised_figure(arms: Sequence[ArmCurve], unit: Unit) -> tuple[Figure, str] | None:
    """The paper's linearised plot, by the least-squares curve of every run; None where no run has one."""
    arms = [arm for arm in arms if any(run.curve for run in arm.runs)]
    straight = [linearised(run) for arm in arms for run in arm.runs if run.curve]
    if not any(len(found[0]) for found in straight):
        return None
    low, high = _line_range(arms)
    out = sum(found[2] for found in straight)
    beyond = sum(int(np.sum((found[1] < low) | (found[1] > high))) for found in straight)
    span = low, high
    plot = _Plot(_F, partial(_lines, span=span), partial(_power_axis, span=span), _with_slope, _slope)
    figure = _drawn(arms, unit, plot)
    text = (
        "F = C_mid^B / ((A − R_0) / (R_C − R_0) − 1), by the least-squares log-logistic curve of each run: "
        "on these axes a run is a straight line, and its slope is B (the number beside the name: median over "
        f"seeds). Left out: {counted(out, 'evaluation')} not between R_0 and A, where F has no value"
        f"{f', and {beyond} beyond the frame' if beyond else ''}. Near A a small error moves F far; "
        "verdicts are not read off this plot."
    )
    return figure, text


def linearised(run: RunPoints) -> tuple[np.ndarray, np.ndarray, int]:
    """Compute and F of the evaluations that have one, and how many after step 0 have none."""
    curve = run.curve
    if curve is None:
        return np.empty(0), np.empty(0), 0
    compute_N, rate_N = run.compute_N[run.compute_N > 0], run.pass_rate_N[run.compute_N > 0]
    has_N = (rate_N > curve.R_0) & (rate_N < curve.A)
    share_N = (rate_N[has_N] - curve.R_0) / (curve.A - curve.R_0)
    F_N = np.exp(_log_power(curve.B, curve.C_mid)) * share_N / (1 - share_N)
    return compute_N[has_N], F_N, int(np.sum(~has_N))


def _drawn(arms: Sequence[ArmCurve], unit: Unit, plot: _Plot) -> Figure:
    """All arms in one frame, or a panel for each; a crowd without a base in one frame again, unnamed."""
    crowded = len(arms) > _MOST_PANELS and not any(arm.base for arm in arms)
    with style():
        if len(arms) <= len(LOOKS) or crowded:
            return _one(arms, unit, plot, crowded)
        return _many(arms, unit, plot)


def _one(arms: Sequence[ArmCurve], unit: Unit, plot: _Plot, crowded: bool) -> Figure:
    """One frame for all arms; where it is `crowded` they are grey, and have neither bands nor names."""
    longest = 0 if crowded else max(len(plot.name(arm)) for arm in arms)
    figure = new_figure(10.0, 4.6)
    figure.subplots_adjust(
        left=0.062 + 0.016 * plot.label.count("\n"),
        right=0.985 if crowded else 0.98 - 0.0076 * longest,
        bottom=0.11,
        top=0.985,
    )
    axes = figure.subplots()
    _compute_axis(axes, _computes(arms, plot), wide=True)
    axes.set_ylabel(plot.label)
    ends: list[tuple[float, str, str]] = []
    if crowded:
        for arm in arms:
            band = arm.band and Band(arm.band.compute_M, *[arm.band.median_M] * 3)
            plot.draw(axes, replace(arm, band=band), (f"{MUTED}50", "o", "-"), False)
    else:
        ends = [(plot.draw(axes, arm, look, True), plot.name(arm), look[0]) for arm, look in _looks(arms)]
    plot.axis(axes)
    _mark(axes, plot, unit)
    label_ends(axes, ends)
    axes.set_xlabel(f"training compute ({unit.name}, logarithmic){f'; {len(arms)} runs' if crowded else ''}")
    return figure


def _many(arms: Sequence[ArmCurve], unit: Unit, plot: _Plot) -> Figure:
    base, others = [arm for arm in arms if arm.base][:1], [arm for arm in arms if not arm.base]
    rows = math.ceil(len(others) / _COLUMNS)
    height = 0.75 + 2.0 * rows
    figure = new_figure(10.0, height)
    figure.subplots_adjust(
        left=0.068, right=0.99, bottom=0.5 / height, top=1 - 0.28 / height, wspace=0.07, hspace=0.24
    )
    panels = figure.subplots(rows, _COLUMNS, sharex=True, sharey=True, squeeze=False).ravel()
    # What is shared is set once: every change of a shared axis goes through all panels.
    _compute_axis(panels[0], _computes(arms, plot), wide=False)
    for axes, arm in zip(panels, others, strict=False):
        for one in base:
            plot.draw(axes, one, (*LOOKS[0], "-"), False)
        look = arm.look or (*LOOKS[1], "-")
        plot.draw(axes, arm, look, False)
        axes.set_title(_name(arm), loc="left", color=look[0], fontsize=9)
        note(axes, plot.beside(arm), (0.96, 0.06), ha="right", color=look[0])
    plot.axis(panels[0])
    for axes in panels[: len(others)]:
        _mark(axes, plot, unit, named=axes is panels[0])
    for axes in panels[len(others) :]:
        axes.set_visible(False)
    for axes in panels[max(len(others) - _COLUMNS, 0) : len(others)]:
        axes.tick_params(labelbottom=True)
    black = f"; black: {base[0].name}" if base else ""
    below = f"training compute ({unit.name}, logarithmic){black}"
    figure.supxlabel(below, fontsize=9, color=MUTED, y=0.06 / height)
    figure.supylabel(plot.label, fontsize=9, color=MUTED, x=0.006)
    return figure


def _looks(arms: Sequence[ArmCurve]) -> Iterator[tuple[ArmCurve, Look]]:
    others = iter(LOOKS[1:])
    for arm in arms:
        # Without a base among six arms its look is free.
        look = LOOKS[0] if arm.base else next(others, LOOKS[0])
        yield arm, arm.look or (*look, "-")


def _computes(arms: Sequence[ArmCurve], plot: _Plot) -> tuple[float, float]:
    compute = np.concatenate([run.compute_N for arm in arms for run in arm.runs])
    compute = compute[compute > 0]
    return float(compute.min()) / 1.25, float(np.fmax(compute.max(), plot.budget)) * 1.12


def _mark(axes: Axes, plot: _Plot, unit: Unit, named: bool = True) -> None:
    """The budget and the target, as lines that say what they are."""
    look = {"color": MUTED, "lw": 1.0, "ls": ":", "zorder": 1}
    beside = {"color": MUTED, "fontsize": 8, "va": "bottom"}
    if math.isfinite(plot.budget):
        axes.axvline(plot.budget, **look)
        if named:
            text = f"budget {unit.show(plot.budget * unit.size)}"
            note(axes, text, (plot.budget, 0.0), "x", (-3, 4), ha="right", **beside)
    if math.isfinite(plot.target):
        axes.axhline(plot.target, **look)
        if named:
            note(axes, f"target {rate(plot.target)}", (0.0, plot.target), "y", (3, 2), ha="left", **beside)


def _overlay(axes: Axes, arm: ArmCurve, look: Look, large: bool) -> float:
    """Evaluations, mean curve and band of one arm; the height at which its line ends."""
    colour, marker, dashes = look
    crowd = sum(len(run.compute_N) for run in arm.runs) > _CROWD
    faint = {"ms": 4.2 if large else 3.0, "mfc": colour, "mec": "none", "alpha": 0.32 if crowd else 0.75}
    for run in arm.runs:
        after_N = run.compute_N > 0
        axes.plot(run.compute_N[after_N], run.pass_rate_N[after_N], marker, zorder=2, **faint)
    if arm.band is None:
        return float(np.mean([run.pass_rate_N[-1] for run in arm.runs]))
    band = arm.band
    axes.fill_between(band.compute_M, band.lo_M, band.hi_M, color=colour, alpha=0.14, lw=0, zorder=1)
    until = int(np.searchsorted(band.compute_M, arm.known, side="right"))
    for part, width in ((slice(0, until), 1.8), (slice(max(until - 1, 0), None), 0.9)):
        axes.plot(band.compute_M[part], band.median_M[part], color=colour, lw=width, ls=dashes, zorder=4)
    return float(band.median_M[-1])


def _lines(axes: Axes, arm: ArmCurve, look: Look, large: bool, span: tuple[float, float]) -> float:
    """Linearised evaluations of one arm and the line of every run; the height at which these end."""
    colour, marker, dashes = look
    faint = {"ms": 3.4 if large else 2.4, "mfc": colour, "mec": "none", "alpha": 0.4}
    last = []
    for run in arm.runs:
        if run.curve is None:
            continue
        x_N, F_N, _ = linearised(run)
        seen_N = np.clip(F_N, *span) == F_N
        axes.plot(x_N[seen_N], F_N[seen_N], marker, zorder=2, **faint)
        reach = np.array(_reach(run))
        F = np.exp(_log_power(run.curve.B, reach))
        axes.plot(reach, F, color=colour, lw=1.3, ls=dashes, zorder=3)
        last.append(float(F[-1]))
    return float(np.median(last))


def _log_power(B: float, compute: np.ndarray | float) -> np.ndarray:
    """log C^B, kept where its exponential is a number: a steep curve in small units is not."""
    return np.clip(B * np.log(compute), -_LARGEST_LOG, _LARGEST_LOG)


def _name(arm: ArmCurve) -> str:
    return arm.name if arm.band else f"{arm.name} (no curve)"


def _with_slope(arm: ArmCurve) -> str:
    return f"{arm.name}  {_slope(arm)}".rstrip()


def _slope(arm: ArmCurve) -> str:
    slopes = [run.curve.B for run in arm.runs if run.curve]
    return f"B {plain(float(np.median(slopes)))} (least squares)" if slopes else ""


def _reach(run: RunPoints) -> tuple[float, float]:
    compute_N = run.compute_N[run.compute_N > 0]
    return float(compute_N.min()), float(compute_N.max())


def _line_range(arms: Sequence[ArmCurve]) -> tuple[float, float]:
    """The range of F over all lines, and a little beyond."""
    runs = [run for arm in arms for run in arm.runs if run.curve and run.compute_N.max() > 0]
    logs = [_log_power(run.curve.B, np.array(_reach(run))) for run in runs if run.curve]
    wider = _DECADES * math.log(10)
    return math.exp(np.min(logs) - wider), math.exp(np.max(logs) + wider)


def _compute_axis(axes: Axes, ends: tuple[float, float], wide: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log")
    axes.set_xlim(*ends)
    subs = (1.0, 2.0, 5.0) if wide else (1.0, 3.0)
    subs = subs if ends[1] / ends[0] < 300 else (1.0,)
    axes.xaxis.set_major_locator(LogLocator(subs=subs))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))


def _power_axis(axes: Axes, span: tuple[float, float]) -> None:
    """Logarithmic, with powers of ten in digits that need no mathematics."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    axes.set_ylim(*span)
    raised = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    axes.yaxis.set_major_locator(LogLocator(numticks=7))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"10{str(round(math.log10(value))).translate(raised)}")
    )
