"""What a run logged over its steps, for the lines below a chart: reward, entropy, length, truncation, any."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from scalerl.record.reader import RunRecord
from scalerl.view.numbers import as_float, short_numbers
from scalerl.view.runs.panels import in_blocks

if TYPE_CHECKING:
    from scalerl.view.runs.run import OverlayRun

_FIRST = ("reward_mean", "entropy", "mean_length", "truncated", "grad_norm", "loss", "kl", "lr")
"""The metrics that are listed first."""
_NO_METRIC = ("step", "time", "version", "skipped")
_OF_EVALUATIONS = ("truncated", "failed", "entropy", "mean_length")
_MOST = 150_000
"""Values that a page holds, all runs and metrics together."""
_FEWEST, _MOST_OF_ONE = 60, 400
"""The bounds of the values of one metric of one run."""


def logged(runs: Sequence[OverlayRun]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the names of all metrics that runs logged, and what every run has.

    Of a run that is {"step": [...], "values": {metric: [...]}}: means over blocks of steps, None between.
    """
    columns = [_columns(run.record) if run.record is not None else {} for run in runs]
    names = {name for of_run in columns for name in of_run if name != "step"}
    ordered = [name for name in _FIRST if name in names] + sorted(names - set(_FIRST))
    most = min(max(_MOST // max(len(runs) * len(names), 1), _FEWEST), _MOST_OF_ONE)
    found = []
    for of_run in columns:
        thinned = {name: short_numbers(in_blocks(value_N, most=most), 4) for name, value_N in of_run.items()}
        found.append({"step": thinned.pop("step", []), "values": thinned})
    return ordered, found


def _columns(record: RunRecord) -> dict[str, np.ndarray]:
    """Return every number of the steps by its name, and those of evaluations where no step has them, (N,)."""
    rows = record.steps()
    at = [row.get("step") for row in rows]
    names = dict.fromkeys(
        name
        for row in rows
        for name, value in row.items()
        if type(value) in (int, float) and name not in _NO_METRIC
    )
    columns = {name: np.array([as_float(row.get(name)) for row in rows]) for name in names}
    columns = {name: value_N for name, value_N in columns.items() if np.isfinite(value_N).any()}
    if not columns:
        at = [point.step for point in record.evals]
        of_evals = {name: [getattr(point, name) for point in record.evals] for name in _OF_EVALUATIONS}
        columns = {
            name: np.array(values) for name, values in of_evals.items() if not all(map(math.isnan, values))
        }
    return {"step": np.array([as_float(step) for step in at])} | columns if columns else {}
