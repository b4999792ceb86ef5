"""A forecast made during a run, in the form in which forecasts.jsonl keeps it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from scalerl.curve.fit import fit
from scalerl.record import RunRecord


def freeze(run: RunRecord, axis: str, target_compute: float) -> dict[str, Any]:
    """Fit the run so far and forecast it at `target_compute`, with the curve and its band up to there.

    Raises:
        CannotAnswerError: the run is too short, or does not rise.
        InputError: the counters behind `axis` are missing.
    """
    result = fit(run, x=axis)
    forecast = result.forecast(target_compute)
    compute_M = np.linspace(0, target_compute, 101)[1:]
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
