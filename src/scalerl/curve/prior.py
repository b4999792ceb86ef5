"""The prior of a fit: `DEFAULT`, which encodes what runs look like, and `FLAT` over what is measured.

The default. `benchmarks/coverage.py`, `bank.py` and `lcdb.py` show what it is worth, and `prior.py` there
shows what real runs say about its numbers, which are set by hand:

    family              log-logistic, Weibull, Frechet, power law: .148 each; Burr, two speeds, burst: .127;
                        ramp: .025
    log C_mid           normal about half of the largest compute (log -.7), sd 1.6
    log B               normal about 1.5, sd .6; of the burst about 6, sd .35 (`Family.usual_B`)
    A, given R_0        (A - R_0) / (1 - R_0) ~ Beta(.7, 1.3): small gains are common, and R_0 is flat; A = 1
                        has a probability of .04. A run falls with probability .1, as a log-logistic: then
                        (R_0 - A) / R_0 has the same distribution
    log sd              of one evaluation: normal about .01, sd .8; at least the sampling noise that is known
    noise               `_NOISE`: independent, correlated between neighbours (phi), with a wander or a trend

A run that has not risen is most likely to be one that gains little. Under a flat prior it would be one that
is about to take off, as more curves differ in what is still to come than in what has been measured.

The wander is what no saturating curve has: a random walk in log(1 + C / C_1), with C_1 the smallest positive
compute. Its variance over the run so far is given in units of one evaluation's. A forecast starts from where
the walk is, and widens with log C. A trend is a walk whose slope in C is a random walk: its forecast also
continues with the slope at the last evaluation, as for a run past its peak. Its prior probability is .004:
only a run that shows a trend gets one.

`FLAT` (of `fit(prior="flat")`): four families alike, no wander, all correlations alike, log sd flat, and
(R_0, A, B, C_mid) flat over what the evaluations measure and would measure in half as much compute again
(Jeffreys, 1946: the density sqrt(det J^T J), with J the derivatives of the curve by R_0, A, log B, log
C_mid). A prior flat in A, log B and log C_mid would put most of its mass where a higher and later ceiling
changes nothing that was measured. One flat over the evaluations alone would favour curves that end just after
the last one: at half a C_mid, 95 % intervals then covered 69 % of simulated runs
(docs/explanation/forecast.md).

Other priors: of the effect of a seed (`scalerl.curve.seeds`), of B and A from sibling runs
(`scalerl.curve.campaign`), of changes that no family describes (`scalerl.curve.evidence`).

Shapes: N evaluations, D evaluations with those to come, c cells of (B, C_mid), P models of the noise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scalerl.curve.families import LOG_LOGISTIC, Family
from scalerl.curve.sample import Sample

PRIOR_REACH = 10.0
"""C_mid lies from the smallest positive compute over this to the largest compute times this."""
SD_RANGE = (5e-4, 0.15)
"""The range of the noise sd; known evaluation noise raises the lower end."""
_AHEAD = 0.5  # the flat prior counts evaluations to come over this share of the compute so far
_AHEAD_NODES = 6  # nodes that stand for the evaluations to come: the curve is smooth there
STEEP = 200.0
"""The S of a step, which lies between two neighbours."""
USUAL_MID, _MID_SD = -0.7, 1.6
_GAIN = (0.7, 1.3)
_LOG_BETA = math.lgamma(sum(_GAIN)) - sum(math.lgamma(a) for a in _GAIN)


@dataclass(frozen=True)
class NoiseModel:
    """A model of the noise and its prior weight: correlated neighbours, a wander, a trend, or a change."""

    phi: float
    wander: float
    """Variance of the walk over the run so far, in that of one evaluation."""
    weight: float = 1.0
    trend: float = 0.0
    """Variance of an integrated walk, whose slope is a random walk in C, in the same unit."""
    change: float = 0.0
    """Variance of a change of level, 1 / (1 + (C_d / C)^S) of which has happened by C ..."""
    log_at: float = 0.0
    """... and its log C_d ..."""
    steep: float = 1.0
    """... and its S."""

    @property
    def burst(self) -> bool:
        """Whether it is a gradual change at the start of the run, and not a step."""
        return self.change > 0 and self.steep < STEEP

    def changed(self, log_c: np.ndarray) -> np.ndarray:
        """Return the share of the change of level that has happened by each log compute, in its shape."""
        return LOG_LOGISTIC.share(np.asarray(self.steep), log_c - self.log_at)


@dataclass(frozen=True)
class Prior:
    """A prior of the curve and its noise; `fit` offers `DEFAULT` and `FLAT`."""

    name: str
    log_b: tuple[float, float]
    """The range of log B."""
    noise: tuple[NoiseModel, ...]
    sd: tuple[float, float] | None
    """Median of the noise sd, and the sd of its log; None where log sd is flat."""
    falls: float
    """The probability that a run falls, as a log-logistic upside down; part of that family's weight."""
    certain: float
    """The probability of A = 1 itself (of A = 0 for a run that falls); 0 leaves it out."""
    tails: float
    """The weight of a family with a `tail`, beside 1 for the others; 0 leaves them out."""
    changes: tuple[float, float] = (0.0, 0.0)
    """The weights of a burst and of a step (`scalerl.curve.changes`), beside those of `noise`."""

    def families(self, given: Sequence[Family]) -> tuple[tuple[Family, ...], np.ndarray]:
        """Return the families of `given` with weight, and their probabilities (falls: log-logistic's)."""
        weight_F = np.array([one.weight * (self.tails if one.tail else 1.0) for one in given])
        kept = tuple(one for one, weight in zip(given, weight_F, strict=True) if weight > 0)
        falls_F = np.array([self.falls * (one == LOG_LOGISTIC) for one in kept])
        return kept, (1.0 - self.falls) * weight_F[weight_F > 0] / weight_F.sum() + falls_F

    def log_cells(self, sample: Sample, family: Family, log_b: np.ndarray, log_mid: np.ndarray) -> np.ndarray:
        """Return the log-density over (log B, log C_mid) of cells, (c,)."""
        z = (log_mid - sample.log_c_range[1] - USUAL_MID) / _MID_SD
        return -0.5 * z**2 + _log_b_density(family, log_b)

    def log_base(self, family: Family, log_b: np.ndarray, A: np.ndarray, R_0: np.ndarray) -> np.ndarray:
        """Return the log-density over (log B, A) given R_0, which another prior replaces, in their shape."""
        return _log_b_density(family, log_b) + np.where(A < 1.0, self.log_ends(A, R_0), 0.0)

    def log_ends(self, A: np.ndarray, R_0: np.ndarray) -> np.ndarray:
        """Return the log-density over (R_0, A), in their common shape."""
        # A run that falls is one that rises, upside down.
        room = np.maximum(np.where(A < R_0, R_0, 1.0 - R_0), 1e-6)
        # Bounded away from the poles of the density at no gain, and at A = 1.
        share = np.clip(np.abs(A - R_0) / room, 1e-4, 1.0 - 1e-4)
        first, second = _GAIN
        # No log1p: the share is at most 1 - 1e-4, and its log is slow.
        density = _LOG_BETA + (first - 1) * np.log(share) + (second - 1) * np.log(1.0 - share) - np.log(room)
        # At the ends of its range A has a probability, not a density.
        certain = (A >= 1.0) | (A <= 0.0)
        return np.where(certain, math.log(max(self.certain, 1e-300)), density + math.log1p(-self.certain))


def _log_b_density(family: Family, log_b: np.ndarray) -> np.ndarray:
    median, sd = family.usual_B
    return -0.5 * ((log_b - math.log(median)) / sd) ** 2 - math.log(sd * math.sqrt(2 * math.pi))


class _Flat(Prior):
    def log_cells(self, sample: Sample, family: Family, log_b: np.ndarray, log_mid: np.ndarray) -> np.ndarray:
        return log_volume(sample, family, log_b, log_mid)

    def log_base(self, family: Family, log_b: np.ndarray, A: np.ndarray, R_0: np.ndarray) -> np.ndarray:
        # A prior that is flat over the evaluations has no density over log B and A alone: taken as uniform.
        return np.full(np.broadcast(log_b, A, R_0).shape, -math.log(self.log_b[1] - self.log_b[0]))

    def log_ends(self, A: np.ndarray, R_0: np.ndarray) -> np.ndarray:
        # The derivatives by log B and log C_mid in the volume have a factor A - R_0 each.
        return 2 * np.log(np.maximum(A - R_0, 1e-12))


_NOISE = (
    NoiseModel(0.0, 0.0, 0.8),
    NoiseModel(0.4, 0.0, 0.8),
    NoiseModel(0.8, 0.0, 0.6),
    NoiseModel(0.9, 0.0, 0.3),
    NoiseModel(0.0, 10.0, 0.3),
    NoiseModel(0.0, 100.0, 0.3),
    NoiseModel(0.0, 0.0, 0.015, trend=1000.0),
)
DEFAULT = Prior(
    "default",
    (math.log(0.2), math.log(12.0)),
    _NOISE,
    (0.01, 0.8),
    falls=0.1,
    certain=0.04,
    tails=0.15 / 0.175,
    changes=(1.0, 0.1),
)
FLAT = _Flat(
    "flat",
    (math.log(0.3), math.log(6.0)),
    tuple(NoiseModel(phi, 0.0) for phi in (0.0, 0.2, 0.4, 0.6, 0.8, 0.9)),
    None,
    falls=0.0,
    certain=0.0,
    tails=0.0,
)
PRIORS = {prior.name: prior for prior in (DEFAULT, FLAT)}


def log_mid_range(sample: Sample) -> tuple[float, float]:
    """Return the range of log C_mid that has prior mass."""
    low, high = sample.log_c_range
    return low - math.log(PRIOR_REACH), high + math.log(PRIOR_REACH)


def log_volume(sample: Sample, family: Family, log_b: np.ndarray, log_mid: np.ndarray) -> np.ndarray:
    """Return the log-density of the flat prior over (R_0, A, log B, log C_mid), less 2 log(A - R_0); (c,).

    sqrt(det J^T J), with J the derivatives of the curve at the evaluations, and at those in half as much
    compute to come.
    """
    ahead_K = 1.0 + _AHEAD * (np.arange(_AHEAD_NODES) + 0.5) / _AHEAD_NODES
    trained_N = np.isfinite(sample.log_c_N)
    # Evaluations to come are as dense as those so far.
    each = _AHEAD * float(sample.weight_N[trained_N].sum()) / _AHEAD_NODES
    log_c_D = np.concatenate([sample.log_c_N, sample.log_c_range[1] + np.log(ahead_K)])
    weight_D = np.concatenate([sample.weight_N, np.full(_AHEAD_NODES, each)])
    g, by_log_b, by_log_c = family.slopes(np.exp(log_b)[:, None], log_c_D - log_mid[:, None])
    free = [g, by_log_b, by_log_c] if sample.r0 is not None else [1.0 - g, g, by_log_b, by_log_c]
    basis = np.stack(free, axis=1)
    gram = (basis * weight_D) @ basis.transpose(0, 2, 1)
    # Parameters that change nothing make J^T J singular: scaled and damped, they just get little density.
    scale = np.sqrt(np.maximum(np.einsum("cii->ci", gram), 1e-300))
    gram = gram / (scale[:, :, None] * scale[:, None]) + 1e-13 * np.eye(len(free))
    return 0.5 * np.linalg.slogdet(gram)[1] + np.log(scale).sum(axis=1)
