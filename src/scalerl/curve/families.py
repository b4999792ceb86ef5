"""Saturating curves: the share of the total gain that is reached at compute C.

    R(C) = R_0 + (A - R_0) * share(B, log(C / C_mid))          share(B, 0) = 1/2

In all of them C_mid is the compute at half of the gain, and B says how steeply the curve passes it. All but
Gompertz are distribution functions of u = B log(C / C_mid). A family is only its share, the derivatives of
the share and its inverse; fitting is in `least_squares`, averaging in `posterior`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

_LN2 = math.log(2.0)
_U_MAX = 500.0  # exp stays finite, and every share is 0 or 1 to the last digit long before


@dataclass(frozen=True)
class Family:
    """A saturating shape: a frozen dataclass with a `name`, a `label` and three methods.

    The arguments are arrays that broadcast: `b` is B > 0, `x` is log(C / C_mid), -inf at C = 0. Half of the
    gain is reached at x = 0 for every B. The families of this module except Gompertz define the three methods
    in u = B x alone, by `_at`, `_slope` and `_u`.
    """

    name: str
    """The key of its weight in JSON."""
    label: str
    """Its name in text and on pages."""
    tail = False
    """Whether its slope does not fix its tail; such families have no weight under the flat prior."""
    weight = 1.0
    """The prior weight beside 1 for most families; a family with a `tail` is scaled by `Prior.tails` too."""
    usual_B = 1.5, 0.6
    """The prior median of B, and the prior sd of log B."""

    def share(self, b: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Return the share of the gain reached, in [0, 1], rising in x."""
        return self._at(_scaled(b, x))

    def slopes(self, b: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (share, d share / d log B, d share / d log C)."""
        u = _scaled(b, x)
        share, slope = self._slope(u)
        return share, slope * u, slope * b

    def inverse(self, b: np.ndarray, share: np.ndarray) -> np.ndarray:
        """Return the x at which `share` is reached, for shares in (0, 1)."""
        return self._u(share) / b

    def _at(self, u: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def _slope(self, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        raise NotImplementedError

    def _u(self, share: np.ndarray) -> np.ndarray:
        raise NotImplementedError


def _scaled(b: np.ndarray, x: np.ndarray) -> np.ndarray:
    u = np.asarray(b * x)
    np.maximum(u, -_U_MAX, out=u)  # in place, and faster than np.clip on small arrays
    return np.minimum(u, _U_MAX, out=u)


@dataclass(frozen=True)
class LogLogistic(Family):
    """share = 1 / (1 + (C_mid / C)^B), the paper's curve (arXiv 2510.13786, equation 1): gap as C^-B."""

    name: str = "log_logistic"
    label: str = "log-logistic"

    def share(self, b: np.ndarray, x: np.ndarray) -> np.ndarray:
        """See `Family.share`."""
        # One array fewer is alive than with `_at`, whose page faults made a batch of 100 runs a third slower.
        return 1.0 / (1.0 + np.exp(-_scaled(b, x)))

    def _at(self, u: np.ndarray) -> np.ndarray:
        return 1.0 / (1.0 + np.exp(-u))

    def _slope(self, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        share = 1.0 / (1.0 + np.exp(-u))
        return share, share * (1.0 - share)

    def _u(self, share: np.ndarray) -> np.ndarray:
        # log1p, as log(1 - share) has no digits left where the share is small.
        return np.log(share) - np.log1p(-share)


@dataclass(frozen=True)
class Weibull(Family):
    """share = 1 - 2^(-(C / C_mid)^B): the gap closes exponentially, sooner than the paper's curve."""

    name: str = "weibull"
    label: str = "Weibull"

    def _at(self, u: np.ndarray) -> np.ndarray:
        # expm1, as 1 - 2^-x has no digits left where the share is small: at the start of every run.
        return -np.expm1(-_LN2 * np.exp(u))

    def _slope(self, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        e = _LN2 * np.exp(u)
        return -np.expm1(-e), e * np.exp(-e)

    def _u(self, share: np.ndarray) -> np.ndarray:
        return np.log(-np.log1p(-share) / _LN2)


@dataclass(frozen=True)
class Frechet(Family):
    """share = 2^(-(C_mid / C)^B): starts abruptly, and its gap closes as C^-B."""

    name: str = "frechet"
    label: str = "Fréchet"

    def _at(self, u: np.ndarray) -> np.ndarray:
        return np.exp(-_LN2 * np.exp(-u))

    def _slope(self, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        e = _LN2 * np.exp(-u)
        share = np.exp(-e)
        return share, e * share

    def _u(self, share: np.ndarray) -> np.ndarray:
        return -np.log(-np.log(share) / _LN2)


@dataclass(frozen=True)
class PowerLaw(Family):
    """share = max(0, 1 - (C_mid / C)^B / 2): the power law A - D / C^B, from where it exceeds R_0.

    D = (A - R_0) C_mid^B / 2. Below the compute at which A - D / C^B = R_0 the curve is R_0, as a pass rate
    cannot start at minus infinity; with R_0 = 0 given it is the bare power law with three parameters.
    """

    name: str = "power_law"
    label: str = "power law"

    def _at(self, u: np.ndarray) -> np.ndarray:
        return np.maximum(1.0 - 0.5 * np.exp(-u), 0.0)

    def _slope(self, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # Below R_0 the curve is flat: its slope is 0 there, not that of the formula.
        gap = 0.5 * np.exp(-u)
        return np.maximum(1.0 - gap, 0.0), np.where(gap < 1.0, gap, 0.0)

    def _u(self, share: np.ndarray) -> np.ndarray:
        return -(_LN2 + np.log1p(-share))


@dataclass(frozen=True)
class Burr(Family):
    """share = 1 - 1 / sqrt(1 + 3 (C / C_mid)^B): sharp bend, slow end, gap closes as C^(-B/2). Burr XII."""

    name: str = "burr"
    label: str = "Burr"
    tail = True

    def _at(self, u: np.ndarray) -> np.ndarray:
        e = 3.0 * np.exp(u)
        # 1 - 1 / sqrt(1 + e) would have no digits left where the share is small.
        return e / (1.0 + e + np.sqrt(1.0 + e))

    def _slope(self, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        e = 3.0 * np.exp(u)
        root = np.sqrt(1.0 + e)
        return e / (1.0 + e + root), 0.5 * e / (1.0 + e) / root

    def _u(self, share: np.ndarray) -> np.ndarray:
        return np.log(np.expm1(-2.0 * np.log1p(-share)) / 3.0)


@dataclass(frozen=True)
class TwoSpeeds(Family):
    """A mixture of two log-logistic curves: some of the gain comes early, the rest later and less steeply.

    share = w s(u + c) + (1 - w) s(k (u + c - d)) with s(u) = 1 / (1 + e^-u), w `early`, d `later`,
    k `slower`, and c such that share = 1/2 at u = 0. A pass rate over differing prompts is such a mix.
    """

    early: float = 0.65
    later: float = 5.0
    slower: float = 0.6
    tail = True
    _shift = 0.0  # until `__post_init__` finds where half of the gain is reached

    def __post_init__(self) -> None:
        # The dataclass is frozen; this follows from its fields.
        object.__setattr__(self, "_shift", float(self._u(np.array(0.5))))

    def _at(self, u: np.ndarray) -> np.ndarray:
        u, w, k = u + self._shift, self.early, self.slower
        return w / (1.0 + np.exp(-u)) + (1.0 - w) / (1.0 + np.exp(-k * (u - self.later)))

    def _slope(self, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        u, w, k = u + self._shift, self.early, self.slower
        early, late = 1.0 / (1.0 + np.exp(-u)), 1.0 / (1.0 + np.exp(-k * (u - self.later)))
        slope = w * early * (1.0 - early) + (1.0 - w) * k * late * (1.0 - late)
        return w * early + (1.0 - w) * late, slope

    def _u(self, share: np.ndarray) -> np.ndarray:
        # No closed form: bisection between the inverses of the parts, to the last digit.
        share = np.asarray(share, dtype=float)
        logit = np.log(share) - np.log1p(-share) - self._shift
        low, high = (
            np.minimum(logit, logit / self.slower) - 2.0,
            np.maximum(logit, logit / self.slower) + 30.0,
        )
        for _ in range(60):
            middle = 0.5 * (low + high)
            below = self._at(middle) < share
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        return 0.5 * (low + high)


@dataclass(frozen=True)
class Burst(TwoSpeeds):
    """A curve with a steep start, as when a format is learnt within some steps, before ability."""

    early: float = 0.5
    later: float = 10.0
    slower: float = 0.3
    usual_B = 6.0, 0.35


@dataclass(frozen=True)
class Ramp(Family):
    """share = min(1, (C / C_mid)^B / 2): a line (B = 1) or power law that does not bend before it reaches A.

    Data without a bend say nothing about where it will come: A may be reached at once, or far beyond.
    """

    name: str = "ramp"
    label: str = "ramp"
    tail = True
    weight = 0.2
    usual_B = 1.0, 0.5

    def _at(self, u: np.ndarray) -> np.ndarray:
        return 0.5 * np.exp(np.minimum(u, _LN2))

    def _slope(self, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        share = self._at(u)
        return share, np.where(u < _LN2, share, 0.0)

    def _u(self, share: np.ndarray) -> np.ndarray:
        return _LN2 + np.log(share)


@dataclass(frozen=True)
class Gompertz(Family):
    """share = 2^(-e^(-B (C / C_mid - 1))): a sigmoid in C itself, not in log C. For comparison only.

    R_0 is its lower asymptote: at C = 0 it has gained a share of 2^(-e^B), .006 at B = 2.
    """

    name: str = "gompertz"
    label: str = "Gompertz"

    def share(self, b: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Return 2^(-exp(-B (C / C_mid - 1)))."""
        return np.exp(-_LN2 * np.exp(self._exponent(b, np.exp(np.minimum(x, _U_MAX)))))

    def slopes(self, b: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Apply the chain rule, with e = ln 2 exp(-B (C / C_mid - 1)) and d share = -share de."""
        ratio = np.exp(np.minimum(x, _U_MAX))
        exponent = self._exponent(b, ratio)
        e = _LN2 * np.exp(exponent)
        share = np.exp(-e)
        slope = e * share
        # The exponent is clipped at -500, where the slope is 1e-217 and not 0: so the ratio is clipped too.
        return share, -slope * exponent, slope * b * np.minimum(ratio, _U_MAX)

    def inverse(self, b: np.ndarray, share: np.ndarray) -> np.ndarray:
        """Return log(1 - log(-log2(s)) / B); -inf for shares already exceeded at C = 0."""
        ratio = 1.0 - np.log(-np.log(share) / _LN2) / b
        return log_compute(np.maximum(ratio, 0.0))

    def _exponent(self, b: np.ndarray, ratio: np.ndarray) -> np.ndarray:
        return np.maximum(-b * (ratio - 1.0), -_U_MAX)


LOG_LOGISTIC = LogLogistic()
POWER_LAW = PowerLaw()
FAMILIES: tuple[Family, ...] = (
    LOG_LOGISTIC,
    Weibull(),
    Frechet(),
    POWER_LAW,
    Burr(),
    TwoSpeeds("two_speeds", "two speeds"),
    Burst("burst", "burst"),
    Ramp(),
)
"""The families that are averaged, the paper's first."""
LABELS: dict[str, str] = {family.name: family.label for family in FAMILIES}
"""Labels by the name in JSON."""


def log_compute(compute_N: np.ndarray | float) -> np.ndarray:
    """Return the natural logarithm of compute, with log 0 = -inf and no warning."""
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(compute_N, dtype=float))


def of_families(
    families: Sequence[Family],
    family_n: np.ndarray,
    method: Literal["share", "inverse"],
    b: np.ndarray,
    value: np.ndarray,
) -> np.ndarray:
    """Return `share` or `inverse` of many curves, each of the family that `family_n` (n,) indexes.

    The first axis of `b` and `value` is n; the others broadcast, and the result has the shape of `value`.
    """
    out = np.empty_like(value)
    for index, family in enumerate(families):
        mine = family_n == index
        out[mine] = getattr(family, method)(b[mine], value[mine])
    return out


def log_compute_to(
    families: Sequence[Family],
    family_n: np.ndarray,
    A: np.ndarray,
    b: np.ndarray,
    log_mid: np.ndarray,
    R_0: np.ndarray,
    target: float,
) -> np.ndarray:
    """Return log C at which curves as in `of_families` reach `target`: -inf up to R_0, inf from A on."""
    # Shares of 0 and 1 have no inverse. What is clipped here is overwritten below.
    share = np.clip((target - R_0) / np.maximum(A - R_0, 1e-12), 1e-12, 1 - 1e-12)
    log_c = log_mid + of_families(families, family_n, "inverse", b, share)
    return np.where(target <= R_0, -np.inf, np.where(target >= A, np.inf, log_c))


@dataclass(frozen=True)
class Curve:
    """One curve R(C) = R_0 + (A - R_0) share(B, log(C / C_mid)); C and C_mid in the unit of the axis."""

    family: Family
    A: float
    B: float
    C_mid: float
    R_0: float

    def __call__(self, compute_N: np.ndarray | float) -> np.ndarray:
        """Return the expected pass rate at every compute, shape as given."""
        return self.at_log(log_compute(compute_N))

    def at_log(self, log_c_N: np.ndarray) -> np.ndarray:
        """Return the expected pass rate at every log compute, shape as given."""
        share_N = self.family.share(np.asarray(self.B), log_c_N - math.log(self.C_mid))
        return self.R_0 + (self.A - self.R_0) * share_N

    def jacobian(self, log_c_N: np.ndarray) -> np.ndarray:
        """Return the derivatives by (A, log B, log C_mid, R_0) at every log compute, shape (..., 4)."""
        x_N = log_c_N - math.log(self.C_mid)
        share_N, by_log_b_N, by_log_c_N = self.family.slopes(np.asarray(self.B), x_N)
        gain = self.A - self.R_0
        return np.stack([share_N, gain * by_log_b_N, -gain * by_log_c_N, 1.0 - share_N], axis=-1)

    def inverse(self, pass_rate: float) -> float:
        """Return the compute at which the curve reaches `pass_rate`: 0 up to R_0, infinite from A on."""
        if pass_rate <= self.R_0:
            return 0.0
        if pass_rate >= self.A:
            return math.inf
        share = np.asarray((pass_rate - self.R_0) / (self.A - self.R_0))
        return float(self.C_mid * np.exp(self.family.inverse(np.asarray(self.B), share)))

    def __str__(self) -> str:
        return (
            f"{self.family.label}: A {self.A:.4g}  B {self.B:.4g}  C_mid {self.C_mid:.5g}  R_0 {self.R_0:.4g}"
        )
