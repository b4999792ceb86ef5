"""Metrics over the steps of a run: health as small multiples (scalerl/view/web/start.js), and any metric.

A panel is {title, unit, x, lines[].{name, y, smooth}, marks[].{from, to, level},
bounds[].{name, value}, zero}: y at every x, or a mean over blocks of steps; `smooth` says whether its running
mean is drawn too, and `marks` are the steps of alarms.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scalerl.curve.points import Points
from scalerl.numbers import as_float, as_mapping, short_numbers
from scalerl.record.alarms import Alarm
from scalerl.record.reader import RunRecord
from scalerl.view.facts.shown import ShownRun

Steps = Sequence[Mapping[str, Any]]
"""The parsed lines of steps.jsonl."""

_LONGEST_LINE = 400
"""Points drawn per line; a longer run is drawn in blocks of steps."""
Values = Callable[[Steps], np.ndarray]
"""Computes a figure for every step, shape (n,), NaN where it is not known."""


@dataclass(frozen=True)
class Panel:
    """One small multiple.

    `lines` are keys of the steps, or functions of them, by name; a single line has the name "". Lines in
    `largest` show maxima or a stock: blocks of steps keep the largest value, and nothing is smoothed.

    `scale` multiplies the stored values (100 for shares in per cent). The axis starts at zero, so that noise
    does not look like a trend, unless values are negative or `from_zero` is off. `watched` are the health
    figures whose alarms are marked here. If the panel shows the first of them, it is `bounded`: that figure's
    thresholds are drawn if the values come near them.
    """

    title: str
    unit: str
    lines: Mapping[str, str | Values]
    scale: float = 1.0
    from_zero: bool = True
    largest: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()
    bounded: bool = False


def field(steps: Steps, key: str | Values) -> np.ndarray:
    """Return the number under a key of every step, or by a function of the steps, (n,), NaN if missing.

    The key `queue.verified` is the field `verified` of the object `queue`.
    """
    if not isinstance(key, str):
        return key(steps)
    first, _, inner = key.partition(".")
    found = (row.get(first) for row in steps)
    return np.array([as_float(as_mapping(value).get(inner) if inner else value) for value in found])


def failed_share(steps: Steps) -> np.ndarray:
    """Return the share of the completions whose verification failed, shape (n,)."""
    failed_N = np.array([sum(map(as_float, as_mapping(row.get("failed")).values())) for row in steps])
    completions_N = field(steps, "completions")
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(completions_N > 0, failed_N / completions_N, math.nan)


def tokens_per_second(steps: Steps) -> np.ndarray:
    """Return the tokens generated per second between consecutive steps, shape (n,); the first is NaN.

    `tokens.generated` may be cumulative, as in evals.jsonl, or per step: a counter that never falls is
    assumed to be cumulative.
    """
    tokens_N = field(steps, "tokens.generated")
    seconds_N = np.diff(field(steps, "time"), prepend=math.nan)
    increments_N = np.diff(tokens_N, prepend=math.nan)
    made_N = tokens_N if (increments_N < 0).any() else increments_N
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(seconds_N > 0, made_N / seconds_N, math.nan)


def _share(title: str, of: str, key: str | Values, watched: str = "") -> Panel:
    """Make the panel of a share in per cent; `watched` is its name in the run's health, if it has one."""
    names = (watched,) if watched else ()
    return Panel(title, f"% of {of}", {"": key}, scale=100, watched=names, bounded=bool(watched))


def _mean_and_max(name: str) -> dict[str, str | Values]:
    return {"mean": f"{name}_mean", "max": f"{name}_max"}


_GAP, _RANK = ("logp_gap", "head"), ("sampling",)
PANELS = (
    Panel("Training reward", "mean of the batch", {"": "reward_mean"}, watched=("reward_drop",)),
    _share("Truncated", "completions", "truncated", watched="truncated"),
    _share("Interrupted", "completions", "interrupted"),
    Panel("Mean length", "tokens", {"": "mean_length"}, watched=("length_drift",)),
    Panel("Entropy", "nats per token", {"": "entropy"}, watched=("non_finite",)),
    Panel("Log-probability gap", "nats, of one version", {"": "logp_gap"}, watched=_GAP, bounded=True),
    Panel("Rank of the samples", "0.5 where as recorded", {"": "rank"}, from_zero=False, watched=_RANK),
    Panel("Log-probability shift", "nats, staleness included", {"": "logp_shift"}),
    _share("Effective sample", "tokens", "ess", watched="ess"),
    _share("Ratios clipped", "tokens", "ratio_clipped", watched="ratio_clipped"),
    Panel(
        "Importance ratio",
        "trainer over generator",
        _mean_and_max("ratio"),
        from_zero=False,
        largest=("max",),
    ),
    Panel("Router load", "largest of an expert over the mean", {"": "router_load_max"}, from_zero=False),
    Panel("Gradient norm", "before clipping", {"": "grad_norm"}, watched=("grad_norm",)),
    Panel("Throughput", "thousand tokens per second", {"": tokens_per_second}, scale=1e-3),
    Panel("Staleness of tokens", "trainer steps", _mean_and_max("staleness"), largest=("max",)),
    Panel("Staleness of the KV cache", "largest, trainer steps", {"": "kv_staleness_max"}, largest=("",)),
    _share("Staleness over 4 steps", "trained tokens", "staleness_share_over_4"),
    _share("Two or more versions", "completions", "multi_version"),
    _share("Zero variance", "groups", "zero_variance", watched="zero_variance"),
    Panel("Effective groups", "per step", {"": "groups_used"}),
    _share("Verification failed", "completions", failed_share, watched="failed"),
    Panel("Prompts left", "in the pool", {"": "pool"}, largest=("",)),
)


def step_panels(
    steps: Steps, alarms: Sequence[Alarm] = (), thresholds: Any = None, panels: Sequence[Panel] = PANELS
) -> list[dict[str, Any]]:
    """Return the panels that have values other than 0, with alarms, and thresholds if near the values.

    `thresholds` is the recipe's table `health` from config.json.
    """
    step_N, limits = field(steps, "step"), as_mapping(thresholds)
    shown = [panel for panel in panels if _known_values(panel, steps).any()]
    return [_panel(panel, steps, step_N, alarms, limits) for panel in shown]


def always_zero(steps: Steps) -> list[str]:
    """Return the names of logged figures that are 0 at every step: they are listed instead of drawn."""
    known = [(panel, _known_values(panel, steps)) for panel in PANELS]
    return [
        f"{panel.title.lower()} ({panel.unit})" for panel, values in known if values.size and not values.any()
    ]


def _known_values(panel: Panel, steps: Steps) -> np.ndarray:
    values = np.concatenate([field(steps, of) for of in panel.lines.values()])
    return values[np.isfinite(values)]


def in_blocks(values_N: np.ndarray, largest: bool = False, most: int = _LONGEST_LINE) -> np.ndarray:
    """Return at most `most` values: means (or maxima) over blocks of consecutive steps."""
    size = math.ceil(values_N.size / most)
    if size <= 1:
        return values_N
    padded_N = np.concatenate([values_N, np.full(-values_N.size % size, math.nan)])
    blocks_BS = np.ma.masked_invalid(padded_N.reshape(-1, size))
    return (blocks_BS.max(axis=1) if largest else blocks_BS.mean(axis=1)).filled(math.nan)


def _panel(
    panel: Panel, steps: Steps, step_N: np.ndarray, alarms: Sequence[Alarm], thresholds: Mapping[str, Any]
) -> dict[str, Any]:
    found = {name: field(steps, of) * panel.scale for name, of in panel.lines.items()}
    known = panel.scale * _known_values(panel, steps)
    marks = []
    for alarm in alarms:
        last = float(step_N[-1]) if alarm.last is None else alarm.last
        if alarm.metric in panel.watched:
            marks.append({"from": alarm.first - 0.5, "to": last + 0.5, "level": alarm.level})
    limits = as_mapping(thresholds.get(panel.watched[0])) if panel.bounded else {}
    bounds = [(name, as_float(limits.get(name)) * panel.scale) for name in ("warning", "alarm")]
    # Thresholds are shown up to twice the largest value.
    most = 2 * float(known.max(initial=0.0))
    return {
        "title": panel.title,
        "unit": panel.unit,
        "x": short_numbers(in_blocks(step_N)),
        "lines": [
            {
                "name": name,
                "y": short_numbers(in_blocks(values, name in panel.largest), 4),
                "smooth": name not in panel.largest,
            }
            for name, values in found.items()
            if np.isfinite(values).any()
        ],
        "marks": marks,
        "bounds": [{"name": name, "value": value} for name, value in bounds if 0 < value <= most],
        "zero": panel.from_zero and not (known < 0).any(),
    }


_FIRST = ("reward_mean", "entropy", "mean_length", "truncated", "grad_norm", "loss", "kl", "lr")
"""The metrics that are listed first."""
_NO_METRIC = ("step", "time", "version", "skipped")
_OF_EVALUATIONS = ("truncated", "failed", "entropy", "mean_length")
_MOST = 150_000
"""Most values in a page, of all runs and metrics together."""
_FEWEST, _MOST_OF_ONE = 60, 400
"""The bounds on the values of one metric of one run."""


def logged(runs: Sequence[ShownRun]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the names of all metrics that runs logged, and the values of every run.

    A run has {"step": [...], "values": {metric: [...]}}: means over blocks of steps, None if missing. A table
    also has the "compute" of each value, as steps may not be known.
    """
    columns = [_of_table(run.points) if run.record is None else _columns(run.record) for run in runs]
    names = {name for _, values in columns for name in values}
    ordered = [name for name in _FIRST if name in names] + sorted(names - set(_FIRST))
    most = min(max(_MOST // max(len(runs) * len(names), 1), _FEWEST), _MOST_OF_ONE)
    found = []
    for clocks, values in columns:
        clocks, values = (
            {name: short_numbers(in_blocks(value_N, most=most), 4) for name, value_N in one.items()}
            for one in (clocks, values)
        )
        found.append({"step": []} | clocks | {"values": values})
    return ordered, found


Columns = dict[str, np.ndarray]
"""Arrays of numbers by name, each of shape (N,)."""


def _of_table(points: Points) -> tuple[Columns, Columns]:
    """Return step and compute of the rows of a table, and its further columns."""
    found = points.further
    if found is None:
        return {}, {}
    values = {name: value_N for name, value_N in found.values.items() if name not in _NO_METRIC}
    return {"step": found.step_R, "compute": found.compute_R}, values


def _columns(record: RunRecord) -> tuple[Columns, Columns]:
    """Return the steps and all of their numbers; if they have none, those of the evaluations."""
    found = record.columns()
    columns = {name: value_N for name, value_N in found.items() if name not in _NO_METRIC}
    step_N = found.get("step", np.full(len(next(iter(columns.values()), ())), math.nan))
    if not columns:
        step_N = np.array([float(point.step) for point in record.evals])
        for name in _OF_EVALUATIONS:
            value_N = np.array([getattr(point, name) for point in record.evals])
            if not np.isnan(value_N).all():
                columns[name] = value_N
    return ({"step": step_N}, columns) if columns else ({}, {})
