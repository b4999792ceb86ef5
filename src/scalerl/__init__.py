"""Forecast, train and compare reinforcement learning for language models by compute-performance curves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalerl._lazy import lazy
from scalerl._version import __version__

if TYPE_CHECKING:
    from scalerl.curve import Backtest, Comparison, Fit, Forecast, Forecaster, Points, backtest, compare, fit
    from scalerl.errors import CannotAnswerError, InputError, ScalerlError, WriteError
    from scalerl.ingest.load import load_run
    from scalerl.ingest.table import read_table
    from scalerl.record import EvalPoint, RunRecord
    from scalerl.run_writer import RunWriter

__all__ = [
    "Backtest",
    "CannotAnswerError",
    "Comparison",
    "EvalPoint",
    "Fit",
    "Forecast",
    "Forecaster",
    "InputError",
    "Points",
    "RunRecord",
    "RunWriter",
    "ScalerlError",
    "WriteError",
    "__version__",
    "backtest",
    "compare",
    "fit",
    "load_run",
    "read_table",
]

lazy(
    __name__,
    {
        "curve.backtest": "Backtest backtest",
        "curve.compare": "compare",
        "curve.comparison": "Comparison",
        "curve.fit": "fit",
        "curve.online": "Forecaster",
        "curve.points": "Points",
        "curve.result": "Fit Forecast",
        "errors": "CannotAnswerError InputError ScalerlError WriteError",
        "ingest.load": "load_run",
        "ingest.table": "read_table",
        "record": "EvalPoint RunRecord",
        "run_writer": "RunWriter",
    },
)
