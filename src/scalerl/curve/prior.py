"""The prior of a fit.

    family              one of `FAMILIES`, equally probable
    (R_0, A, B, C_mid)  flat over what is measured (Jeffreys, below) within 0 <= R_0 <= A <= 1, `B_RANGE`, and
                        C_mid from a tenth of the smallest positive to ten times the largest compute
    log sd              of one evaluation: flat from the sampling noise that is known, else .0005, to .15
    phi                 correlation of neighbouring evaluations: `PHI`, equally probable

Equal prior mass goes to curves that differ equally at the evaluations, and at those that half as much compute
again would bring (Jeffreys, 1946: the density sqrt(det J^T J), with J the derivatives of the curve there by
R_0, A, log B, log C_mid). Flat in A, log B and log C_mid instead, most of the prior would lie where a higher
ceiling, later, changes nothing that was measured: forecasts are then too high, and the families' weights
follow how much of that they have. Flat over the evaluations alone, it would favour curves that end just after
the last one: at half a C_mid 95 % intervals then covered 69 % of simulated runs, and forecasts were .15 too
low (docs/forecast.md; `benchmarks/coverage.py` measures the coverage with this prior).

Other priors: of the effect of a seed (`scalerl.curve.seeds`), of B and A by sibling runs
(`scalerl.curve.campaign`), of changes that no family describes (`scalerl.curve.evidence`).

Shapes: N evaluations, D those and the ones to come, c cells of (B, C_mid).
"""

from __future__ import annotations

import math

import numpy as np

from scalerl.curve.families import Family
from scalerl.curve.sample import Sample

B_RANGE = (0.3, 6.0)
LOG_B = (math.log(B_RANGE[0]), math.log(B_RANGE[1]))
PRIOR_REACH = 10.0
"""C_mid lies from the smallest positive compute over this to the largest compute times this."""
AHEAD = 0.5
"""The prior is flat over what the evaluations measure, and would measure in this much more of the compute."""
_AHEAD_NODES = 6  # stand for the evaluations to come: the curve is smooth there
SD_RANGE = (5e-4, 0.15)
"""Where log sd has its flat prior; evaluation noise that is known raises the lower end."""
PHI = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9)
"""Correlations of neighbours, equally probable before the data."""


def log_mid_range(sample: Sample) -> tuple[float, float]:
    """Return the range of log C_mid that has prior mass."""
    low, high = sample.log_c_range
    return low - math.log(PRIOR_REACH), high + math.log(PRIOR_REACH)


def log_volume(sample: Sample, family: Family, log_b: np.ndarray, log_mid: np.ndarray) -> np.ndarray:
    """Return the log-density of the prior over (R_0, A, log B, log C_mid), less 2 log(A - R_0); (c,).

    sqrt(det J^T J), with J the derivatives of the curve at the evaluations, and at those in `AHEAD` times
    the compute to come.
    """
    ahead_K = 1.0 + AHEAD * (np.arange(_AHEAD_NODES) + 0.5) / _AHEAD_NODES
    trained_N = np.isfinite(sample.log_c_N)
    # Those to come are as dense as those so far.
    each = AHEAD * float(sample.weight_N[trained_N].sum()) / _AHEAD_NODES
    log_c_D = np.concatenate([sample.log_c_N, sample.log_c_range[1] + np.log(ahead_K)])
    weight_D = np.concatenate([sample.weight_N, np.full(_AHEAD_NODES, each)])
    g, by_log_b, by_log_c = family.slopes(np.exp(log_b)[:, None], log_c_D - log_mid[:, None])
    free = [g, by_log_b, by_log_c] if sample.r0 is not None else [1.0 - g, g, by_log_b, by_log_c]
    basis = np.stack(free, axis=1)
    gram = (basis * weight_D) @ basis.transpose(0, 2, 1)
    # Parameters that change nothing make J^T J singular: scaled and damped, they only get little density.
    scale = np.sqrt(np.maximum(np.einsum("cii->ci", gram), 1e-300))
    gram = gram / (scale[:, :, None] * scale[:, None]) + 1e-13 * np.eye(len(free))
    return 0.5 * np.linalg.slogdet(gram)[1] + np.log(scale).sum(axis=1)
