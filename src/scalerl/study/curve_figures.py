"""The figures of a study's curves: the arms over one another, and the paper's linearised plot.

With more arms than there are colours that stay apart, each has a panel of its own, against the base.

    F = C_mid^B / ((A - R_0) / (R_C - R_0) - 1)        log F against log C has slope B (arXiv 2510.13786)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from scalerl.report.numbers import Unit, percent, plain
from scalerl.report.style import FORECAST, MUTED, new_figure, plain_rates, style
from scalerl.study.curves import ArmCurve, RunPoints
from scalerl.study.labels import LOOKS, label_ends
from scalerl.study.verdict import StudyVerdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Look = tuple[str, str]
"""Colour and marker."""
Draw = Callable[["Axes", Sequence[ArmCurve], Sequence[Look], tuple[float, float], bool], None]
"""Draws arms into one frame, between two computes, with labels or without."""
_COLUMNS = 4
_DECADES = 0.7
"""How far the linearised plot reaches beyond its lines: evaluations near A scatter without bound."""


def overlay_figure(verdict: StudyVerdict, arms: Sequence[ArmCurve], unit: Unit) -> tuple[Figure, str] | None:
    """Pass rate against compute in `unit`, arm over arm; and its caption. None without an evaluation."""
    if not any(len(run.compute_N[run.compute_N > 0]) for arm in arms for run in arm.runs):
        return None
    figure = _drawn(arms, unit, _overlay, "pass rate on the held-out prompts", _name)
    level = percent(verdict.comparison.level if verdict.comparison else 0.95)
    text = (
        "Faint: evaluations of every seed. Line and band: the mean curve of an arm over its seeds with its "
        f"{level} interval, the variance between seeds included, up to where its runs reach."
    )
    bare = [arm.name for arm in arms if arm.band is None]
    return figure, text + (f" Without a curve: {', '.join(bare)}." if bare else "")


def linearised_figure(arms: Sequence[ArmCurve], unit: Unit) -> tuple[Figure, str] | None:
    """The paper's linearised plot, by the least-squares curve of every run; None where no run has one."""
    arms = [arm for arm in arms if any(run.curve for run in arm.runs)]
    straight = [linearised(run) for arm in arms for run in arm.runs if run.curve]
    if not any(len(found[0]) for found in straight):
        return None
    low, high = _line_range(arms)
    out = sum(found[2] for found in straight)
    beyond = sum(int(np.sum((found[1] < low) | (found[1] > high))) for found in straight)
    figure = _drawn(arms, unit, partial(_lines, span=(low, high)), "F, logarithmic", _with_slope)
    text = (
        "F = C_mid^B / ((A − R_0) / (R_C − R_0) − 1), by the least-squares log-logistic curve of each run: "
        "on these axes a run is a straight line, and its slope is B (the number beside the name: median over "
        f"seeds). Left out: {out} evaluation{'s' * (out != 1)} at or below R_0 or at or above A, where F has no value"
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
    F_N = curve.C_mid**curve.B * share_N / (1 - share_N)
    return compute_N[has_N], F_N, int(np.sum(~has_N))


def _drawn(
    arms: Sequence[ArmCurve], unit: Unit, draw: Draw, y: str, title: Callable[[ArmCurve], str]
) -> Figure:
    """All arms in one frame, or a panel for each."""
    with style():
        if len(arms) <= len(LOOKS):
            return _one(arms, unit, draw, y, title)
        return _many(arms, unit, draw, y)


def _one(
    arms: Sequence[ArmCurve], unit: Unit, draw: Draw, y: str, title: Callable[[ArmCurve], str]
) -> Figure:
    figure = new_figure(10.0, 4.6)
    longest = max(len(title(arm)) for arm in arms)
    figure.subplots_adjust(left=0.062, right=0.98 - 0.0076 * longest, bottom=0.11, top=0.985)
    axes = figure.subplots()
    draw(axes, arms, _looks(arms), _computes(arms), True)
    axes.set_xlabel(f"training compute ({unit.name}, logarithmic)")
    axes.set_ylabel(y)
    return figure


def _many(arms: Sequence[ArmCurve], unit: Unit, draw: Draw, y: str) -> Figure:
    base, others = [arm for arm in arms if arm.base][:1], [arm for arm in arms if not arm.base]
    rows = math.ceil(len(others) / _COLUMNS)
    height = 0.75 + 2.0 * rows
    figure = new_figure(10.0, height)
    figure.subplots_adjust(
        left=0.068, right=0.99, bottom=0.5 / height, top=1 - 0.28 / height, wspace=0.07, hspace=0.24
    )
    panels = figure.subplots(rows, _COLUMNS, sharex=True, sharey=True, squeeze=False).ravel()
    for axes, arm in zip(panels, others, strict=False):
        shown = [*base, arm]
        looks = [*(LOOKS[0] for _ in base), (FORECAST, "s")]
        draw(axes, shown, looks, _computes(arms), False)
        axes.set_title(_name(arm), loc="left", color=FORECAST, fontsize=9)
    for axes in panels[len(others) :]:
        axes.set_visible(False)
    for axes in panels[max(len(others) - _COLUMNS, 0) : len(others)]:
        axes.tick_params(labelbottom=True)
    black = f"; black: {base[0].name}" if base else ""
    figure.supxlabel(
        f"training compute ({unit.name}, logarithmic){black}", fontsize=9, color=MUTED, y=0.06 / height
    )
    figure.supylabel(y, fontsize=9, color=MUTED, x=0.006)
    return figure


def _looks(arms: Sequence[ArmCurve]) -> list[Look]:
    others = iter(LOOKS[1:])
    looks = [LOOKS[0] if arm.base else next(others, None) for arm in arms]
    # Without a base among six arms its look is free.
    return [LOOKS[0] if look is None else look for look in looks]


def _computes(arms: Sequence[ArmCurve]) -> tuple[float, float]:
    compute = np.concatenate([run.compute_N for arm in arms for run in arm.runs])
    compute = compute[compute > 0]
    return float(compute.min()) / 1.25, float(compute.max()) * 1.12


def _overlay(
    axes: Axes, arms: Sequence[ArmCurve], looks: Sequence[Look], ends: tuple[float, float], labels: bool
) -> None:
    named = []
    for arm, (colour, marker) in zip(arms, looks, strict=True):
        size = 3.2 if labels else 2.4
        for run in arm.runs:
            after_N = run.compute_N > 0
            axes.plot(
                run.compute_N[after_N],
                run.pass_rate_N[after_N],
                marker,
                ms=size,
                mfc=colour,
                mec="none",
                alpha=0.32,
                zorder=2,
            )
        if arm.band:
            band = arm.band
            axes.fill_between(band.compute_M, band.lo_M, band.hi_M, color=colour, alpha=0.14, lw=0, zorder=1)
            axes.plot(band.compute_M, band.median_M, color=colour, lw=1.8, zorder=4)
            _signs(axes, band.compute_M, band.median_M, colour, marker, labels)
            named.append((float(band.median_M[-1]), _name(arm), colour))
        else:
            last = [float(run.pass_rate_N[-1]) for run in arm.runs]
            named.append((float(np.mean(last)), _name(arm), colour))
    _compute_axis(axes, ends, labels)
    plain_rates(axes)
    if labels:
        label_ends(axes, named)


def _signs(axes: Axes, x_M: np.ndarray, y_M: np.ndarray, colour: str, marker: str, labels: bool) -> None:
    """A few markers on a line, by which it is known without its colour."""
    if labels:
        at = np.linspace(0, len(x_M) - 1, 7).round().astype(int)
        axes.plot(x_M[at], y_M[at], marker, ms=5.5, mfc=colour, mec="none", zorder=5)


def _lines(
    axes: Axes,
    arms: Sequence[ArmCurve],
    looks: Sequence[Look],
    ends: tuple[float, float],
    labels: bool,
    span: tuple[float, float],
) -> None:
    named = []
    for arm, (colour, marker) in zip(arms, looks, strict=True):
        last = []
        for run in arm.runs:
            if run.curve is None:
                continue
            x_N, F_N, _ = linearised(run)
            seen_N = np.clip(F_N, *span) == F_N
            look = {"ms": 3.4 if labels else 2.4, "mfc": colour, "mec": "none", "alpha": 0.4}
            axes.plot(x_N[seen_N], F_N[seen_N], marker, zorder=2, **look)
            reach = np.array(_reach(run))
            axes.plot(reach, reach**run.curve.B, color=colour, lw=1.3, zorder=3)
            last.append(run.curve.B * math.log(ends[1]))
        named.append((math.exp(float(np.median(last))), _with_slope(arm), colour))
    axes.set_yscale("log")
    axes.set_ylim(*span)
    _compute_axis(axes, ends, labels)
    _power_ticks(axes)
    if not labels:
        axes.annotate(
            _slope(arms[-1]), (0.96, 0.06), xycoords="axes fraction", ha="right", color=looks[-1][0]
        )
    if labels:
        label_ends(axes, named)


def _name(arm: ArmCurve) -> str:
    return arm.name if arm.band else f"{arm.name} (no curve)"


def _with_slope(arm: ArmCurve) -> str:
    return f"{arm.name}  {_slope(arm)}".rstrip()


def _slope(arm: ArmCurve) -> str:
    slopes = [run.curve.B for run in arm.runs if run.curve]
    return f"B {plain(float(np.median(slopes)))}" if slopes else ""


def _reach(run: RunPoints) -> tuple[float, float]:
    compute_N = run.compute_N[run.compute_N > 0]
    return float(compute_N.min()), float(compute_N.max())


def _line_range(arms: Sequence[ArmCurve]) -> tuple[float, float]:
    """The range of F over all lines, and a little beyond."""
    runs = [run for arm in arms for run in arm.runs if run.curve and run.compute_N.max() > 0]
    logs = [run.curve.B * math.log(end) for run in runs if run.curve for end in _reach(run)]
    wider = _DECADES * math.log(10)
    return math.exp(min(logs) - wider), math.exp(max(logs) + wider)


def _compute_axis(axes: Axes, ends: tuple[float, float], wide: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log")
    axes.set_xlim(*ends)
    subs = (1.0, 2.0, 5.0) if wide else (1.0, 3.0)
    subs = subs if ends[1] / ends[0] < 300 else (1.0,)
    axes.xaxis.set_major_locator(LogLocator(subs=subs))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))


def _power_ticks(axes: Axes) -> None:
    """Powers of ten, in digits that need no mathematics."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    raised = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    axes.yaxis.set_major_locator(LogLocator(numticks=7))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"10{str(round(math.log10(value))).translate(raised)}")
    )
