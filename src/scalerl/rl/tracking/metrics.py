"""The names under which a run is logged: those of its run folder, with a prefix.

    train/FIELD     a line of steps.jsonl; FIELD_KEY if the field is an object
    health/FIELD    fields of the probe; health/alarm_METRIC is 2 for an alarm, 1 for a warning, 0 once over
    compute/...     the run's cumulative counters at a step
    eval/FIELD      a line of evals.jsonl, with the compute at which the evaluation was requested
    downstream/SUITE/FIELD    a line of downstream.jsonl; low and high are the ends of an interval
    forecast/...    the end of the run, forecast from the evaluations so far, logged with the last of them

Evaluations have separate names for compute: they end after later steps, and a counter must not go back.
"""

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeGuard

from scalerl.errors import InputError
from scalerl.jsonl import plain
from scalerl.record.evaluation import EvalPoint, compute_of

_COMPUTE = ("device_seconds", "flops", "tokens", "wall_seconds", "idle_seconds", "weight_sync")
_PROBE = ("logp_gap", "logp_gap_max", "rank", "rank_variance", "head_gap", "head_gap_rms", "probe_tokens")
_LEVELS = {"warning": 1.0, "alarm": 2.0}


def of_step(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a line of steps.jsonl, without its histograms."""
    row = plain(row)  # NumPy's numbers become Python's
    found = {}
    for name, value in _flat(row):
        field = name.partition("/")[0]
        place = "compute" if field in _COMPUTE else "health" if field in _PROBE else "train"
        found[f"{place}/{name.replace('/', '_')}"] = value
    counters = {key: row.get(key) for key in ("device_seconds", "flops", "tokens")}
    with suppress(InputError):  # a counter that is not finite has no total
        point = EvalPoint.from_json({"step": row["step"], "pass_rate": 0.0, **counters})
        found |= _totals("compute", point)
    return _finite(found)


def of_evaluation(point: EvalPoint) -> dict[str, float]:
    """Return the metrics of a line of evals.jsonl."""
    found = {f"eval/{name}": value for name, value in _flat(vars(point))}
    return _finite(found | _totals("eval", point))


def of_suite(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a line of downstream.jsonl; the compute is that of the evaluation of its step."""
    names = ("pass_rate", "pass_at_k", "failed", "truncated", "interrupted", "mean_length", "entropy")
    found = {name: row[name] for name in names}
    for name in ("pass_rate", "pass_at_k"):
        low, high = row[f"{name}_interval"]
        found |= {f"{name}_low": low, f"{name}_high": high}
    return _finite({f"downstream/{row['suite']}/{name}": value for name, value in found.items()})


def of_finding(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the metric of a line of alarms.jsonl."""
    return {f"health/alarm_{row['metric']}": 0.0 if row["over"] else _LEVELS[row["level"]]}


def of_forecast(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a line of forecasts.jsonl: pass rate at the end, ceiling, and `identified`."""
    fit = row["fit_json"]
    spans = {"": row["prediction"], "ceiling_": fit["intervals"]["A"] or (None, None)}
    found = {"median": row["median"], "ceiling": fit["median"]["A"], "identified": fit["identified"]}
    for prefix, (low, high) in spans.items():
        found |= {f"{prefix}low": low, f"{prefix}high": high}
    # The ceiling is None if no curve describes the run.
    return _finite({f"forecast/{name}": float(v) for name, v in found.items() if v is not None})


def _flat(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the names and numbers of a row; numbers of an object in it are named FIELD/KEY."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/{key}", one) for key, one in value.items() if _is_number(one))
        elif name not in ("step", "time") and _is_number(value):
            yield name, value


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= sys.float_info.max)


def _totals(prefix: str, point: EvalPoint) -> dict[str, float]:
    axes = ("gpu_hours", "flops", "tokens", "tokens_processed")
    return {f"{prefix}/{axis}": compute_of(point, axis) for axis in axes}


def _finite(found: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}
