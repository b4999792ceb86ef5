"""One run on axes of matplotlib, as the chart of a page has it: `Fit.plot`, a notebook, `report --figure`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scalerl.record.reader import RunRecord
from scalerl.view.facts.facts import axis_for, known_ceiling
from scalerl.view.facts.frozen import Band, FrozenForecast
from scalerl.view.facts.notices import misfit_in_words, part_that_holds
from scalerl.view.numbers import as_float, as_mapping, pair, plain, rate, unit_for
from scalerl.view.style import (
    CEILING,
    FORECAST,
    INK,
    LATER,
    MUTED,
    PAPER,
    WINDOW,
    new_figure,
    note,
    plain_rates,
    save_figure,
    style,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

    from scalerl.curve import Fit, Points

_SIZE = (6.4, 4.0)
_DASHES = (0, (4, 2))  # of the line where a run leaves every curve
_PLACES = 120
Entry = tuple[str, dict[str, Any]]
"""A line of the key: its text, and the look of its sign."""


@dataclass(frozen=True)
class DrawnRun:
    """What is drawn of a run; compute in the unit of its axis."""

    points: Points
    fit: Fit | None = None
    part: Fit | None = None
    """Of a misfit, the fit of the part that holds."""
    frozen: FrozenForecast | None = None
    """Drawn with its own curve, as it was stored, instead of that of the fit."""
    known_ceiling: float = math.nan

    @property
    def end(self) -> float:
        """The largest compute that is drawn."""
        target = self.frozen.target_compute if self.frozen else math.nan
        return float(np.nanmax([self.points.compute_N.max(initial=0.0), target])) or 1.0

    @property
    def band(self) -> Band | None:
        """The curve of the forecast, else that of the fit, where one describes the run."""
        if self.frozen is not None:
            return self.frozen.band
        return _band(self.fit, self.end) if self.fit is not None and self.fit.misfit is None else None

    @property
    def ceiling(self) -> tuple[float, tuple[float, float], str]:
        """The median of A with its interval, and what they rest on; NaN where it is withheld."""
        fit = self.part or (self.fit if self.fit is not None and self.fit.misfit is None else None)
        if fit is not None:
            doubt = "" if fit.identified else ", not identified"
            return fit.median.A, fit.intervals.A, doubt + (" (part fitted)" if self.part else "")
        then = self.frozen.fit if self.frozen and self.fit is None else {}
        A = as_float(as_mapping(then.get("median")).get("A"))
        return A, pair(as_mapping(then.get("intervals")).get("A")), " (as frozen)"


def curve_figure(
    run: RunRecord, fit: Fit | None = None, *, frozen: FrozenForecast | None = None, out: str | Path
) -> Path:
    """Write the figure of a run to the file `out` (.svg, .png or .pdf), for a README or a slide.

    Args:
        run: the record.
        fit: a fit on all evaluations: its ceiling is shown, and its curve where there is no `frozen`.
        frozen: the forecast to show, with its own curve and band as stored.
        out: the file.

    Raises:
        InputError: `out` ends otherwise, or the counters behind the compute axis are missing.
        WriteError: the disk does not take it.
    """
    shown = drawn_run(run, fit, frozen)
    with style():
        figure = new_figure(10.0, 4.4)
        figure.subplots_adjust(left=0.058, right=0.995, bottom=0.12, top=0.985, wspace=0.04)
        linear, log = figure.subplots(1, 2, sharey=True, width_ratios=[5.6, 3.2])
        draw_run(linear, shown)
        draw_run(log, shown, log=True)
    return save_figure(figure, Path(out))


def drawn_run(run: RunRecord, fit: Fit | None = None, frozen: FrozenForecast | None = None) -> DrawnRun:
    """Return what is drawn of a record. A forecast on another axis than the fit's is left out.

    Raises:
        InputError: the counters behind the compute axis are missing.
    """
    from scalerl.curve import Points

    axis = axis_for(run, fit, frozen)
    return DrawnRun(
        Points.from_record(run, axis),
        fit,
        part_that_holds(fit) if fit is not None else None,
        frozen if frozen is not None and frozen.axis == axis else None,
        known_ceiling(run),
    )


def draw_run(axes: Axes, run: DrawnRun, log: bool = False) -> None:
    """Draw a run; on a logarithmic axis, which stands beside a linear one, without names and a key."""
    before = (axes.get_xlim(), axes.get_ylim()) if axes.has_data() and not log else None
    entries = [
        *_draw_curve(axes, run),
        *_draw_evaluations(axes, run, 2.9 if log else 3.8),
        *_draw_ceiling(axes, run, named=not log),
        *_draw_change(axes, run),
        *_draw_interval(axes, run),
    ]
    _compute_axis(axes, run, log)
    if log:
        return
    axes.set_ylabel("pass rate on the held-out prompts")
    plain_rates(axes)
    _key(axes, run, entries)
    low, high = _limits(run, len(entries))
    axes.set_ylim(low, high)
    if before:  # what was drawn there already stays in sight
        (left, right), (bottom, top) = before
        axes.set_xlim(min(left, axes.get_xlim()[0]), max(right, axes.get_xlim()[1]))
        axes.set_ylim(min(bottom, low), max(top, high))


def _band(fit: Fit, end: float) -> Band:
    """The curve of a fit, from the evaluation before any training on, where there is one."""
    compute_N = fit.points.compute_N
    positive_N = compute_N[compute_N > 0]
    compute_M = np.geomspace(positive_N.min() / 2, max(float(compute_N.max()), end), _PLACES)
    if compute_N[0] <= 0:
        compute_M = np.insert(compute_M, 0, 0.0)
    return Band(compute_M, *fit.band(compute_M))


def _draw_band(axes: Axes, band: Band, colour: str) -> None:
    axes.fill_between(band.compute_M, band.lo_M, band.hi_M, color=colour, alpha=0.17, lw=0)
    axes.plot(band.compute_M, band.median_M, color=colour, lw=1.6)


def _draw_curve(axes: Axes, run: DrawnRun) -> list[Entry]:
    if run.frozen is not None:
        axes.axvspan(0, run.frozen.compute, color=WINDOW, lw=0, zorder=0)
    if (band := run.band) is None:
        return []
    _draw_band(axes, band, FORECAST)
    step = run.frozen.made_at_step if run.frozen else math.nan
    when = f"forecast, frozen at step {step:.0f}" if math.isfinite(step) else "forecast, as frozen"
    text = when if run.frozen else "fitted curve and its interval"
    return [(text, {"color": FORECAST, "lw": 6, "alpha": 0.4})]


def _draw_evaluations(axes: Axes, run: DrawnRun, size: float) -> list[Entry]:
    points, fit = run.points, run.fit
    used_N = points.compute_N <= (run.frozen.compute if run.frozen else math.inf)
    noise_N = np.nan_to_num(points.noise_sd_N)
    used = "evaluation that the forecast used" if run.frozen else "evaluation"
    entries = [(used + (" (bar: ±1 sd of its noise)" if noise_N.any() else ""), INK, INK)]
    if not used_N.all():
        entries.append(("evaluation made later", LATER, PAPER))
    for chosen_N, (_, colour, face) in zip((used_N, ~used_N), entries, strict=False):
        look = {"ms": size, "mfc": face, "mec": colour, "mew": 0.29 * size, "ecolor": colour}
        x_N, y_N = points.compute_N[chosen_N], points.pass_rate_N[chosen_N]
        axes.errorbar(x_N, y_N, yerr=noise_N[chosen_N], fmt="o", elinewidth=0.9, zorder=3, **look)
    if fit is not None and len(fit.excluded):
        axes.plot(fit.excluded.compute_N, fit.excluded.pass_rate_N, "o", ms=size, mfc="none", mec=MUTED)
        entries.append(("evaluation left out", MUTED, "none"))
    return [(text, {"color": colour, "marker": "o", "mfc": face}) for text, colour, face in entries]


def _draw_ceiling(axes: Axes, run: DrawnRun, named: bool) -> list[Entry]:
    """The ceiling with its interval, and the one that was known beforehand; the higher named from above."""
    A, (low, high), about = run.ceiling
    known = run.known_ceiling
    levels = [
        (known, f"ceiling known beforehand {rate(known)}", MUTED, (0, (1, 1.6))),
        (A, f"ceiling A {rate(A)}{about}", CEILING, (0, (6, 3))),
    ]
    levels = sorted((one for one in levels if math.isfinite(one[0])), key=lambda one: -one[0])
    for (height, text, colour, dashes), place in zip(levels, ("bottom", "top"), strict=False):
        axes.axhline(height, color=colour, lw=1.1, ls=dashes, zorder=1)
        if named:
            offset = 3 if place == "bottom" else -3
            note(axes, text, (0.012, height), "y", (0, offset), va=place, color=colour)
    if not math.isfinite(low + high):
        return []
    axes.axhspan(low, high, color=CEILING, alpha=0.1, lw=0, zorder=0)
    return [("interval of the ceiling", {"color": CEILING, "lw": 6, "alpha": 0.25})]


def _draw_change(axes: Axes, run: DrawnRun) -> list[Entry]:
    """Where the run leaves every curve, and the part that holds: a bar along the axis, and its own curve."""
    if run.fit is None or run.fit.misfit is None:
        return []
    at, said = run.fit.misfit.at, misfit_in_words(run.fit.lack_of_fit)
    entries: list[Entry] = []
    if at is not None:
        axes.axvline(at, color=LATER, lw=1.2, ls=_DASHES, zorder=1)
        said += f" at {unit_for(run.points.axis, run.end).show(at)}"
    entries.append((said, {"color": LATER, "lw": 1.2, "ls": "" if at is None else _DASHES}))
    if run.part is not None and run.fit.misfit.keep is not None:
        axes.axvspan(*run.fit.misfit.keep, ymax=0.014, color=CEILING, lw=0)
        _draw_band(axes, _band(run.part, 0.0), CEILING)
        entries.append(("curve of the part that holds (bar)", {"color": CEILING, "lw": 6, "alpha": 0.4}))
    return entries


def _draw_interval(axes: Axes, run: DrawnRun) -> list[Entry]:
    """An upright bar: the interval of one evaluation at the target of the frozen forecast."""
    if not (run.frozen and math.isfinite(run.frozen.width)):
        return []
    low, high = run.frozen.prediction
    look: dict[str, Any] = {"ecolor": FORECAST, "elinewidth": 1.6, "capsize": 5, "capthick": 1.6}
    place = [run.frozen.target_compute], [(low + high) / 2]
    axes.errorbar(*place, yerr=[(high - low) / 2], fmt="none", zorder=4, **look)
    return [("interval, one evaluation", {"color": FORECAST, "marker": "_", "ms": 8, "mew": 1.6})]


def _compute_axis(axes: Axes, run: DrawnRun, log: bool) -> None:
    """Ticks in a unit that keeps them short, on axes whose data stay in the unit of the fit."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    positive_N = run.points.compute_N[run.points.compute_N > 0]
    unit = unit_for(run.points.axis, run.end)
    shown = FuncFormatter(lambda value, _: plain(round(value / unit.size, 9)))
    if not log:
        axes.set_xlim(-0.015 * run.end, 1.03 * run.end)
        axes.set_xlabel(f"training compute ({unit.name})")
    else:
        axes.set_xlabel(f"{unit.name}, logarithmic")
        axes.tick_params(labelleft=False)
        if not positive_N.size:
            return
        axes.set_xscale("log")
        axes.set_xlim(positive_N.min() / 1.3, run.end * 1.15)
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(shown)


def _key(axes: Axes, run: DrawnRun, entries: Sequence[Entry]) -> None:
    """The key, in the corner that the curve leaves empty."""
    corner = "upper right" if _falls(run) else "lower right"
    signs = [_sign(**look) for _, look in entries]
    texts = [text for text, _ in entries]
    legend = axes.legend(signs, texts, loc=corner, frameon=True, handlelength=1.2)
    legend.get_frame().set(facecolor=PAPER, edgecolor="none", alpha=0.85)
    for sign, text in zip(signs, legend.get_texts(), strict=True):
        text.set_color(sign.get_color())


def _sign(color: str, **look: Any) -> Line2D:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=color, **{"ls": "" if "marker" in look else "-", "ms": 4.2, **look})


def _falls(run: DrawnRun) -> bool:
    return bool(run.points.pass_rate_N[-1] < run.points.pass_rate_N[0])


def _limits(run: DrawnRun, keys: int) -> tuple[float, float]:
    """From below the lowest to above the highest thing drawn, kept within a little around [0, 1]."""
    noise_N, rates_N = np.nan_to_num(run.points.noise_sd_N), run.points.pass_rate_N
    A, interval, _ = run.ceiling
    drawn: list[Any] = [rates_N - noise_N, rates_N + noise_N, [run.known_ceiling, A, *interval]]
    if run.frozen:
        drawn.append(run.frozen.prediction)
    if band := run.band:
        drawn += [band.lo_M, band.hi_M]
    lowest, highest = (float(bound(np.concatenate(drawn))) for bound in (np.nanmin, np.nanmax))
    margin = 0.08 * max(highest - lowest, 0.05)
    low, high = lowest - margin, min(highest + margin, 1.04)
    # Room for the key in the lower right corner: from a fifth of the width on, nothing lies as low.
    beside = rates_N[run.points.compute_N > 0.2 * run.end]
    if len(beside) and not _falls(run):
        height = 0.03 + 0.055 * keys
        low = min(low, (beside.min() - height * high) / (1 - height))
    return max(low, -0.03), high
