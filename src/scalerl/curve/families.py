"""Saturating curves: the share of the total gain that is reached at a compute C.

    R(C) = R_0 + (A - R_0) * share(B log(C / C_mid))          share(0) = 1/2

Every family is written in the log-ratio u = B log(C / C_mid), so that C_mid is the compute at half of the
gain in all of them, and B is the slope on a logarithmic axis. A family is its share, the derivative of it
and its inverse, and nothing else; what is fitted and averaged is in `least_squares` and `posterior`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

_LN2 = math.log(2.0)
_U_MAX = 500.0  # exp stays finite, and every share is 0 or 1 to the last digit long before


class Family(Protocol):
    """A saturating shape; u and the results are arrays of one shape, u = -inf at C = 0."""

    @property
    def name(self) -> str: ...  # noqa: D102

    def share(self, u: np.ndarray) -> np.ndarray:
        """Share of the gain reached, in [0, 1], rising."""
        ...

    def slope(self, u: np.ndarray) -> np.ndarray:
        """The derivative d share / du."""
        ...

    def inverse(self, share: np.ndarray) -> np.ndarray:
        """The u at which `share` is reached, for shares in (0, 1)."""
        ...


@dataclass(frozen=True)
class LogLogistic:
    """share = 1 / (1 + exp(-u)): the paper's curve (arXiv 2510.13786, equation 1); its gap closes as C^-B."""

    name: str = "log_logistic"

    def share(self, u: np.ndarray) -> np.ndarray:
        """1 / (1 + (C_mid / C)^B)."""
        return 1.0 / (1.0 + np.exp(-np.clip(u, -_U_MAX, _U_MAX)))

    def slope(self, u: np.ndarray) -> np.ndarray:
        """s (1 - s)."""
        share = self.share(u)
        return share * (1.0 - share)

    def inverse(self, share: np.ndarray) -> np.ndarray:
        """log(s / (1 - s))."""
        return np.log(share) - np.log1p(-share)


@dataclass(frozen=True)
class Weibull:
    """share = 1 - 2^(-exp(u)): the gap closes exponentially, sooner than the paper's curve."""

    name: str = "weibull"

    def share(self, u: np.ndarray) -> np.ndarray:
        """1 - 2^(-(C / C_mid)^B)."""
        return -np.expm1(-_LN2 * np.exp(np.clip(u, -_U_MAX, _U_MAX)))

    def slope(self, u: np.ndarray) -> np.ndarray:
        """ln 2 e^u 2^(-e^u)."""
        e = _LN2 * np.exp(np.clip(u, -_U_MAX, _U_MAX))
        return e * np.exp(-e)

    def inverse(self, share: np.ndarray) -> np.ndarray:
        """log(-log2(1 - s))."""
        return np.log(-np.log1p(-share) / _LN2)


@dataclass(frozen=True)
class Frechet:
    """share = 2^(-exp(-u)): starts abruptly, and its gap closes as C^-B."""

    name: str = "frechet"

    def share(self, u: np.ndarray) -> np.ndarray:
        """2^(-(C_mid / C)^B)."""
        return np.exp(-_LN2 * np.exp(-np.clip(u, -_U_MAX, _U_MAX)))

    def slope(self, u: np.ndarray) -> np.ndarray:
        """ln 2 e^-u 2^(-e^-u)."""
        e = _LN2 * np.exp(-np.clip(u, -_U_MAX, _U_MAX))
        return e * np.exp(-e)

    def inverse(self, share: np.ndarray) -> np.ndarray:
        """-log(-log2(s))."""
        return -np.log(-np.log(share) / _LN2)


LOG_LOGISTIC = LogLogistic()
FAMILIES: tuple[Family, ...] = (LOG_LOGISTIC, Weibull(), Frechet())
"""The families that are averaged, the paper's first."""


def log_compute(compute_N: np.ndarray) -> np.ndarray:
    """Natural logarithm of compute, with log 0 = -inf and no complaint."""
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(compute_N, dtype=float))


@dataclass(frozen=True)
class Curve:
    """One curve R(C) = R_0 + (A - R_0) share(B log(C / C_mid)); C and C_mid in the unit of the axis."""

    family: Family
    A: float
    B: float
    C_mid: float
    R_0: float

    def __call__(self, compute_N: np.ndarray | float) -> np.ndarray:
        """Expected pass rate at every compute, shape as given."""
        u = self.B * (log_compute(np.asarray(compute_N, dtype=float)) - math.log(self.C_mid))
        return self.R_0 + (self.A - self.R_0) * self.family.share(u)

    def inverse(self, pass_rate: float) -> float:
        """Compute at which the curve reaches `pass_rate`: 0 at or below R_0, infinite at or above A."""
        if pass_rate <= self.R_0:
            return 0.0
        if pass_rate >= self.A:
            return math.inf
        share = np.asarray((pass_rate - self.R_0) / (self.A - self.R_0))
        return float(self.C_mid * np.exp(self.family.inverse(share) / self.B))

    def __str__(self) -> str:
        return (
            f"{self.family.name}: A {self.A:.4g}  B {self.B:.4g}  C_mid {self.C_mid:.5g}  R_0 {self.R_0:.4g}"
        )
