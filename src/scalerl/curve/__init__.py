"""Compute-performance curves: fit, forecast, compare. Numpy only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalerl._lazy import lazy

if TYPE_CHECKING:
    from scalerl.curve.backtest import Backtest, backtest
    from scalerl.curve.compare import compare
    from scalerl.curve.comparison import Claim, Comparison, Difference, Pair
    from scalerl.curve.crossing import Crossing
    from scalerl.curve.families import (
        FAMILIES,
        LOG_LOGISTIC,
        POWER_LAW,
        Curve,
        Family,
        Frechet,
        Gompertz,
        LogLogistic,
        PowerLaw,
        Weibull,
    )
    from scalerl.curve.fit import fit
    from scalerl.curve.online import Forecaster
    from scalerl.curve.points import Points
    from scalerl.curve.result import Fit, Forecast, Intervals, Medians, NoiseEstimate
    from scalerl.curve.seeds import SEED_PRIOR, SeedPrior

__all__ = [
    "FAMILIES",
    "LOG_LOGISTIC",
    "POWER_LAW",
    "SEED_PRIOR",
    "Backtest",
    "Claim",
    "Comparison",
    "Crossing",
    "Curve",
    "Difference",
    "Family",
    "Fit",
    "Forecast",
    "Forecaster",
    "Frechet",
    "Gompertz",
    "Intervals",
    "LogLogistic",
    "Medians",
    "NoiseEstimate",
    "Pair",
    "Points",
    "PowerLaw",
    "SeedPrior",
    "Weibull",
    "backtest",
    "compare",
    "fit",
]

lazy(
    __name__,
    {
        "backtest": "Backtest backtest",
        "compare": "compare",
        "comparison": "Claim Comparison Difference Pair",
        "crossing": "Crossing",
        "families": "FAMILIES LOG_LOGISTIC POWER_LAW "
        "Curve Family Frechet Gompertz LogLogistic PowerLaw Weibull",
        "fit": "fit",
        "online": "Forecaster",
        "points": "Points",
        "result": "Fit Forecast Intervals Medians NoiseEstimate",
        "seeds": "SEED_PRIOR SeedPrior",
    },
)
