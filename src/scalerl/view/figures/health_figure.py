"""The health of a training over its steps, as small multiples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from scalerl.record.alarms import Alarm
from scalerl.view.numbers import as_float, as_mapping, plain
from scalerl.view.style import FORECAST, INK, LATER, MUTED, apart, inline_svg, new_figure, note, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Steps = Sequence[Mapping[str, Any]]
"""The parsed lines of steps.jsonl."""

_COLUMNS = 4
_APART = 0.16
"""Between the labels of two lines, in heights of a panel."""
_LONGEST_LINE = 400
"""Points drawn per line; a longer run is drawn in blocks of steps."""


Values = Callable[[Steps], np.ndarray]
"""A figure of every step, shape (n,); NaN where it is not known."""


@dataclass(frozen=True)
class HealthLine:
    """One line of a panel: a key of the steps or a function of them, and its name among several lines."""

    of: str | Values
    name: str = ""
    largest: bool = False
    """The line shows maxima or a stock: blocks of steps keep the largest, and nothing is smoothed."""

    def values(self, steps: Steps) -> np.ndarray:
        """Return the value at every step, shape (n,)."""
        return _field(steps, self.of) if isinstance(self.of, str) else self.of(steps)


@dataclass(frozen=True)
class Panel:
    """One small multiple.

    `scale` multiplies what is stored (100 for shares in per cent). The axis starts at zero, so that noise
    is not blown up into a trend, unless values are negative or `from_zero` is off. `watched` are the figures
    of the run's health whose alarms are marked here. A panel that shows the first of them is `bounded`: the
    thresholds of that figure are drawn, if the values come near them.
    """

    title: str
    unit: str
    lines: tuple[HealthLine, ...]
    scale: float = 1.0
    from_zero: bool = True
    watched: tuple[str, ...] = ()
    bounded: bool = False


def _field(steps: Steps, key: str) -> np.ndarray:
    return np.array([as_float(row.get(key)) for row in steps])


def failed_share(steps: Steps) -> np.ndarray:
    """Return the share of the completions whose verification failed, shape (n,)."""
    failed_N = np.array([sum(map(as_float, as_mapping(row.get("failed")).values())) for row in steps])
    completions_N = _field(steps, "completions")
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(completions_N > 0, failed_N / completions_N, math.nan)


def tokens_per_second(steps: Steps) -> np.ndarray:
    """Return the tokens generated per second between consecutive steps, shape (n,); the first is NaN.

    `tokens.generated` may be cumulative, as in evals.jsonl, or count one step: a counter that never falls
    is taken as cumulative.
    """
    tokens_N = np.array([as_float(as_mapping(row.get("tokens")).get("generated")) for row in steps])
    seconds_N = np.diff(_field(steps, "time"), prepend=math.nan)
    increments_N = np.diff(tokens_N, prepend=math.nan)
    cumulative = not (increments_N < 0).any()
    made_N = increments_N if cumulative else tokens_N
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(seconds_N > 0, made_N / seconds_N, math.nan)


def _one(title: str, unit: str, of: str | Values, largest: bool = False, **options: Any) -> Panel:
    return Panel(title, unit, (HealthLine(of, largest=largest),), **options)


def _share(title: str, of: str, key: str | Values, watched: str = "") -> Panel:
    """Make the panel of a share in per cent; `watched` is its name in the run's health, if it has one."""
    names = (watched,) if watched else ()
    return _one(title, f"% of {of}", key, scale=100, watched=names, bounded=bool(watched))


def _mean_and_max(title: str, unit: str, name: str, **options: Any) -> Panel:
    lines = HealthLine(f"{name}_mean", "mean"), HealthLine(f"{name}_max", "max", largest=True)
    return Panel(title, unit, lines, **options)


_GAP, _RANK = ("logp_gap", "head"), ("sampling",)
PANELS = (
    _one("Training reward", "mean of the batch", "reward_mean", watched=("reward_drop",)),
    _share("Truncated", "completions", "truncated", watched="truncated"),
    _share("Interrupted", "completions", "interrupted"),
    _one("Mean length", "tokens", "mean_length", watched=("length_drift",)),
    _one("Entropy", "nats per token", "entropy", watched=("non_finite",)),
    _one("Log-probability gap", "nats, of one version", "logp_gap", watched=_GAP, bounded=True),
    _one("Rank of the samples", "0.5 where as recorded", "rank", from_zero=False, watched=_RANK),
    _one("Log-probability shift", "nats, staleness included", "logp_shift"),
    _share("Effective sample", "tokens", "ess", watched="ess"),
    _share("Ratios clipped", "tokens", "ratio_clipped", watched="ratio_clipped"),
    _mean_and_max("Importance ratio", "trainer over generator", "ratio", from_zero=False),
    _one("Gradient norm", "before clipping", "grad_norm", watched=("grad_norm",)),
    _one("Throughput", "thousand tokens per second", tokens_per_second, scale=1e-3),
    _mean_and_max("Staleness of tokens", "trainer steps", "staleness"),
    _one("Staleness of the KV cache", "largest, trainer steps", "kv_staleness_max", largest=True),
    _share("Staleness over 4 steps", "trained tokens", "staleness_share_over_4"),
    _share("Two or more versions", "completions", "multi_version"),
    _share("Zero variance", "groups", "zero_variance", watched="zero_variance"),
    _one("Effective groups", "per step", "groups_used"),
    _share("Verification failed", "completions", failed_share, watched="failed"),
    _one("Prompts left", "in the pool", "pool", largest=True),
)


def health_svg(steps: Steps, alarms: Sequence[Alarm] = (), thresholds: Any = None) -> str | None:
    """Draw the small multiples as inline SVG; None if the steps hold none of the figures, or only zeros.

    Alarms are marked, and lines are drawn at `thresholds`, the recipe's `health` as config.json has it.
    """
    step_N = _field(steps, "step")
    shown = [panel for panel in PANELS if _known_values(panel, steps).any()]
    if not shown:
        return None
    described = f"{len(shown)} health figures over the trainer steps"
    return inline_svg(_draw(shown, steps, step_N, alarms, as_mapping(thresholds)), "health", described)


def always_zero(steps: Steps) -> list[str]:
    """Return the figures that were logged and are 0 at every step: they have no panel, and are listed."""
    known = [(panel, _known_values(panel, steps)) for panel in PANELS]
    return [
        f"{panel.title.lower()} ({panel.unit})" for panel, values in known if values.size and not values.any()
    ]


def _known_values(panel: Panel, steps: Steps) -> np.ndarray:
    values = np.concatenate([line.values(steps) for line in panel.lines])
    return values[np.isfinite(values)]


def running_mean(values_N: np.ndarray, window: int) -> np.ndarray:
    """Return the centred mean over `window` values, fewer at the ends; NaN is left out."""
    known_N = np.isfinite(values_N)
    box = np.ones(window)
    total_N = np.convolve(np.where(known_N, values_N, 0.0), box, mode="same")
    count_N = np.convolve(known_N.astype(float), box, mode="same")
    with np.errstate(invalid="ignore"):
        return np.where(count_N > 0.5, total_N / count_N, math.nan)


def in_blocks(values_N: np.ndarray, largest: bool = False) -> np.ndarray:
    """Return at most `_LONGEST_LINE` values: means (or maxima) over blocks of consecutive steps."""
    size = math.ceil(values_N.size / _LONGEST_LINE)
    if size <= 1:
        return values_N
    padded_N = np.concatenate([values_N, np.full(-values_N.size % size, math.nan)])
    blocks_BS = np.ma.masked_invalid(padded_N.reshape(-1, size))
    return (blocks_BS.max(axis=1) if largest else blocks_BS.mean(axis=1)).filled(math.nan)


def _draw(
    panels: Sequence[Panel],
    steps: Steps,
    step_N: np.ndarray,
    alarms: Sequence[Alarm],
    thresholds: Mapping[str, Any],
) -> Figure:
    rows = math.ceil(len(panels) / _COLUMNS)
    with style():
        height_in = 1.75 * rows + 0.3
        figure = new_figure(10.0, height_in)
        edges = {"left": 0.045, "right": 0.935, "bottom": 0.5 / height_in, "top": 1 - 0.4 / height_in}
        spacing = {**edges, "wspace": 0.58, "hspace": 0.62}
        grid = figure.subplots(rows, _COLUMNS, sharex=True, squeeze=False, gridspec_kw=spacing)
        for axes, panel in zip(grid.flat, panels, strict=False):
            _draw_panel(axes, panel, steps, step_N)
            _mark(axes, step_N, [alarm for alarm in alarms if alarm.metric in panel.watched])
            if panel.bounded:
                _bound(axes, as_mapping(thresholds.get(panel.watched[0])), panel.scale)
        for spare in grid.flat[len(panels) :]:
            spare.remove()
        for column in range(min(_COLUMNS, len(panels))):
            lowest = grid[(len(panels) - 1 - column) // _COLUMNS, column]
            lowest.tick_params(labelbottom=True)
            lowest.set_xlabel("trainer step")
    return figure


def _draw_panel(axes: Axes, panel: Panel, steps: Steps, step_N: np.ndarray) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(panel.title, loc="left", weight="bold", pad=15)
    note(axes, panel.unit, (0, 1), offset=(0, 4), fontsize=8, color=MUTED)
    x_N = in_blocks(step_N)
    ends = []
    for line, colour in zip(panel.lines, (FORECAST, LATER), strict=False):
        y_N = in_blocks(line.values(steps), line.largest) * panel.scale
        smooth_N = y_N if line.largest else running_mean(y_N, max(1, y_N.size // 24))
        known_N = np.isfinite(y_N)  # a figure of every few steps is a line all the same
        if not line.largest:
            axes.plot(x_N[known_N], y_N[known_N], color=colour, lw=0.7, alpha=0.3)
        axes.plot(x_N[known_N], smooth_N[known_N], color=colour, lw=1.0 if line.largest else 1.5)
        if known_N.any():
            ends.append((float(smooth_N[known_N][-1]), line.name))
    axes.yaxis.set_major_locator(MaxNLocator(3))
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.margins(y=0.12)
    if panel.from_zero and not any((line.values(steps) < 0).any() for line in panel.lines):
        axes.set_ylim(bottom=0)
    low, high = axes.get_ylim()
    if high < 1e-3:  # a power of ten above the axis would stand in the way of the unit
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    heights = apart([(value - low) / (high - low) for value, _ in ends], _APART, -math.inf, math.inf)
    for (value, name), height in zip(ends, heights, strict=True):
        text = f"{name} {plain(value)}".strip()
        note(axes, text, (1, height), offset=(2, 0), va="center", fontsize=8, color=INK)


def _mark(axes: Axes, step_N: np.ndarray, alarms: Sequence[Alarm]) -> None:
    """Shade the steps of alarms, and more lightly those of warnings."""
    for alarm in alarms:
        last = float(step_N[-1]) if alarm.last is None else alarm.last
        alpha = 0.28 if alarm.level == "alarm" else 0.12
        axes.axvspan(alarm.first - 0.5, last + 0.5, color=LATER, alpha=alpha, lw=0, zorder=0)


def _bound(axes: Axes, limits: Mapping[str, Any], scale: float) -> None:
    """Draw lines at the thresholds that are no farther from the values than the height of the panel."""
    low, high = axes.get_ylim()
    for name, shape in (("warning", (0, (1, 2))), ("alarm", (0, (4, 2)))):
        value = as_float(limits.get(name)) * scale
        if value > 0 and low - (high - low) <= value <= high + (high - low):
            axes.axhline(value, color=LATER, lw=0.9, ls=shape, zorder=1)
