"""Uses of fits: comparisons, backtests, forecasts during a run, the paper's own rule. Numpy only.

    compare.py    recipes compared, seeds included: sides.py has the draws, comparison.py the answer
    measured.py   the same without a curve: paired differences, Holm's correction, Student's t
    backtest.py   forecasts of finished runs from their first parts; the scores in backtest_result.py
    bank.py       the same by method, over a folder of runs; rivals.py has the methods
    online.py     forecasts inside a training loop
    best.py       the best evaluation of a run, by a smooth curve through all of them
    freeze.py     the line of a frozen forecast, which record/writer.py stores
    paper.py      the fit and the comparison exactly as the paper makes them
    paired.py, crossing.py     two recipes on the same prompts; which one is ahead early and which late
    crosscheck.py, sensitivity.py, standard_errors.py     other intervals, and other starts, of one fit
    recipes.py, scores.py     names of recipes; scores of forecasts

It may import `scalerl.curve` and `scalerl.record`. Imported by `cli`, `integrations`, `study`, `view`.
"""

from typing import TYPE_CHECKING

from scalerl._lazy import lazy

if TYPE_CHECKING:
    from scalerl.forecast.backtest import backtest as backtest
    from scalerl.forecast.backtest_result import Backtest as Backtest
    from scalerl.forecast.best import (
        SmoothedRun as SmoothedRun,
        rates_by_step as rates_by_step,
        smoothed as smoothed,
    )
    from scalerl.forecast.compare import compare as compare
    from scalerl.forecast.comparison import (
        Claim as Claim,
        Comparison as Comparison,
        Difference as Difference,
        Pair as Pair,
    )
    from scalerl.forecast.crossing import Crossing as Crossing
    from scalerl.forecast.online import Forecaster as Forecaster


lazy(__name__)
