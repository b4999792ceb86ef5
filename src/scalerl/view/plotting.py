"""Fits on axes of matplotlib, as papers have them: `scalerl.plot`, `Fit.plot`, `Comparison.plot`.

Data stay in the unit of the compute axis, and limits and ticks are matplotlib's own, so that whatever a user
does to the axes afterwards (a scale, limits, more lines) holds.

Shapes: N evaluations of a run, M places of a curve.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from scalerl.curve.fit import fit as fit_curve
from scalerl.curve.result import Fit
from scalerl.errors import InputError
from scalerl.record.reader import unit_of
from scalerl.view.facts.notices import misfit_in_words, part_that_holds
from scalerl.view.numbers import rate, rate_interval
from scalerl.view.style import MUTED, inline_svg, new_figure, plain_rates, run_look, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE = (6.4, 4.0)
_PLACES = 70
_CURVE, _LATER = "scalerl-curve", "scalerl-later"
"""The gids of each recipe's line and of evaluations beyond a cut, by which later calls find them."""
_THIN: dict[str, Any] = {"lw": 0.9, "alpha": 0.45}
_BOLD: dict[str, Any] = {"lw": 1.8}


@dataclass(frozen=True)
class _DrawnRecipe:
    """A recipe on the axes: its fits (one for each seed), and how they look."""

    name: str
    fits: tuple[Fit, ...]
    colour: str
    marker: str
    places_M: np.ndarray

    @property
    def known(self) -> float:
        """The compute up to which every seed was fitted; curves are dashed beyond."""
        return min(float(fit.points.compute_N.max()) for fit in self.fits)

    @property
    def curves(self) -> list[Fit]:
        """The fits that have a curve: all but misfits."""
        return [fit for fit in self.fits if fit.misfit is None]

    def label(self, ceiling: bool) -> str:
        """The text of the key: the name, and the ceiling; of several seeds mean and standard deviation."""
        curves, n = self.curves, len(self.fits)
        seeds = f" ({n} seeds)" if n > 1 else ""
        if not curves:
            return f"{self.name}{seeds}: {misfit_in_words(self.fits[0].lack_of_fit)}"
        A = np.array([fit.median.A for fit in curves])
        spread = (
            rate_interval(curves[0].intervals.A)
            if n == 1
            else f"± {rate(A.std(ddof=1))}"
            if len(A) > 1
            else ""
        )
        doubt = "" if all(fit.identified for fit in curves) else ", not identified"
        return f"{self.name}{seeds}" + (f": A {rate(A.mean())} {spread}{doubt}" if ceiling else "")


def plot(
    fits: Any,
    x: str | None = None,
    *,
    log: bool = False,
    ax: Axes | None = None,
    color: str | Mapping[str, str] | None = None,
    label: str | None = None,
    ceiling: bool = True,
    forecast: float | Sequence[float] = (),
) -> Axes:
    """Draw fits as the figures of papers have them (arXiv 2510.13786, figures 1 and 2), recipes by colour.

    A curve is the posterior median, solid up to the last evaluation that was fitted and dashed beyond.
    Evaluations after the cut of a fit (`scalerl.fit(run, max_compute=...)`) are hollow. One fit has its
    interval as a band and the noise of its evaluations as bars; the seeds of a recipe are thin, with their
    mean. Of a run that no saturating curve describes, evaluations and the part that holds are drawn.

    Args:
        fits: a fit; several, the seeds of one recipe; or a dict from the names of recipes to either. A run,
            points or a data frame is fitted first, on `x`.
        x: the compute axis, where something is to be fitted; a fit has its own.
        log: whether compute is on a logarithmic axis. `axes.set_xscale` may change it later.
        ax: the axes to draw on; by default those of a new figure of pyplot.
        color: a colour of matplotlib, or a dict from the names of recipes. The default palette is safe for
            colour-blind readers, and a second call on the same axes continues it.
        label: the text of the key, for a single recipe; "" leaves it out.
        ceiling: whether ceilings are drawn, and given in the key.
        forecast: computes to which the curves go on, with the prediction interval of one evaluation there.

    Returns:
        The axes. Compute is in the unit of the axis.

    Raises:
        InputError: nothing is given, fits are on different axes, or a compute of `forecast` is no number of 0
            or more.
    """
    recipes = _recipes(fits, x, label)
    at: list[Any] = list(cast(Sequence[float], forecast)) if np.ndim(forecast) else [forecast]
    asked = {
        name: [[fit.forecast(compute) for compute in at] for fit in own] for name, own in recipes.items()
    }
    # On axes of a user's own his settings hold.
    with style() if ax is None else nullcontext():
        if ax is None:
            import matplotlib.pyplot as plt

            _, ax = plt.subplots(figsize=_SIZE, layout="constrained")
        taken = sum(line.get_gid() == _CURVE for line in ax.lines)
        for place, (name, own) in enumerate(recipes.items(), start=taken):
            colour, marker, _ = run_look(place)
            chosen = color.get(name) if isinstance(color, Mapping) else color
            ends = [compute for fit in own for one in (fit.points, fit.excluded) for compute in one.compute_N]
            drawn = _DrawnRecipe(name, own, chosen or colour, marker, _places([*ends, *at], log))
            _draw(ax, drawn, ceiling)
            for found in (one for seed in asked[name] for one in seed):
                _bar(ax, drawn, found.compute, found.prediction)
        _finish(ax, next(iter(recipes.values()))[0], log)
    return ax


def fit_svg(fit: Fit) -> str:
    """The plot of a fit as an `<svg>` element, its colours as they are."""
    with style():
        figure = new_figure(*_SIZE)
        figure.subplots_adjust(left=0.09, right=0.985, bottom=0.125, top=0.95)
        plot(fit, ax=figure.add_subplot())
    described = f"Pass rate against {fit.axis}, {fit.n_points} evaluations"
    return inline_svg(figure, "fit", described, themed=False)


def _recipes(fits: Any, x: str | None, label: str | None) -> dict[str, tuple[Fit, ...]]:
    """Return the fits of every recipe by name, at least one each, on one axis."""
    named = fits if isinstance(fits, Mapping) else {"fitted curve" if label is None else label: fits}
    if label is not None and isinstance(fits, Mapping):
        raise InputError("label is for a single recipe; the names of the dict are the labels of several")
    found: dict[str, tuple[Fit, ...]] = {}
    for name, own in named.items():
        listed = own if isinstance(own, Sequence) and not isinstance(own, str) else [own]
        found[str(name)] = tuple(one if isinstance(one, Fit) else fit_curve(one, x=x) for one in listed)
        if not found[str(name)]:
            raise InputError(f"recipe '{name}' has no fits")
    if not found:
        raise InputError("nothing to plot: give a fit, a list of fits, or a dict of them by recipe")
    axes = {fit.axis: name for name, own in found.items() for fit in own}
    if len(axes) > 1:
        (axis, name), (other, another) = list(axes.items())[:2]
        raise InputError(f"all fits need one compute axis: '{name}' is on {axis}, '{another}' on {other}")
    (axis,) = axes
    if x is not None and x != axis:
        raise InputError(f"the fits are on {axis}, not on {x}: fit the runs again, with x={x!r}")
    return found


def _places(ends: Iterable[float], log: bool) -> np.ndarray:
    """Return where curves are computed, (M,): dense on a linear and on a logarithmic axis.

    A line to compute 0 is flat on a logarithmic axis, where the curve is not: it has its end before that.
    """
    all_N = np.array(list(ends))
    positive_N = all_N[all_N > 0]
    first, last = float(positive_N.min()) / 2, float(positive_N.max())
    start = [0.0] if (all_N == 0).any() and not log else []
    return np.unique(
        np.concatenate([start, np.geomspace(first, last, _PLACES), np.linspace(first, last, _PLACES)])
    )


def _draw(ax: Axes, drawn: _DrawnRecipe, ceiling: bool) -> None:
    """Draw a recipe: evaluations, curves, ceiling."""
    many, curves = len(drawn.fits) > 1, drawn.curves
    for fit in drawn.fits:
        _evaluations(ax, drawn, fit)
    medians = []
    for fit in curves:
        median_M, low_M, high_M = fit.band(drawn.places_M)
        medians.append(median_M)
        if many:
            _line(ax, drawn, median_M, float(fit.points.compute_N.max()), **_THIN)
        else:
            ax.fill_between(drawn.places_M, low_M, high_M, color=drawn.colour, alpha=0.15, lw=0)
    label = drawn.label(ceiling) if drawn.name else "_"
    if curves:
        _line(ax, drawn, np.mean(medians, axis=0), drawn.known, label=label, gid=_CURVE, **_BOLD)
    else:
        ax.plot([], [], drawn.marker, color=drawn.colour, ls="--", label=label, gid=_CURVE)
    for fit in drawn.fits:
        _change(ax, drawn, fit)
    if ceiling and curves:
        A = float(np.mean([fit.median.A for fit in curves]))
        ax.axhline(A, color=drawn.colour, lw=1.0, ls=(0, (1, 2)), zorder=1)


def _evaluations(ax: Axes, drawn: _DrawnRecipe, fit: Fit) -> None:
    """Filled where they were fitted; hollow beyond the cut; crosses where they were left out otherwise."""
    many = len(drawn.fits) > 1
    look: dict[str, Any] = {"ms": 2.6 if many else 3.8, "alpha": 0.6 if many else 1.0, "zorder": 3}
    points, out = fit.points, fit.excluded
    noise_N = np.nan_to_num(points.noise_sd_N)
    if many or not noise_N.any():
        ax.plot(points.compute_N, points.pass_rate_N, drawn.marker, color=drawn.colour, **look)
    else:
        bars = {"color": drawn.colour, "fmt": drawn.marker, "elinewidth": 0.9}
        ax.errorbar(points.compute_N, points.pass_rate_N, yerr=noise_N, **bars, **look)
    later_N = out.compute_N > fit.max_compute
    hollow = look | {"mfc": "none", "mec": drawn.colour, "mew": 0.9, "alpha": 0.9}
    ax.plot(out.compute_N[later_N], out.pass_rate_N[later_N], drawn.marker, gid=_LATER, **hollow)
    ax.plot(out.compute_N[~later_N], out.pass_rate_N[~later_N], "x", color=MUTED, ms=4)


def _line(ax: Axes, drawn: _DrawnRecipe, value_M: np.ndarray, known: float, **look: Any) -> None:
    """A curve, solid up to `known` and dashed beyond."""
    x_M, label = drawn.places_M, look.pop("label", "_")
    seen_M, beyond_M = x_M <= known, x_M >= known
    ax.plot(x_M[seen_M], value_M[seen_M], color=drawn.colour, label=label, **look)
    if beyond_M.sum() > 1:
        ax.plot(
            x_M[beyond_M], value_M[beyond_M], color=drawn.colour, **(look | {"gid": None, "ls": (0, (4, 2))})
        )


def _change(ax: Axes, drawn: _DrawnRecipe, fit: Fit) -> None:
    """Where a run leaves every curve, and the curve of the part that holds."""
    if fit.misfit is None:
        return
    if fit.misfit.at is not None:
        ax.axvline(fit.misfit.at, color=drawn.colour, lw=1.0, ls="--", zorder=1)
    if (part := part_that_holds(fit)) is not None:
        own_N = part.points.compute_N
        part_M = drawn.places_M[(drawn.places_M >= own_N.min()) & (drawn.places_M <= own_N.max())]
        ax.plot(part_M, part.band(part_M)[0], color=drawn.colour, **_THIN)


def _bar(ax: Axes, drawn: _DrawnRecipe, compute: float, interval: tuple[float, float]) -> None:
    """The interval of one evaluation at a compute to come."""
    low, high = interval
    look = _THIN["alpha"] if len(drawn.fits) > 1 else 1.0
    bar: dict[str, Any] = {
        "ecolor": drawn.colour,
        "elinewidth": 1.4,
        "capsize": 4,
        "fmt": "none",
        "alpha": look,
    }
    ax.errorbar([compute], [(low + high) / 2], yerr=[(high - low) / 2], zorder=4, **bar)


def _finish(ax: Axes, fit: Fit, log: bool) -> None:
    """Labels, scale and key."""
    from matplotlib.lines import Line2D

    what = "training reward" if fit.metric.no_verdict else "pass rate on the held-out prompts"
    ax.set(xlabel=f"training compute ({unit_of(fit.axis)})", ylabel=what)
    plain_rates(ax)
    if log:
        ax.set_xscale("log")
    handles, labels = ax.get_legend_handles_labels()
    if any(line.get_gid() == _LATER and np.size(line.get_xdata()) for line in ax.lines):
        handles.append(Line2D([], [], ls="", marker="o", mfc="none", mec=MUTED, ms=3.8))
        labels.append("evaluation after the cut")
    if labels:
        falls = fit.points.pass_rate_N[-1] < fit.points.pass_rate_N[0]
        corner = "upper right" if falls else "lower right"  # the one that the curve leaves empty
        ax.legend(handles, labels, loc=corner, framealpha=0.85, edgecolor="none")
