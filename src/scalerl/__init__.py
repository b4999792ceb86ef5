"""Forecast, train and compare reinforcement learning for language models by compute-performance curves."""

from scalerl._version import __version__
from scalerl.errors import CannotAnswerError, InputError, ScalerlError, WriteError
from scalerl.record import EvalPoint, RunRecord, RunWriter

__all__ = [
    "CannotAnswerError",
    "EvalPoint",
    "InputError",
    "RunRecord",
    "RunWriter",
    "ScalerlError",
    "WriteError",
    "__version__",
]
