"""The compute-performance curve: its families, its posterior, and the fit of one run. Numpy only.

    points.py, sample.py         what is fitted, and what the numerics need of it
    families.py, prior.py        the curves; what is taken for probable before the run is seen, and why
    noise.py, posterior.py       autocorrelated noise, integrated out; what the points say of the curve
    least_squares.py, solver.py  the point estimate of the paper
    misfit.py, evidence.py       whether any curve describes the run
    fit.py, result.py            all of it, and what a fit answers: answers.py, identify.py, worth.py
    seeds.py, campaign.py        the effect of a seed; what runs of the same campaign say beforehand

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
