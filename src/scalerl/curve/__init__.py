"""Compute-performance curves: fit, forecast, compare. Numpy only."""

from scalerl.curve.families import FAMILIES, LOG_LOGISTIC, Curve, Family, Frechet, LogLogistic, Weibull
from scalerl.curve.fit import fit
from scalerl.curve.points import Points
from scalerl.curve.result import Fit, Forecast, Intervals, Medians, NoiseEstimate

__all__ = [
    "FAMILIES",
    "LOG_LOGISTIC",
    "Curve",
    "Family",
    "Fit",
    "Forecast",
    "Frechet",
    "Intervals",
    "LogLogistic",
    "Medians",
    "NoiseEstimate",
    "Points",
    "Weibull",
    "fit",
]
