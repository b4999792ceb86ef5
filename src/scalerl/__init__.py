"""Forecast, train and compare reinforcement learning for language models by compute-performance curves."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from scalerl._lazy import lazy
from scalerl._version import __version__
from scalerl._views import shown_by

if TYPE_CHECKING:
    from scalerl.curve import Fit, Forecast, Points, fit
    from scalerl.errors import CannotAnswerError, InputError, ScalerlError, WriteError
    from scalerl.forecast import Backtest, Comparison, Forecaster, backtest, compare
    from scalerl.ingest.formats.table import read_table
    from scalerl.ingest.load import load_run
    from scalerl.record.reader import EvalPoint, RunRecord
    from scalerl.record.writer import RunWriter
    from scalerl.view.plotting import plot

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
    "plot",
    "read_table",
]

lazy(__name__)

shown_by(lambda: import_module("scalerl.view.notebook"))
