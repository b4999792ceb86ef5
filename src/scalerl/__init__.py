"""Forecast, train and compare reinforcement learning for language models by compute-performance curves.

    errors.py files.py jsonl.py limits.py frames.py model_config.py numbers.py quantiles.py tty.py   for any
    kinds.py, own_code.py     what `kind` names in a recipe: a built-in variant, or a class of your own
    record/        the run folder: what a run writes, and every reader reads
    curve/         the fit of one run, its prior and its answers
    forecast/      comparisons, backtests, forecasts during a run, rivals
    ingest/        logs of other trainers and trackers
    rl/            training
    view/          pages, charts, tables, the terminal, the local server
    integrations/ plan/ study/ cli/     forecasts in other tools, the planner, recipes x seeds, the commands

A room imports only rooms above it in this list, and not all of these: `tests/test_imports.py` has the rules.
The names below are loaded on first use, so that importing the package does not import numpy.
"""

from typing import TYPE_CHECKING

from scalerl._lazy import lazy
from scalerl._version import __version__ as __version__
from scalerl._views import Views, shown_by

if TYPE_CHECKING:
    from scalerl.curve import Fit as Fit, Forecast as Forecast, Points as Points, fit as fit
    from scalerl.errors import (
        CannotAnswerError as CannotAnswerError,
        InputError as InputError,
        ScalerlError as ScalerlError,
        WriteError as WriteError,
    )
    from scalerl.forecast import (
        Backtest as Backtest,
        Comparison as Comparison,
        Forecaster as Forecaster,
        backtest as backtest,
        compare as compare,
    )
    from scalerl.ingest.formats.table import read_table as read_table
    from scalerl.ingest.load import load_run as load_run
    from scalerl.record.evaluation import EvalPoint as EvalPoint
    from scalerl.record.reader import RunRecord as RunRecord
    from scalerl.record.writer import RunWriter as RunWriter
    from scalerl.view.plotting import plot as plot
    from scalerl.view.runs.tables import latex as latex


lazy(__name__)


def _notebook() -> Views:
    from scalerl.view import notebook

    return notebook


shown_by(_notebook)
