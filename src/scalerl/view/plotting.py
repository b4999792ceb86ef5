"""Fits on axes of matplotlib: `scalerl.plot`, `Fit.plot`, `Comparison.plot`, and every figure of a file.

Data stay in the unit of the compute axis, and `plot` leaves limits and ticks to matplotlib, so that users can
change the axes afterwards (a scale, limits, more lines).

Shapes: N evaluations of a run, M places of a curve.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from scalerl.curve.fit import fit as fit_curve
from scalerl.curve.result import Fit
from scalerl.errors import InputError, brief
from scalerl.forecast.compare import check_copies
from scalerl.numbers import rate
from scalerl.record.evaluation import unit_of
from scalerl.view.facts.frozen import Band
from scalerl.view.facts.notices import misfit_in_words
from scalerl.view.facts.sampled import places_between, thin
from scalerl.view.facts.shown import RunGroup, ShownRun
from scalerl.view.style import LATER, MUTED, inline_svg, new_figure, plain_rates, run_look, style
from scalerl.view.table import seeds_cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import BboxBase

_SIZE = (6.4, 4.0)
_CURVE, _LATER = "scalerl-curve", "scalerl-later"
"""Gids of each recipe's line and of evaluations beyond a cut, by which later calls find them."""
_SEEN, _AHEAD, _LEVEL = "scalerl-seen", "scalerl-ahead", "scalerl-level"
"""Gids of fitted evaluations, of curves beyond them, and of ceilings, which the key explains."""
_THIN: dict[str, Any] = {"lw": 0.9, "alpha": 0.45}
_BOLD: dict[str, Any] = {"lw": 1.8}
_DASHED, _DOTTED = (0, (4, 2)), (0, (1, 2))
_CROWD = 120
"""If a recipe has more evaluations, they are drawn faint, so that its curve stays visible."""
_LEAST_LETTERS = 5.5
"""Smallest font size of a key, in points."""
_COMPUTE = "training compute"
RATE = "pass rate on the held-out prompts"


@dataclass(frozen=True, kw_only=True, eq=False)
class DrawnCurve(RunGroup):
    """A run, or the seeds of a recipe, with its look; the name appears in the key unless it is empty."""

    look: tuple[str, str, str]
    """Colour, marker and dashes."""
    compute_M: np.ndarray
    """Computes at which the curves are drawn."""
    band: Band | None = None
    """The mean curve with its interval; None for the curves of the fits."""
    cut: float = math.inf
    """Compute after which evaluations are later than the curve, beside the cut of the fit itself."""
    most: int = 100_000
    """Largest number of drawn evaluations per run."""

    @property
    def known(self) -> float:
        """The compute up to which every seed was measured and fitted; curves are dashed beyond."""
        return min(self.cut, *(float(run.used.compute_N.max(initial=0.0)) for run in self.runs))

    @property
    def curves(self) -> list[Fit]:
        """The fits that have a curve: all except misfits."""
        return [fit for fit in self.fits if fit.misfit is None]

    @property
    def misfits(self) -> list[Fit]:
        """The fits that are misfits; a recipe with a misfit among its seeds has no mean curve."""
        return [fit for fit in self.fits if fit.misfit is not None]

    def label(self, ceiling: bool) -> str:
        """Return the text of the key: name and ceiling, for several seeds as mean and standard deviation."""
        curves, n = self.curves, len(self.fits)
        name = f"\u200b{self.name}" if self.name.startswith("_") else self.name  # a key leaves `_name` out
        name += f" ({n} seeds)" * (n > 1)
        if self.band is None and self.misfits:
            of = f" ({len(self.misfits)} of {n})" if n > 1 else ""
            return f"{name}: {misfit_in_words(self.misfits[0].lack_of_fit)}{of}"
        if self.band is None and not curves:
            return f"{name}: no curve"
        if not ceiling or not curves:
            return name
        A = seeds_cell([(fit.median.A, fit.intervals.A) for fit in curves], rate).whole
        return f"{name}: A {A}{'' if all(fit.identified for fit in curves) else ', not identified'}"


def plot(
    fits: Any,
    x: str | None = None,
    *,
    log: bool = False,
    ax: Axes | None = None,
    color: str | Mapping[str, str] | None = None,
    label: str | None = None,
    ceiling: bool = True,
    forecast: float | str | Sequence[float | str] = (),
    legend: bool = True,
) -> Axes:
    """Draw fits like the figures of papers (arXiv 2510.13786, figures 1 and 2), with a colour per recipe.

    A curve is the posterior median, solid up to the last fitted evaluation and dashed beyond. Evaluations
    after the cut of a fit (`scalerl.fit(run, max_compute=...)`) are hollow. A recipe with one fit has its
    interval as a band and the noise of its evaluations as bars. The seeds of a recipe are thin curves with
    their mean, without band and bars. If no saturating curve describes a run, its evaluations and the part
    that holds are drawn, and its recipe has no mean.

    Args:
        fits: a fit; several fits, as the seeds of one recipe; or a dict from the names of recipes to either.
            A run, points or a data frame is fitted first, on `x`.
        x: the compute axis for anything that has to be fitted; a fit has its own.
        log: whether compute is on a logarithmic axis; `axes.set_xscale` can change it later.
        ax: the axes to draw on; defaults to those of a new pyplot figure.
        color: a matplotlib colour, or a dict of them by recipe. The default palette is safe for colour-blind
            readers, and a second call on the same axes continues it.
        label: the text in the key for a single recipe; "" leaves it out.
        ceiling: whether to draw ceilings, and give them in the key.
        forecast: computes to which curves are extended, with the prediction interval of one evaluation there.
        legend: whether to draw a key. If it would cover the curves, it goes below the axes, smaller if
            needed; `fig.tight_layout()` or `layout="constrained"` makes room for it.

    Returns:
        The axes, with compute in the unit of the compute axis.

    Raises:
        InputError: nothing is given, a run is given twice, fits are on different axes (also those drawn on
            `ax` before), `ax` is not one Axes, or a compute of `forecast` is not a number of 0 or more.
    """
    if label is not None and isinstance(fits, Mapping):
        raise InputError("label is for a single recipe; the names of the dict are the labels of several")
    one = "fitted curve" if label is None else label
    recipes = fitted_recipes(fits if isinstance(fits, Mapping) else {one: fits}, x)
    at: list[Any] = list(cast(Sequence[float], forecast)) if np.ndim(forecast) else [forecast]
    asked = {name: [fit.forecast(compute) for fit in own for compute in at] for name, own in recipes.items()}
    # Axes passed by the user keep the user's style settings.
    figure = None
    with style() if ax is None else nullcontext():
        if ax is None:
            import matplotlib.pyplot as plt

            figure, ax = plt.subplots(figsize=_SIZE, layout="constrained")
        elif not hasattr(ax, "get_xlabel"):  # the array that plt.subplots(1, 2) returns, say
            raise InputError(f"ax must be one Axes of matplotlib (axes[0] of several), found {brief(ax)}")
        taken = sum(line.get_gid() == _CURVE for line in ax.lines)
        name, before = _compute_label(next(iter(recipes.values()))[0].axis), ax.get_xlabel()
        if taken and before != name and before.startswith(_COMPUTE):
            raise InputError(f"these axes have curves over {before}: draw those over {name} elsewhere")
        for place, (name, own) in enumerate(recipes.items(), start=taken):
            colour, *look = run_look(place)
            chosen = color.get(name) if isinstance(color, Mapping) else color
            places_M = _places(own, [one.compute for one in asked[name]], log)
            runs = tuple(ShownRun(name, fit.points, fit=fit) for fit in own)
            drawn = DrawnCurve(name, runs, look=(chosen or colour, look[0], "-"), compute_M=places_M)
            draw(ax, drawn, ceiling)
            for found in asked[name]:
                draw_interval(ax, drawn, found.compute, found.prediction)
        _finish(ax, next(iter(recipes.values()))[0], log, legend)
        if figure is not None and (key := ax.get_legend()) and (box := key.get_window_extent()).y0 < 0:
            # Enlarge the figure, as a long key below the axes would leave no room for the curves.
            figure.set_figheight(max(_SIZE[1], box.height / figure.dpi + 0.6 * _SIZE[1]))
    return ax


def fit_svg(fit: Fit) -> str:
    """Return the plot of a fit as an `<svg>` element with fixed colours."""
    with style():
        figure = new_figure(*_SIZE)
        figure.subplots_adjust(left=0.09, right=0.985, bottom=0.125, top=0.95)
        key = plot(fit, ax=figure.add_subplot()).get_legend()
        if key is not None and (low := key.get_window_extent().y0) < 0:
            figure.subplots_adjust(bottom=0.14 - low / figure.bbox.height)
    described = f"Pass rate against {fit.axis}, {fit.n_points} evaluations"
    return inline_svg(figure, "fit", described, themed=False)


def fitted_recipes(named: Mapping[Any, Any], x: str | None = None) -> dict[str, tuple[Fit, ...]]:
    """Return the fits of every recipe by name, at least one each, all on one axis; runs are fitted.

    Raises:
        InputError: there are none, a run is given twice, or fits are on different axes.
    """
    found: dict[str, tuple[Fit, ...]] = {}
    for name, own in named.items():
        listed = own if isinstance(own, Sequence) and not isinstance(own, str) else [own]
        found[str(name)] = tuple(one if isinstance(one, Fit) else fit_curve(one, x=x) for one in listed)
        if not found[str(name)]:
            raise InputError(f"recipe '{name}' has no fits")
    if not found:
        raise InputError("there is nothing to show: give a fit, a list of fits, or a dict of them by recipe")
    axes = {fit.axis: name for name, own in found.items() for fit in own}
    if len(axes) > 1:
        (axis, name), (other, another) = list(axes.items())[:2]
        raise InputError(f"all fits need one compute axis: '{name}' is on {axis}, '{another}' on {other}")
    (axis,) = axes
    if x is not None and x != axis:
        raise InputError(f"the fits are on {axis}, not on {x}: fit the runs again, with x={x!r}")
    check_copies(found)
    return found


def _places(fits: Iterable[Fit], at: Sequence[float], log: bool) -> np.ndarray:
    """Return the computes of a drawn curve, (M,), up to the last evaluation or forecast.

    On a logarithmic axis compute 0 is left out, as the line to it would be flat where the curve is not.
    """
    all_N = np.sort(
        [compute for fit in fits for one in (fit.points, fit.excluded) for compute in one.compute_N]
    )
    compute_M = places_between(all_N, max([float(all_N[-1]), *at]))
    return compute_M[compute_M > 0] if log else compute_M


def draw(ax: Axes, drawn: DrawnCurve, ceiling: bool = True) -> None:
    """Draw a run or recipe: evaluations, curves, and the ceiling as a level."""
    many, curves, colour = len(drawn.runs) > 1, drawn.curves, drawn.look[0]
    for run in drawn.runs:
        _evaluations(ax, drawn, run)
    look: dict[str, Any] = {"label": drawn.label(ceiling) if drawn.name else "_", "gid": _CURVE, **_BOLD}
    band = drawn.band
    own = curves if many or band is None else []
    bands = [Band(drawn.compute_M, *fit.band(drawn.compute_M)) for fit in own]
    for fit, one in zip(own, bands, strict=True) if many else ():
        _line(ax, drawn, one, float(fit.points.compute_N.max()), **_THIN)
    if band is None and curves and not drawn.misfits:
        mean = np.mean([one.median_M for one in bands], axis=0)
        band = Band(drawn.compute_M, mean, *((mean, mean) if many else (bands[0].lo_M, bands[0].hi_M)))
    if band is None:
        look["lw"] = 1.0
        ax.plot([], [], drawn.look[1], color=colour, ls="--", **look)
    else:
        if (band.hi_M > band.lo_M).any():
            ax.fill_between(band.compute_M, band.lo_M, band.hi_M, color=colour, alpha=0.15, lw=0, zorder=1)
        _line(ax, drawn, band, drawn.known, **look)
    _changes(ax, drawn)
    if ceiling and curves and not drawn.misfits:
        A = float(np.mean([fit.median.A for fit in curves]))
        ax.axhline(A, color=colour, lw=1.0, ls=_DOTTED, zorder=1, gid=_LEVEL)


def _evaluations(ax: Axes, drawn: DrawnCurve, run: ShownRun) -> None:
    """Draw evaluations: filled if fitted, hollow beyond the cut, crosses if left out for another reason."""
    colour, marker, _ = drawn.look
    used, fit = run.used, run.fit
    out = fit.excluded if fit is not None else used.select(np.zeros(len(used), dtype=bool))
    cut = drawn.cut if fit is None else min(drawn.cut, fit.max_compute)
    many = len(drawn.runs) > 1
    crowd = sum(len(one.used) for one in drawn.runs) > _CROWD
    look = {"color": colour, "ms": 2.6 if many else 3.8, "alpha": 0.32 if crowd else 0.6 if many else 1.0}
    look["gid"] = _SEEN
    late = LATER if math.isfinite(drawn.cut) else colour
    hollow = look | {"color": late, "mfc": "none", "mew": 0.9, "alpha": 0.9, "gid": _LATER}
    crosses = {"color": MUTED, "ms": 4, "fmt": "x"}
    layers = (used, False, look), (used, True, hollow), (out, True, hollow), (out, False, crosses)
    for points, is_later, sign in layers:
        chosen = np.flatnonzero((points.compute_N > cut) == is_later)
        if not chosen.size:
            continue
        chosen = chosen[np.argsort(points.compute_N[chosen], kind="stable")]
        chosen = chosen[thin(points.pass_rate_N[chosen], drawn.most)]
        noise_N = np.nan_to_num(points.noise_sd_N[chosen])
        bars: dict[str, Any] = {"yerr": noise_N, "elinewidth": 0.9} if noise_N.any() and not many else {}
        place = points.compute_N[chosen], points.pass_rate_N[chosen]
        ax.errorbar(*place, **({"fmt": marker, "zorder": 3, "ls": "", **sign} | bars))


def _line(ax: Axes, drawn: DrawnCurve, band: Band, known: float, **look: Any) -> None:
    """Draw a curve, solid up to `known` and dashed beyond."""
    colour, _, dashes = drawn.look
    until = int(np.searchsorted(band.compute_M, known * (1 + 1e-9), side="right"))
    seen, beyond = slice(0, until), slice(max(until - 1, 0), None)
    ax.plot(band.compute_M[seen], band.median_M[seen], color=colour, ls=dashes, **look)
    if len(band.compute_M[beyond]) > 1:
        later = look | {"gid": _AHEAD, "ls": _DASHED, "label": "_"}
        ax.plot(band.compute_M[beyond], band.median_M[beyond], color=colour, **later)


def _changes(ax: Axes, drawn: DrawnCurve) -> None:
    """Mark where runs leave every family of curves, and draw the curves of the parts that hold."""
    for fit in drawn.misfits:
        if fit.misfit and fit.misfit.at is not None:
            ax.axvline(fit.misfit.at, color=drawn.look[0], lw=1.0, ls="--", zorder=1)
    for part in filter(None, (run.part for run in drawn.runs)):
        own_N = part.points.compute_N
        part_M = drawn.compute_M[(drawn.compute_M >= own_N.min()) & (drawn.compute_M <= own_N.max())]
        ax.plot(part_M, part.band(part_M)[0], color=drawn.look[0], **_THIN)


def draw_interval(ax: Axes, drawn: DrawnCurve, compute: float, interval: tuple[float, float]) -> None:
    """Draw the interval of one evaluation at a future compute, as a vertical bar with caps."""
    low, high = interval
    bar: dict[str, Any] = {"ecolor": drawn.look[0], "elinewidth": 1.4, "capsize": 4, "fmt": "none"}
    bar |= {"zorder": 4, "alpha": _THIN["alpha"] if len(drawn.runs) > 1 else 1.0}
    ax.errorbar([compute], [(low + high) / 2], yerr=[(high - low) / 2], **bar)


def key_of(
    ax: Axes, later: str = "evaluation after the cut", brief: bool = False
) -> tuple[list[Any], list[str]]:
    """Return the handles and labels of the key of these axes; `later` is the label of hollow evaluations.

    A sign shared by all curves has their colour, or is grey if they have several. Of these signs, a `brief`
    key has only that of hollow evaluations.
    """
    from matplotlib.colors import to_hex
    from matplotlib.lines import Line2D

    handles, labels = ax.get_legend_handles_labels()
    dot: dict[str, Any] = {"ls": "", "marker": "o", "ms": 3.8}
    signs: dict[str, tuple[str, dict[str, Any]]] = {
        _SEEN: ("evaluation", dot),
        _LATER: (later, dot | {"mfc": "none"}),
        _AHEAD: ("forecast", {"ls": _DASHED}),
        _LEVEL: ("ceiling A", {"ls": _DOTTED, "lw": 1.0}),
    }
    for gid, (text, look) in signs.items() if labels else ():
        if brief and gid != _LATER:
            continue
        if found := {to_hex(line.get_color()) for line in ax.lines if line.get_gid() == gid}:
            handles.append(Line2D([], [], color=found.pop() if len(found) == 1 else MUTED, **look))
            labels.append(text)
    return handles, labels


def _covers(box: BboxBase, ax: Axes) -> bool:
    """Return whether a curve or an evaluation is in the box, which is in pixels; levels do not count."""
    ax.get_xlim()  # updates the limits after the last drawing
    lines = (np.asarray(line.get_xydata()) for line in ax.lines)
    shown = (ax.transData.transform(place_N2) for place_N2 in lines if len(place_N2) > 2)
    return any(box.count_contains(place_N2) > 0 for place_N2 in shown)


def _compute_label(axis: str) -> str:
    return f"{_COMPUTE} ({unit_of(axis)})"


def _finish(ax: Axes, fit: Fit, log: bool, legend: bool) -> None:
    """Set the labels and the scale, and add the key."""
    what = "training reward" if fit.metric.no_verdict else "pass rate"
    ax.set(xlabel=_compute_label(fit.axis), ylabel=what)
    plain_rates(ax)
    if log:
        ax.set_xscale("log")
    handles, labels = key_of(ax)
    if labels and legend:
        falls = fit.points.pass_rate_N[-1] < fit.points.pass_rate_N[0]
        corner = "upper right" if falls else "lower right"  # the one that the curve leaves empty
        look: dict[str, Any] = {"framealpha": 0.85, "edgecolor": "none"}
        key = ax.legend(handles, labels, loc=corner, **look)
        inside, frame = key.get_window_extent(), ax.get_window_extent()
        if inside.width > frame.width or _covers(inside, ax):
            own = float(key.get_texts()[0].get_fontsize())
            # Two columns need less height; if they do not fit, use a brief key.
            for look["ncols"], brief in ((2, False), (1, True)):
                handles, labels = key_of(ax, brief=brief)
                width = ax.legend(handles, labels, **look).get_window_extent().width
                letters = own * min(1.0, max(frame.width / width, _LEAST_LETTERS / own))
                if letters > _LEAST_LETTERS:
                    break
            # Below the tick labels and the axis name, whose height is estimated: they are not laid out yet.
            gap = (12 + 2.6 * float(ax.xaxis.label.get_fontsize())) / letters
            look |= {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0), "borderaxespad": gap}
            ax.legend(handles, labels, fontsize=letters, **look)
