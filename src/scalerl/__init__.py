"""Forecast, train and compare reinforcement learning for language models by compute-performance curves."""

from scalerl._version import __version__
from scalerl.curve import Backtest, Comparison, Fit, Forecast, Forecaster, Points, backtest, compare, fit
from scalerl.errors import CannotAnswerError, InputError, ScalerlError, WriteError
from scalerl.record import EvalPoint, RunRecord, RunWriter

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
]
