"""The compute-performance curve: its families, its posterior, and the fit of one run. Numpy only.

    points.py, sample.py         the points to fit, and the rows that the numerics make of them
    families.py, own_families.py the curves, and those from outside; prior.py has the prior with its reasons
    noise.py                     correlated noise and the wander, integrated out
    posterior.py, nodes.py       the posterior, and where its nodes lie; worth.py: what more compute brings
    least_squares.py, solver.py  the point estimate of the paper
    misfit.py, evidence.py       lack of fit: whether any curve describes the run; changes.py: jumps, bursts
    fit.py, fitted.py            one fit and its answers; answers.py has the parts of these
    result.py                    the same as JSON, tables and text
    seeds.py, campaign.py        the effect of a seed; the prior from runs of the same campaign

It may import `scalerl.record`. Imported by `cli`, `forecast`, `ingest`, `integrations`, `plan`, `study`,
`view`.
"""

from typing import TYPE_CHECKING

from scalerl._lazy import lazy

if TYPE_CHECKING:
    from scalerl.curve.answers import (
        Forecast as Forecast,
        Forecasts as Forecasts,
        Intervals as Intervals,
        Medians as Medians,
        NoiseEstimate as NoiseEstimate,
    )
    from scalerl.curve.families import (
        FAMILIES as FAMILIES,
        LOG_LOGISTIC as LOG_LOGISTIC,
        POWER_LAW as POWER_LAW,
        Curve as Curve,
        Family as Family,
        Frechet as Frechet,
        Gompertz as Gompertz,
        LogLogistic as LogLogistic,
        PowerLaw as PowerLaw,
        Weibull as Weibull,
    )
    from scalerl.curve.fit import fit as fit
    from scalerl.curve.points import Points as Points
    from scalerl.curve.result import Fit as Fit
    from scalerl.curve.seeds import SEED_PRIOR as SEED_PRIOR, SeedPrior as SeedPrior


lazy(__name__)
