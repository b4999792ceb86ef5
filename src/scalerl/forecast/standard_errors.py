"""Standard errors of a least-squares curve, as other programs print them.

They assume that the curve is linear in its parameters over their range, and that neighbouring evaluations are
independent. Neither holds early in a run; the intervals of `scalerl.curve.fit` assume neither.
"""

import math
from dataclasses import dataclass

import numpy as np

from scalerl.curve.least_squares import LeastSquares
from scalerl.curve.sample import Sample
from scalerl.errors import CannotAnswerError

_NAMES = ("A", "B", "C_mid", "R_0")


@dataclass(frozen=True)
class StandardErrors:
    """The standard error of each parameter, in its unit; NaN where it was given or lies on a bound."""

    A: float
    B: float
    C_mid: float
    R_0: float
    sd: float
    """Standard deviation of the residuals, sqrt(rss / degrees)."""
    degrees: int
    """Points less free parameters."""
    covariance_44: np.ndarray
    """Covariance of (A, B, C_mid, R_0), for the error of anything derived from them."""


def standard_errors(sample: Sample, best: LeastSquares) -> StandardErrors:
    """Return square roots of the diagonal of sd^2 (J^T W J)^-1, with J the derivatives of the curve.

    NIST StRD and R's nls use the same. Seber and Wild, Nonlinear Regression, 1989, section 2.1.

    Raises:
        CannotAnswerError: no more points than free parameters, or data that do not determine them.
    """
    held = set(best.at_bounds) | (set() if sample.r0 is None else {"R_0"})
    free = [i for i, name in enumerate(_NAMES) if name not in held]
    degrees = sample.n_points - len(free)
    if degrees < 1:
        raise CannotAnswerError(f"{sample.n_points} points leave nothing to estimate {len(free)} errors from")
    sd = math.sqrt(best.rss / degrees)
    jacobian_Nf = best.curve.jacobian(sample.log_c_N)[:, free]
    half = jacobian_Nf.T @ (sample.weight_N[:, None] * jacobian_Nf)
    # Scaled to a diagonal of ones, so that the test of singularity has no units.
    scale = np.sqrt(np.maximum(np.diag(half), 1e-300))
    half = half / np.outer(scale, scale)
    if np.linalg.eigvalsh(half)[0] <= 1e-13:
        raise CannotAnswerError(
            "the data do not fix the parameters: the sum of squares has no single minimum"
        )
    # The Jacobian has derivatives by log B and log C_mid.
    unit = np.array([1.0, best.curve.B, best.curve.C_mid, 1.0])[free] / scale
    covariance_44 = np.full((len(_NAMES), len(_NAMES)), np.nan)
    covariance_44[np.ix_(free, free)] = sd**2 * np.linalg.inv(half) * np.outer(unit, unit)
    A, B, C_mid, R_0 = np.sqrt(np.diag(covariance_44)).tolist()
    return StandardErrors(A, B, C_mid, R_0, sd, degrees, covariance_44)
