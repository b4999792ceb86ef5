"""The figures of a study (curves are in `scalerl.view.runs.figures`), and the data of its chart.

forest      every arm against the base: as measured, in ceiling and in efficiency, with intervals
forecasts   forecast against measured pass rates, by the share of the compute at which they were made
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from scalerl.forecast.comparison import Claim, Difference, Pair
from scalerl.forecast.sides import all_described
from scalerl.numbers import MINUS, percent, unit_for
from scalerl.study.verdict.forecast_scores import JudgedForecast
from scalerl.study.verdict.verdict import StudyVerdict
from scalerl.view.facts.notices import claim_text, is_made
from scalerl.view.facts.shown import RunGroup
from scalerl.view.runs.figures import drawn_groups, framed, linearised_figure
from scalerl.view.runs.overlay import overlay
from scalerl.view.style import FORECAST, INK, LATER, MUTED, PAPER, new_figure, plain_rates, short_names, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_ROW, _MARGIN = 0.34, 0.72  # inches
_WIDEST_RATIO = 20.0
"""Largest ratio in the forest plot; longer intervals end in an arrow at its edge."""


@dataclass(frozen=True)
class StudyFigure:
    """A figure with its name (for files and ids), title and caption."""

    name: str
    title: str
    figure: Figure
    caption: str = ""


def study_figures(verdict: StudyVerdict) -> list[StudyFigure]:
    """Return all figures that have something to show, in the order of the page."""
    unit = unit_for(verdict.axis, verdict.budget)
    curves = drawn_groups(arm_groups(verdict), verdict.budget, verdict.level)
    lines, about_lines = linearised_figure(curves, unit) or (None, "")
    made = (
        ("forest", "Differences to the base", forest_figure(verdict), _FOREST),
        ("overlay", "Pass rate against compute", framed(curves, unit) if curves else None, ""),
        ("linearised", "The linearised curve", lines, about_lines),
        ("forecasts", "Forecast against measured", forecasts_figure(verdict), _FORECASTS),
    )
    return [StudyFigure(name, title, figure, said) for name, title, figure, said in made if figure]


_FOREST = (
    "Against the base. Thin line: interval over seeds. Thick: of these very runs, the variance between seeds "
    "left out. Filled: a verdict that holds for all arms together; hollow: not significant; diamond: "
    "inconclusive. Right of each line: the verdict, its p corrected for all questions, and how many seeds of "
    "each side would detect a difference of this size."
)
_FOREST_PANELS = (
    ("measured", "measured at the budget, difference"),
    ("A", "ceiling A, difference"),
    ("compute_to_own", "compute to 3/4 of own gain, ratio"),
)
_FORECASTS = (
    "Every forecast as it was frozen, its median with the prediction interval, against the evaluation that "
    "came of it. Filled: inside; hollow: outside. On the line the two are equal."
)


def forest_figure(verdict: StudyVerdict) -> Figure | None:
    """Draw differences as measured and in A, and ratios of compute to an arm's own gain; None if empty."""
    rows = [(arm.name, pair) for arm in verdict.arms if (pair := verdict.pairs.get(arm.name))]
    if not rows:
        return None
    known = short_names([arm.name for arm in verdict.arms])
    names = [known[name] for name, _ in rows]
    height = _MARGIN + _ROW * len(rows)
    with style():
        figure = new_figure(12.0, height)
        left = 0.016 + 0.0062 * max(map(len, names))
        figure.subplots_adjust(left=left, right=0.88, bottom=0.34 / height, top=1 - 0.3 / height, wspace=0.76)
        panels: Sequence[Axes] = figure.subplots(1, 3, sharey=True)
        for panel, (quantity, label) in zip(panels, _FOREST_PANELS, strict=True):
            effects = [_effect_of(verdict, name, pair, quantity) for name, pair in rows]
            _forest_panel(panel, effects, label)
            panel.tick_params(labelleft=panel is panels[0])
        panels[0].set_yticks(range(len(rows)), names, color=INK)
        panels[0].set_ylim(len(rows) - 0.5, -0.5)
    return figure


def _effect_of(
    verdict: StudyVerdict, name: str, pair: Pair, quantity: str
) -> tuple[Difference | None, Claim | None]:
    if quantity != "measured":
        return pair.differences.get(quantity), pair.claims[quantity]
    found = verdict.measured.get(name)
    return (found.difference, found.claim) if found else (None, None)


def _forest_panel(axes: Axes, rows: Sequence[tuple[Difference | None, Claim | None]], label: str) -> None:
    ratio = any(found.kind == "ratio" for found, _ in rows if found)
    none = 1.0 if ratio else 0.0
    low, high = _range([found for found, _ in rows if found], none, ratio)
    if ratio:
        axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.axvline(none, color=MUTED, lw=1.0, zorder=1)
    for place, (found, claim) in enumerate(rows):
        colour = MUTED
        text = "withheld" if claim else "not measured"
        if found is not None and claim is not None:
            colour, text = _effect(axes, place, found, claim, (low, high)), claim_text(claim)
        beside = axes.get_yaxis_transform()
        axes.text(1.02, place, text, va="center_baseline", color=colour, transform=beside)
    axes.set_title(label, color=MUTED, loc="left", fontsize=9)
    axes.grid(visible=False, axis="y")
    axes.tick_params(left=False)
    axes.spines["left"].set_visible(False)
    _forest_ticks(axes, ratio)


def _effect(axes: Axes, place: int, found: Difference, claim: Claim, ends: tuple[float, float]) -> str:
    """Draw one line of the plot, with an arrow at each end beyond the frame; return its colour."""
    sure = is_made(claim)
    colour = FORECAST if sure else INK if claim.verdict == "not significant" else MUTED
    low, high = ends
    for interval, width in ((found.interval, 1.1), (found.runs_only, 3.4)):
        inside = np.clip(interval, low, high)
        axes.plot(inside, [place, place], color=colour, lw=width, solid_capstyle="butt", zorder=3)
    for leaves, edge, sign in ((found.interval[0] < low, low, "<"), (found.interval[1] > high, high, ">")):
        if leaves:
            axes.plot([edge], [place], sign, ms=6, color=colour, clip_on=False, zorder=4)
    if low <= found.median <= high:
        marker = "D" if claim.verdict == "inconclusive" else "o"
        face = colour if sure else PAPER
        axes.plot([found.median], [place], marker, ms=7, mfc=face, mec=colour, mew=1.4, zorder=5)
    return colour


def _range(found: Sequence[Difference], none: float, ratio: bool) -> tuple[float, float]:
    """Return limits for all intervals and for no difference; ratios are spaced by logarithm, and clipped."""
    values = np.array([none, *(end for one in found for end in (*one.interval, *one.runs_only))])
    if ratio:
        values = np.log(np.clip(values, 1 / _WIDEST_RATIO, _WIDEST_RATIO))
    values = values[np.isfinite(values)]
    low, high = float(values.min()), float(values.max())
    margin = 0.08 * max(high - low, 0.05)
    ends = low - margin, high + margin
    return (math.exp(ends[0]), math.exp(ends[1])) if ratio else ends


def _forest_ticks(axes: Axes, ratio: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    low, high = axes.get_xlim()
    far = ratio and high > 6 * low
    axes.xaxis.set_major_locator(
        LogLocator(subs=(1.0, 2.0, 5.0), numticks=6) if far else MaxNLocator(4, steps=[1, 2, 5, 10])
    )
    axes.xaxis.set_minor_locator(NullLocator())
    shown = "×{:g}" if ratio else "{:+.3g}"
    show = FuncFormatter(lambda value, _: shown.format(value).replace("-", MINUS) if value else "0")
    axes.xaxis.set_major_formatter(show)


def forecasts_figure(verdict: StudyVerdict) -> Figure | None:
    """Draw a panel for each share of the compute; None if no forecast has an outcome yet."""
    groups = _by_share(verdict)
    if not groups:
        return None
    columns = min(len(groups), 4)
    rows = math.ceil(len(groups) / columns)
    with style():
        width, height = 0.9 + 2.9 * columns, 0.5 + 2.7 * rows
        figure = new_figure(width, height)
        figure.subplots_adjust(0.6 / width, 0.5 / height, 1 - 0.1 / width, 1 - 0.3 / height)
        panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
        for axes, (share, group) in zip(panels, groups, strict=False):
            _forecast_panel(axes, share, group)
        for axes in panels[len(groups) :]:
            axes.remove()
        figure.supxlabel("measured pass rate", fontsize=9, color=MUTED, y=0.08 / height)
        figure.supylabel("forecast", fontsize=9, color=MUTED, x=0.06 / width)
    return figure


def _by_share(verdict: StudyVerdict) -> list[tuple[float, list[JudgedForecast]]]:
    """Return forecasts with an outcome, grouped by the nearest of the shares by which they are scored."""
    known = [judged for judged in verdict.forecasts if judged.outcome.inside is not None]
    shares = sorted({score.share for score in verdict.scores})
    shares = shares or sorted({round(judged.forecast.share, 2) for judged in known})
    groups: dict[float, list[JudgedForecast]] = {}
    for judged in known:
        nearest = min(shares, key=lambda share, made=judged.forecast.share: abs(share - made))
        groups.setdefault(nearest, []).append(judged)
    return sorted(groups.items())


def _forecast_panel(axes: Axes, share: float, group: Sequence[JudgedForecast]) -> None:
    for inside, colour, face in ((True, FORECAST, FORECAST), (False, LATER, PAPER)):
        chosen = [judged for judged in group if judged.outcome.inside is inside]
        at = [judged.outcome.measured.pass_rate for judged in chosen if judged.outcome.measured]
        if not at:
            continue
        interval = np.array([judged.forecast.prediction for judged in chosen])
        median = np.array([judged.forecast.median for judged in chosen])
        # A forecast stored without its median is drawn at the middle of its interval.
        median = np.where(np.isfinite(median), median, interval.mean(axis=1))
        axes.vlines(at, interval[:, 0], interval[:, 1], color=colour, lw=1.0, alpha=0.55, zorder=2)
        axes.plot(at, median, "o", ms=4.2, mfc=face, mec=colour, mew=1.1, zorder=3)
    axes.axline((0.5, 0.5), slope=1, color=MUTED, lw=0.9, zorder=1)
    held = sum(judged.outcome.inside is True for judged in group)
    axes.set_title(f"made at {percent(share)}: {held} of {len(group)} inside", loc="left", color=INK)
    plain_rates(axes)
    plain_rates(axes, axes.xaxis)


def arm_groups(verdict: StudyVerdict) -> list[RunGroup]:
    """Return the arms that have evaluations, with their mean curves over seeds; the base comes first.

    Evaluations of a run are shown even without a fit, as a failed run is part of the arm.
    """
    found = []
    for arm in verdict.arms:
        runs = tuple(run.shown for run in arm.runs if run.shown is not None)
        draws = arm.draws if all_described(arm.fits) and len(runs) > 1 else None
        if runs:
            found.append(RunGroup(arm.name, runs, draws))
    return sorted(found, key=lambda group: group.name != verdict.study.plan["base"])


def study_chart(verdict: StudyVerdict) -> dict[str, Any] | None:
    """Return the data of the chart, arms being groups (`scalerl.view.runs.overlay`); None without a run."""
    groups = arm_groups(verdict)
    runs = [run for group in groups for run in group.runs]
    target = verdict.study.plan.get("target")
    return overlay(runs, budget=verdict.budget, target=target, groups=groups) if runs else None
