"""Forecast, train and compare reinforcement learning for language models by compute-performance curves."""

from scalerl._version import __version__
from scalerl.curve import Comparison, Fit, Forecast, Forecaster, Points, compare, fit
from scalerl.errors import CannotAnswerError, InputError, ScalerlError, WriteError
from scalerl.record import EvalPoint, RunRecord, RunWriter

__all__ = [
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
    "compare",
    "fit",
]
