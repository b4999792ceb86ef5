"""Saturating curves: the share of the total gain that is reached at a compute C.

    R(C) = R_0 + (A - R_0) * share(B, log(C / C_mid))          share(B, 0) = 1/2

C_mid is the compute at half of the gain in all of them, and B says how steeply the curve passes it. All but
Gompertz are written in u = B log(C / C_mid), of which they are distribution functions. A family is its
share, the derivatives of it and its inverse, and nothing else; what is fitted and averaged is in
`least_squares` and `posterior`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from scalerl.errors import InputError
from scalerl.kinds import OWN, Choice, find

_LN2 = math.log(2.0)
_U_MAX = 500.0  # exp stays finite, and every share is 0 or 1 to the last digit long before


@dataclass(frozen=True)
class Family:
    """A saturating shape: a frozen dataclass with a `name`, a `label` and three methods.

    Their arguments are arrays that broadcast: `b` is B > 0, `x` is log(C / C_mid), -inf at C = 0. Half of the
    gain is reached at x = 0, whatever B. The families of this module but Gompertz define the three in
    u = B x alone, by `_at`, `_slope` and `_u`.
    """

    name: str
    """The key of its weight in JSON."""
    label: str
    """The name in texts and on pages."""

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
    return np.minimum(np.maximum(b * x, -_U_MAX), _U_MAX)  # faster than np.clip on small arrays


@dataclass(frozen=True)
class LogLogistic(Family):
    """share = 1 / (1 + (C_mid / C)^B), the paper's curve (arXiv 2510.13786, equation 1): gap as C^-B."""

    name: str = "log_logistic"
    label: str = "log-logistic"

    def share(self, b: np.ndarray, x: np.ndarray) -> np.ndarray:
        """See `Family.share`."""
        # An array less is alive than by `_at`: a batch of 100 runs took a third longer with the page faults.
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
        # Below R_0 the curve is flat: its slope there is 0, and not that of the formula.
        gap = 0.5 * np.exp(-u)
        return np.maximum(1.0 - gap, 0.0), np.where(gap < 1.0, gap, 0.0)

    def _u(self, share: np.ndarray) -> np.ndarray:
        return -(_LN2 + np.log1p(-share))


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
        # The exponent is cut at -500, where the slope is 1e-217 and not 0: so the ratio must be cut too.
        return share, -slope * exponent, slope * b * np.minimum(ratio, _U_MAX)

    def inverse(self, b: np.ndarray, share: np.ndarray) -> np.ndarray:
        """Return log(1 - log(-log2(s)) / B); -inf for shares that are exceeded at C = 0."""
        ratio = 1.0 - np.log(-np.log(share) / _LN2) / b
        return log_compute(np.maximum(ratio, 0.0))

    def _exponent(self, b: np.ndarray, ratio: np.ndarray) -> np.ndarray:
        return np.maximum(-b * (ratio - 1.0), -_U_MAX)


LOG_LOGISTIC = LogLogistic()
POWER_LAW = PowerLaw()
FAMILIES: tuple[Family, ...] = (LOG_LOGISTIC, Weibull(), Frechet(), POWER_LAW)
"""The families that are averaged, the paper's first."""
LABELS: dict[str, str] = {family.name: family.label for family in FAMILIES}
"""Labels by the name in JSON."""


def load_family(kind: str) -> Family:
    """Return the family that `kind` names: `module:Class`, `file.py:Class`, or an entry point.

    Raises:
        InputError: it cannot be loaded, lacks a method of `Family`, or has a field without a default.
    """
    choice = Choice("families", Family, None)
    cls = find(kind, choice.group)
    if cls is None:
        raise InputError(f"{kind} names no family of curves: give {OWN}")
    choice.check(cls, kind)
    try:
        return cls()
    except TypeError as error:
        raise InputError(f"{kind}: every field of a family needs a default ({error})") from error


def with_extra(extra: Sequence[Family]) -> tuple[Family, ...]:
    """Return `FAMILIES` and then the `extra` ones, each checked by `check_family`.

    Raises:
        InputError: two have one name, or one fails the check.
    """
    families = (*FAMILIES, *extra)
    names = [family.name for family in families]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"two families of curves are named {twice[0]!r}: give each a name of its own")
    for family in extra:
        check_family(family)
    return families


def check_family(family: Family) -> None:
    """Check that three methods of a family describe one curve that rises from 0 to 1 and is 1/2 at x = 0.

    Raises:
        InputError: they do not; the message has the method, B and x where they disagree.
    """
    # An odd number of nodes has x = 0 exactly, where every share must be 1/2.
    b, x = (a.ravel() for a in np.meshgrid([0.3, 1.0, 3.0], np.linspace(-4.0, 4.0, 33)))
    b, x = b[np.abs(b * x) <= 8.0], x[np.abs(b * x) <= 8.0]
    # Truncation and rounding of these central differences are both near 1e-11, far below the 1e-5 allowed.
    step = 1e-5
    share = family.share(b, x)
    by_log_b = (family.share(b * np.exp(step), x) - family.share(b * np.exp(-step), x)) / (2 * step)
    by_log_c = (family.share(b, x + step) - family.share(b, x - step)) / (2 * step)
    same, slope_b, slope_c = family.slopes(b, x)
    inner = (share > 1e-6) & (share < 1 - 1e-6)
    back = family.inverse(b[inner], share[inner])
    # Where the curve has a kink, as a power law has at R_0, a difference over it is no derivative.
    smooth = np.abs(family.share(b, x + 2 * step) - 2 * share + family.share(b, x - 2 * step)) < 1e-8
    rules = (
        ("share is not within 0 and 1", (share >= 0) & (share <= 1), b, x),
        ("share falls", by_log_c >= 0, b, x),
        ("share is not 1/2", (x != 0) | (np.abs(share - 0.5) < 1e-9), b, x),
        ("slopes returns another share", np.abs(same - share) < 1e-9, b, x),
        ("slopes has a wrong d share / d log B", ~smooth | (np.abs(slope_b - by_log_b) < 1e-5), b, x),
        ("slopes has a wrong d share / d log C", ~smooth | (np.abs(slope_c - by_log_c) < 1e-5), b, x),
        ("inverse is not that of share", np.abs(back - x[inner]) < 1e-5, b[inner], x[inner]),
    )
    for what, holds, at_b, at_x in rules:
        if not np.all(holds):
            index = int(np.argmin(holds))
            raise InputError(
                f"family {family.name!r}: {what} at B = {at_b[index]:g}, log(C / C_mid) = {at_x[index]:g}"
            )


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
    """Return log C at which many curves, as in `of_families`, reach `target`: -inf below R_0, inf above A."""
    # Shares of 0 and 1 have no inverse. What is clipped is overwritten below, and would only warn here.
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

    def derivative(self, compute_N: np.ndarray | float) -> np.ndarray:
        """Return dR/dC at every compute above 0, in pass rate per unit of compute, shape as given."""
        # The curve depends on log C - log C_mid, so that its slope in log C is minus that by log C_mid.
        return -self.jacobian(log_compute(compute_N))[..., 2] / np.asarray(compute_N, dtype=float)

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
