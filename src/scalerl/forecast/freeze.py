"""A forecast made during a run, in the form in which forecasts.jsonl keeps it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from scalerl.curve.fit import fit
from scalerl.record.reader import RunRecord


def freeze(run: RunRecord, axis: str, target_compute: float) -> dict[str, Any]:
    """Fit the run so far and forecast it at `target_compute`, with the curve and its band up to there.

    Raises:
        CannotAnswerError: the run is too short, or does not rise.
        InputError: the counters behind `axis` are missing.
    """
    result = fit(run, x=axis)
    forecast = result.forecast(target_compute)
    compute_M = _grid(result.points.compute_N, target_compute)
    median_M, lo_M, hi_M = result.band(compute_M)
    return {
        "made_at_step": run.evals[-1].step,
        "time": time.time(),
        "axis": axis,
        "compute": float(run.compute(axis)[-1]),
        "target_compute": target_compute,
        "mean": forecast.mean,
        "prediction": list(forecast.prediction),
        "fit_json": result.to_json([target_compute]),
        "curve": {"compute": compute_M, "median": median_M, "lo": lo_M, "hi": hi_M},
    }


def _grid(compute_N: np.ndarray, target_compute: float) -> np.ndarray:
    """Where the curve is stored: dense enough to be drawn on a linear and on a logarithmic axis."""
    first = min(float(compute_N[compute_N > 0].min()), target_compute) / 4
    even_M = np.linspace(first, target_compute, 81)
    return np.union1d(even_M, np.geomspace(first, target_compute, 81)[1:-1])
