"""The main figure: pass rate against compute, the forecast as frozen, and what came after it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scalerl.errors import counted
from scalerl.record.reader import RunRecord
from scalerl.view.facts.curve_view import Change, CurveView, curve_view
from scalerl.view.facts.frozen import Band, FrozenForecast
from scalerl.view.numbers import rate
from scalerl.view.style import (
    CEILING,
    FORECAST,
    INK,
    LATER,
    MUTED,
    PAPER,
    WINDOW,
    inline_svg,
    new_figure,
    note,
    plain_rates,
    save_figure,
    style,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from scalerl.curve import Fit
    from scalerl.curve.quantiles import Interval

_DASHES = (0, (4, 2))  # of the line where a run leaves every curve


def curve_svg(
    run: RunRecord,
    fit: Fit | None = None,
    *,
    frozen: FrozenForecast | None = None,
    part: Fit | None = None,
) -> str:
    """The main figure as inline SVG for the page.

    Args:
        run: the record.
        fit: a fit on all evaluations: its ceiling is shown, and its curve where there is no `frozen`.
        frozen: the forecast to show, with its own curve and band as stored.
        part: of a misfit, the fit of the part that holds, where it was made already.

    Raises:
        InputError: the counters behind the compute axis are missing.
    """
    described = f"Pass rate against training compute, {counted(len(run.evals), 'evaluation')}"
    return inline_svg(_draw(curve_view(run, fit, frozen, part)), "curve", described)


def curve_figure(
    run: RunRecord, fit: Fit | None = None, *, frozen: FrozenForecast | None = None, out: str | Path
) -> Path:
    """Write the figure of `curve_svg` to the file `out` (.svg, .png or .pdf), for a README or a slide.

    Raises:
        InputError: `out` ends otherwise, or the counters behind the compute axis are missing.
        WriteError: the disk does not take it.
    """
    return save_figure(_draw(curve_view(run, fit, frozen)), Path(out))


def _draw(view: CurveView) -> Figure:
    with style():
        figure = new_figure(10.0, 4.4)
        widths = [5.6, 3.2, 1.4] if view.ceilings else [5.6, 3.2]
        bottom = 0.155 if view.ceilings else 0.12
        figure.subplots_adjust(left=0.058, right=0.995, bottom=bottom, top=0.99, wspace=0.04)
        panels = figure.subplots(1, len(widths), sharey=True, width_ratios=widths)
        # On the logarithmic axis the later evaluations crowd, so that their marks are smaller.
        for axes, size in zip(panels[:2], (3.8, 2.9), strict=True):
            draw_curve(axes, view)
            draw_evaluations(axes, view, size)
            draw_levels(axes, view)
            if view.change:
                draw_change(axes, view.change)
        finish_linear(panels[0], view)
        _finish_log(panels[1], view)
        if view.ceilings:
            _ceiling_panel(panels[2], view)
        panels[0].set_ylim(*limits(view))
    return figure


def draw_curve(axes: Axes, view: CurveView) -> None:
    """The curve with its band, what it was made from, and the interval of the forecast's target."""
    if math.isfinite(view.window):
        axes.axvspan(0, view.window, color=WINDOW, lw=0, zorder=0)
    if view.band:
        _draw_band(axes, view.band, FORECAST, 0.18, 1.6)
    if view.frozen and math.isfinite(view.frozen.width):
        draw_intervals(axes, [view.target], [view.frozen.prediction])


def draw_intervals(axes: Axes, compute_M: Sequence[float], interval_M2: Sequence[Interval]) -> None:
    """Upright bars: the intervals of one evaluation at computes to come."""
    low_M, high_M = np.array(interval_M2).T
    look: dict[str, Any] = {"ecolor": FORECAST, "elinewidth": 1.6, "capsize": 5, "capthick": 1.6}
    middle_M = (low_M + high_M) / 2
    axes.errorbar(compute_M, middle_M, yerr=(high_M - low_M) / 2, fmt="none", zorder=4, **look)


def draw_change(axes: Axes, change: Change) -> None:
    """Where the run leaves every curve, and the part that holds: a bar along the axis, and its own curve."""
    if math.isfinite(change.at):
        axes.axvline(change.at, color=LATER, lw=1.2, ls=_DASHES, zorder=1)
    if change.band:
        axes.axvspan(*change.keep, ymax=0.014, color=CEILING, lw=0)
        _draw_band(axes, change.band, CEILING, 0.15, 1.4)


def _draw_band(axes: Axes, band: Band, colour: str, alpha: float, width: float) -> None:
    axes.fill_between(band.compute_M, band.lo_M, band.hi_M, color=colour, alpha=alpha, lw=0)
    axes.plot(band.compute_M, band.median_M, color=colour, lw=width)


def draw_evaluations(axes: Axes, view: CurveView, size: float) -> None:
    """The evaluations with their noise, marks `size` points wide."""
    for chosen_N, colour, face in ((~view.later_N, INK, INK), (view.later_N, LATER, PAPER)):
        axes.errorbar(
            view.compute_N[chosen_N],
            view.pass_rate_N[chosen_N],
            yerr=view.noise_sd_N[chosen_N],
            fmt="o",
            ms=size,
            mfc=face,
            mec=colour,
            mew=0.29 * size,
            ecolor=colour,
            elinewidth=0.9,
            zorder=3,
        )


def draw_levels(axes: Axes, view: CurveView) -> None:
    """The ceiling, and the one that was known beforehand."""
    _draw_known_ceiling(axes, view)
    if view.ceilings and math.isfinite(view.ceilings[-1].A):
        axes.axhline(view.ceilings[-1].A, color=CEILING, lw=1.1, ls=(0, (6, 3)), zorder=1)


def _draw_known_ceiling(axes: Axes, view: CurveView) -> None:
    if math.isfinite(view.known_ceiling):
        axes.axhline(view.known_ceiling, color=MUTED, lw=1.1, ls=(0, (1, 1.6)), zorder=1)


def finish_linear(axes: Axes, view: CurveView, more: Sequence[tuple[Line2D, str]] = ()) -> None:
    """Name what is drawn on a linear axis; `more` are entries of the key beside those of the view."""
    axes.set_xlim(-0.015 * _largest(view), 1.03 * _largest(view))
    axes.set_xlabel(f"training compute ({view.unit.name})")
    axes.set_ylabel("pass rate on the held-out prompts")
    plain_rates(axes)
    _label_levels(axes, view)
    _key(axes, view, more)


def _finish_log(axes: Axes, view: CurveView) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    positive_N = view.compute_N[view.compute_N > 0]
    axes.set_xlabel(f"{view.unit.name}, logarithmic")
    axes.tick_params(labelleft=False)
    if not positive_N.size:
        return
    axes.set_xscale("log")
    axes.set_xlim(positive_N.min() / 1.3, _largest(view) * 1.15)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _ceiling_panel(axes: Axes, view: CurveView) -> None:
    for place, ceiling in enumerate(view.ceilings):
        lo, hi = ceiling.interval
        if math.isfinite(lo + hi):
            axes.plot([place, place], [lo, hi], color=CEILING, lw=5, alpha=0.35, solid_capstyle="butt")
        if math.isfinite(ceiling.A):
            axes.plot([place], [ceiling.A], "o", ms=5, color=CEILING)
    _draw_known_ceiling(axes, view)
    axes.set_xlim(-0.7, len(view.ceilings) - 0.3)
    names = [ceiling.data.replace(" ", "\n", 1) for ceiling in view.ceilings]
    axes.set_xticks(range(len(names)), names)
    axes.tick_params(labelleft=False, bottom=False)
    axes.grid(visible=False, axis="x")
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("ceiling A", color=CEILING)


def _label_levels(axes: Axes, view: CurveView) -> None:
    """Name the horizontal lines at the left, where the curve is still low; the higher one from above."""
    levels = [(view.known_ceiling, f"ceiling known beforehand {rate(view.known_ceiling)}", MUTED)]
    if view.ceilings:
        last = view.ceilings[-1]
        doubt = "" if last.identified else ", not identified"
        levels.append((last.A, f"ceiling A {rate(last.A)}{doubt} ({last.data})", CEILING))
    known = sorted((level for level in levels if math.isfinite(level[0])), reverse=True)
    for (height, text, colour), (offset, align) in zip(known, ((3, "bottom"), (-3, "top")), strict=False):
        note(axes, text, (0.012, height), "y", (0, offset), va=align, color=colour)


def _entries(view: CurveView) -> list[tuple[Line2D, str]]:
    """What the key names: points and bands in their own colours; nothing where only evaluations are drawn."""
    used = "evaluation that the forecast used" if view.frozen else "evaluation"
    noise = " (bar: ±1 sd of its noise)" if view.noise_sd_N.any() else ""
    entries = [(sign(INK, marker="o", mfc=INK), used + noise)]
    if view.later_N.any():
        entries.append((sign(LATER, marker="o", mfc=PAPER), "evaluation made later"))
    if view.frozen:
        step = view.frozen.made_at_step
        when = f"frozen at step {step:.0f}" if math.isfinite(step) else "as frozen"
        entries.append((sign(FORECAST, lw=6, alpha=0.4), f"forecast, {when}"))
        if math.isfinite(view.frozen.width):
            bar = sign(FORECAST, marker="_", ms=8, mew=1.6)
            entries.append((bar, "interval, one evaluation at the target"))
    elif view.band:
        entries.append((sign(FORECAST, lw=6, alpha=0.4), "fitted curve and its interval"))
    if view.change:
        placed = math.isfinite(view.change.at)
        entries.append((sign(LATER, lw=1.2, ls=_DASHES if placed else ""), view.change.text))
        if view.change.band:
            entries.append((sign(CEILING, lw=6, alpha=0.4), "curve of the part that holds (bar)"))
    return entries if len(entries) > 1 or noise else []


def _key(axes: Axes, view: CurveView, more: Sequence[tuple[Line2D, str]]) -> None:
    """The key, in the corner that the curve leaves empty; it covers what marks a change."""
    entries = [*_entries(view), *more]
    if not entries:
        return
    corner = "upper right" if _falls(view) else "lower right"
    legend = axes.legend(
        *zip(*entries, strict=True), loc=corner, frameon=view.change is not None, handlelength=1.2
    )
    legend.get_frame().set(facecolor=PAPER, edgecolor="none", alpha=0.85)
    for (sign, _), text in zip(entries, legend.get_texts(), strict=True):
        text.set_color(sign.get_color())


def _falls(view: CurveView) -> bool:
    return bool(view.pass_rate_N[-1] < view.pass_rate_N[0])


def sign(colour: str, **look: Any) -> Line2D:
    """A mark for the key."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color=colour, **{"ls": "" if "marker" in look else "-", "ms": 4.2, **look})


def _largest(view: CurveView) -> float:
    ends = [view.compute_N.max(initial=0.0), view.target, view.band.compute_M.max() if view.band else 0.0]
    return float(np.nanmax(ends)) or 1.0


def limits(view: CurveView) -> tuple[float, float]:
    """From below the lowest to above the highest thing drawn, kept within a little around [0, 1]."""
    drawn = [view.pass_rate_N - view.noise_sd_N, view.pass_rate_N + view.noise_sd_N, [view.known_ceiling]]
    drawn += [[ceiling.A, *ceiling.interval] for ceiling in view.ceilings]
    if view.frozen:
        drawn.append(view.frozen.prediction)
    for band in (view.band, view.change.band if view.change else None):
        if band:
            drawn += [band.lo_M, band.hi_M]
    lowest, highest = (float(bound(np.concatenate(drawn))) for bound in (np.nanmin, np.nanmax))
    margin = 0.08 * max(highest - lowest, 0.05)
    low, high = lowest - margin, min(highest + margin, 1.04)
    # Room for the key in the lower right corner: from a fifth of the width on, nothing lies as low.
    beside = view.pass_rate_N[view.compute_N > 0.2 * _largest(view)]
    if len(beside) and not _falls(view):
        height = 0.03 + 0.055 * len(_entries(view))
        low = min(low, (beside.min() - height * high) / (1 - height))
    return max(low, -0.03), high
