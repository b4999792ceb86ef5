"""The compute-performance curve: its families, its posterior, and the fit of one run. Numpy only.

    points.py     what is fitted
    families.py   the curves; `fit.py` fits them, with `solver/`, `noise.py` and `posterior.py`
    result.py     what a fit answers

It may import `scalerl.record`. `forecast`, `ingest`, `view`, `study`, `plan` and `integrations` import it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalerl._lazy import lazy

if TYPE_CHECKING:
    from scalerl.curve.answers import Forecast, NoiseEstimate
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
    from scalerl.curve.points import Points
    from scalerl.curve.result import Fit, Intervals, Medians
    from scalerl.curve.seeds import SEED_PRIOR, SeedPrior

__all__ = [
    "FAMILIES",
    "LOG_LOGISTIC",
    "POWER_LAW",
    "SEED_PRIOR",
    "Curve",
    "Family",
    "Fit",
    "Forecast",
    "Frechet",
    "Gompertz",
    "Intervals",
    "LogLogistic",
    "Medians",
    "NoiseEstimate",
    "Points",
    "PowerLaw",
    "SeedPrior",
    "Weibull",
    "fit",
]

lazy(
    __name__,
    {
        "families": "FAMILIES LOG_LOGISTIC POWER_LAW "
        "Curve Family Frechet Gompertz LogLogistic PowerLaw Weibull",
        "fit": "fit",
        "points": "Points",
        "result": "Fit Forecast Intervals Medians NoiseEstimate",
        "seeds": "SEED_PRIOR SeedPrior",
    },
)
