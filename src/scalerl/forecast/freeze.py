"""A forecast made during a run, as a line of forecasts.jsonl."""

import time
from typing import Any

import numpy as np

from scalerl.curve.fit import fit
from scalerl.record.reader import RunRecord


def freeze(run: RunRecord, axis: str, target_compute: float) -> dict[str, Any]:
    """Fit the run so far and forecast it at `target_compute`, with the curve and its band up to there.

    Raises:
        CannotAnswerError: the run has fewer than four evaluations.
        InputError: the counters behind `axis` are missing.
    """
    result = fit(run, x=axis)
    forecast = result.forecast(target_compute)
    # Dense enough to be drawn on a linear and on a logarithmic axis.
    compute_N = result.points.compute_N
    first = min(float(compute_N[compute_N > 0].min()), target_compute) / 4
    even_M = np.linspace(first, target_compute, 81)
    compute_M = np.union1d(even_M, np.geomspace(first, target_compute, 81)[1:-1])
    median_M, lo_M, hi_M = result.band(compute_M)
    return {
        "made_at_step": run.evals[-1].step,
        "time": time.time(),
        "axis": axis,
        "compute": float(run.compute(axis)[-1]),
        "target_compute": target_compute,
        "median": forecast.median,
        "prediction": list(forecast.prediction),
        "fit_json": result.to_json([target_compute]),
        "curve": {"compute": compute_M, "median": median_M, "lo": lo_M, "hi": hi_M},
    }
