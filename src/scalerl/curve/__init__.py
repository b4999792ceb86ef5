"""Compute-performance curves: fit, forecast, compare. Numpy only."""

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

__all__ = [
    "FAMILIES",
    "LOG_LOGISTIC",
    "POWER_LAW",
    "Curve",
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
    "Points",
    "PowerLaw",
    "Weibull",
    "fit",
]
