"""The posterior of the curve by deterministic quadrature, averaged over families.

    y_i = R(C_i; family, A, B, C_mid, R_0) + e_i        e ~ N(0, sd^2 K_phi)       K_phi[i, j] = phi^distance

The prior is in `scalerl.curve.prior`. For a family, (B, C_mid) and a model of the noise the sum of squares is
a quadratic in (R_0, A), and the integral over sd depends on the sum of squares alone, so nothing is sampled:
nodes are laid where the posterior has mass (`scalerl.curve.nodes`).

A wander is part of the run's mean curve. A node's curve is shifted to where its walk is at the last
evaluation, and drifts from there with the square root of the clock; shift and drift are one quantile each of
their normal distributions. Together the nodes have the right distribution at every compute. A trend continues
with its slope. A change of level (`scalerl.curve.changes`) is permanent; before it the curve is without it.

Shapes: P models of the noise, M values of log C_mid, K of log B; cells (B, C_mid, noise) = those kept of
P x M x K, over all families; a = nodes of A, r = nodes of R_0 for each A.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from scalerl.curve.changes import likely_changes
from scalerl.curve.families import LOG_LOGISTIC, Family, log_compute, log_compute_to, of_families
from scalerl.curve.least_squares import LeastSquares, least_squares
from scalerl.curve.nodes import WORTH, Nodes, find_ridges, lay_nodes, level_of_cells
from scalerl.curve.noise import Noise, make_noise
from scalerl.curve.prior import USUAL_MID, NoiseModel, Prior
from scalerl.curve.sample import Sample, clock

_LITTLE = 1e-3  # gain below which a least-squares curve is flat
_BY_CELL = ("family_cells", "log_b_cells", "log_mid_cells", "log_b_span_cells2", "log_mid_span_cells2")
_BY_CELL += ("phi_cells", "change_cells", "A", "R_0", "drift", "slope", "step")
_DRAWN = ("family_n", "A_n", "log_b_n", "log_mid_n", "R_0_n", "drift_n", "slope_n", "step_dn")


@dataclass(frozen=True)
class Draws:
    """Curves of equal weight; all arrays are (n,), and `family_n` is an index into `families`.

    `drift_n` is how far the wander goes after the last evaluation, per root of the clock since then, and
    `slope_n` how far a trend goes, per compute since then as a share of the run's. `step_dn` is the size of
    each of the d `changes` of level, 0 in draws without it; R_0 and A are those after the changes.
    """

    families: tuple[Family, ...]
    family_n: np.ndarray
    A_n: np.ndarray
    log_b_n: np.ndarray
    log_mid_n: np.ndarray
    R_0_n: np.ndarray
    drift_n: np.ndarray
    slope_n: np.ndarray
    log_c_range: tuple[float, float]
    """Logarithms of the smallest positive and the largest compute of the run."""
    changes: tuple[NoiseModel, ...] = ()
    step_dn: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))

    def curves_at(self, compute_M: np.ndarray) -> np.ndarray:
        """Return the mean curves at computes (M,), shape (n, M)."""
        log_c_M = log_compute(np.asarray(compute_M, dtype=float))
        x = log_c_M - self.log_mid_n[:, None]
        share = of_families(self.families, self.family_n, "share", np.exp(self.log_b_n)[:, None], x)
        drift = self.drift_n[:, None] * _since(compute_M, self.log_c_range)
        drift = drift + self.slope_n[:, None] * _ahead(compute_M, self.log_c_range)
        for change, step_n in zip(self.changes, self.step_dn, strict=True):
            drift = drift - step_n[:, None] * (1.0 - change.changed(log_c_M))
        return np.clip(self.R_0_n[:, None] + (self.A_n - self.R_0_n)[:, None] * share + drift, 0.0, 1.0)

    def log_compute_to(self, target: float) -> np.ndarray:
        """Return log C at which the curves reach `target` without more wander: -inf up to R_0, inf from A."""
        b_n = np.exp(self.log_b_n)
        return log_compute_to(self.families, self.family_n, self.A_n, b_n, self.log_mid_n, self.R_0_n, target)

    def thinned(self, n: int) -> Draws:
        """Return about n of the draws, evenly spaced, for quantities that are costly per draw."""
        every = max(len(self.A_n) // n, 1)
        return replace(self, **{name: getattr(self, name)[..., ::every] for name in _DRAWN})

    @classmethod
    def joined(cls, parts: Sequence[Draws]) -> Draws:
        """Return the draws of several parts as one; the parts have the same families and changes."""
        arrays = {name: np.concatenate([getattr(part, name) for part in parts], axis=-1) for name in _DRAWN}
        return replace(parts[0], **arrays)


@dataclass(frozen=True)
class Posterior:
    """Weighted nodes; arrays without a suffix are (cells, a, r), and `weight` sums to 1.

    `drift` and `slope` are as in `Draws`. A is below R_0 where a node's curve falls. `step` is the size of
    the change of level `changes[change_cells]`, 0 where a cell has none; R_0 and A are those after it.
    """

    family_cells: np.ndarray
    log_b_cells: np.ndarray
    log_mid_cells: np.ndarray
    log_b_span_cells2: np.ndarray
    """The range of log B that a cell covers, (cells, 2) ..."""
    log_mid_span_cells2: np.ndarray
    """... and that of log C_mid: their quantiles are taken over these ranges."""
    phi_cells: np.ndarray
    change_cells: np.ndarray
    A: np.ndarray
    R_0: np.ndarray
    drift: np.ndarray
    slope: np.ndarray
    step: np.ndarray
    log_weight: np.ndarray
    weight: np.ndarray
    sd_J: np.ndarray
    sd_weight_J: np.ndarray
    families: tuple[Family, ...]
    prior: Prior
    changes: tuple[NoiseModel, ...]
    moved: float
    """How far wander, trend and steps have moved the run by the last evaluation: the posterior mean."""
    log_c_range: tuple[float, float]

    @property
    def weight_cells(self) -> np.ndarray:
        """Return the weight of every cell."""
        return self.weight.sum(axis=(1, 2))

    def family_weights(self) -> dict[str, float]:
        """Return the posterior probability of every family."""
        mass = np.bincount(self.family_cells, self.weight_cells, len(self.families))
        return {family.name: float(m) for family, m in zip(self.families, mass, strict=True)}

    def likeliest_change(self) -> tuple[float, NoiseModel | None, float]:
        """Return the probability that the level changes, the likeliest change, and its expected size."""
        mass_car = np.where(self.step != 0.0, self.weight, 0.0)
        mass_d = np.bincount(self.change_cells, mass_car.sum(axis=(1, 2)), max(len(self.changes), 1))
        if not mass_d.any():
            return 0.0, None, 0.0
        d = int(np.argmax(mass_d))
        mine = self.change_cells == d
        return (
            float(mass_d.sum()),
            self.changes[d],
            float(np.sum(self.step[mine] * mass_car[mine]) / mass_d[d]),
        )

    def only(self, family: int) -> Posterior:
        """Return the posterior of the curve given one family, however little weight that has.

        The noise, `sd_weight_J`, stays that of all families.
        """
        return self._take(np.flatnonzero(self.family_cells == family))

    def reweighted(self, log_weight: np.ndarray) -> Posterior:
        """Return the same nodes with other log-weights, normalised here; `sd_weight_J` is unchanged."""
        log_weight, weight = _normalised(log_weight)
        return replace(self, log_weight=log_weight, weight=weight)

    def _take(self, keep: np.ndarray) -> Posterior:
        kept = {name: getattr(self, name)[keep] for name in _BY_CELL}
        return replace(self, **kept).reweighted(self.log_weight[keep])

    def heaviest(self, mass: float) -> Posterior:
        """Return the fewest cells that hold `mass` of the posterior, for answers at many computes."""
        # Stable, so that ties are broken alike on every machine.
        order = np.argsort(-self.weight_cells, kind="stable")
        held = np.cumsum(self.weight_cells[order])
        return self._take(order[: int(np.searchsorted(held, mass)) + 1])

    def draws(self, n: int, seed: int = 0) -> Draws:
        """Draw n curves of equal weight: a systematic sample of the nodes, shuffled by `seed` (for pairing).

        A systematic sample gives quantiles with less error than independent draws.
        """
        held = np.cumsum(self.weight.ravel())
        at = np.searchsorted(held, (np.arange(n) + 0.5) / n * held[-1])
        cell, a, r = np.unravel_index(np.random.default_rng(seed).permutation(at), self.weight.shape)
        return Draws(
            self.families,
            self.family_cells[cell],
            self.A[cell, a, r],
            self.log_b_cells[cell],
            self.log_mid_cells[cell],
            self.R_0[cell, a, r],
            self.drift[cell, a, r],
            self.slope[cell, a, r],
            self.log_c_range,
            self.changes,
            self.step[cell, a, r] * (self.change_cells[cell] == np.arange(len(self.changes))[:, None]),
        )

    def curve_at(self, compute: float) -> np.ndarray:
        """Return the mean curve at one compute for every node, shape (cells, a, r)."""
        return next(self.curves_at(np.array([compute])))

    def curves_at(self, compute_M: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the mean curve at each compute for every node, shape (cells, a, r)."""
        log_c_M = log_compute(compute_M)
        x_cellsM = log_c_M - self.log_mid_cells[:, None]
        b_cells1 = np.exp(self.log_b_cells)[:, None]
        share_cellsM = of_families(self.families, self.family_cells, "share", b_cells1, x_cellsM)
        since_M, ahead_M = _since(compute_M, self.log_c_range), _ahead(compute_M, self.log_c_range)
        for m, log_c in enumerate(log_c_M):
            g = share_cellsM[:, m, None, None]
            value = self.R_0 * (1 - g) + self.A * g
            if self.changes:
                come = np.array([one.changed(log_c) for one in self.changes])
                value = value - self.step * (1.0 - come[self.change_cells])[:, None, None]
            if since_M[m]:  # the walk is unbounded; a pass rate is not
                value = np.clip(value + self.drift * since_M[m] + self.slope * ahead_M[m], 0.0, 1.0)
            yield value

    def compute_to(self, target: float) -> np.ndarray:
        """Return the compute at which every node's curve reaches `target`: 0 up to R_0, infinite from A on.

        The wander stays where it is: a walk that continues crosses any target at some time. R_0 is that after
        a change of level, so a target below it counts as reached at 0, although a burst passes it later.
        """
        b, log_mid = np.exp(self.log_b_cells)[:, None, None], self.log_mid_cells[:, None, None]
        log_c = log_compute_to(self.families, self.family_cells, self.A, b, log_mid, self.R_0, target)
        # exp overflows above 709, and a finite compute must not become an infinite one.
        return np.exp(np.where(np.isinf(log_c), log_c, np.clip(log_c, -700, 700)))


def posterior(sample: Sample, floor: float, best: Sequence[LeastSquares], prior: Prior) -> Posterior:
    """Integrate over the families of `best` and the noise of `prior`, and normalise over all of them.

    `best` holds the least-squares curve of every family, where the search for its nodes starts. `floor` is
    the least sd of the noise.
    """
    changes = tuple(likely_changes(sample, floor, prior))
    noise = make_noise(sample, floor, prior, changes)
    families, prior_F = prior.families([found.curve.family for found in best])
    log_mid_F = [math.log(found.curve.C_mid) for found in best if found.curve.family in families]
    ridges = find_ridges(sample, families, noise, prior, log_mid_F)
    falls_F = np.array([prior.falls * (family == LOG_LOGISTIC) for family in families])
    rising = lay_nodes(sample, ridges, noise, prior, ridges.level)
    # Falling curves take their mass from the family that they belong to, so that all sum to 1.
    log_prior_F = np.log(prior_F - falls_F)
    parts = [replace(rising, log_weight=rising.log_weight + log_prior_F[rising.family_cells][:, None, None])]
    if prior.falls and (falling := _falling(sample, noise, prior, ridges.level)):
        family_cells = falling.family_cells + families.index(LOG_LOGISTIC)
        parts.append(replace(falling, family_cells=family_cells))
    nodes = Nodes.joined(parts)
    log_weight, weight = _normalised(nodes.log_weight)
    change_cells = nodes.model_cells - len(prior.noise)
    A, R_0, drift, slope, walked = _walked(noise, nodes)
    # A burst upwards is how the run began; every other walk has moved the run off its curve.
    bursts = [len(prior.noise) + i for i, one in enumerate(changes) if one.burst]
    walks = noise.walks.of_model(nodes.model_cells)
    own = np.isin(nodes.model_cells[walks], bursts)[:, None, None]
    off = np.where(own, np.minimum(nodes.walk, 0.0), nodes.walk)
    return Posterior(
        family_cells=nodes.family_cells,
        log_b_cells=nodes.log_b_cells,
        log_mid_cells=nodes.log_mid_cells,
        log_b_span_cells2=nodes.log_b_span_cells2,
        log_mid_span_cells2=nodes.log_mid_span_cells2,
        phi_cells=nodes.phi_cells,
        change_cells=np.maximum(change_cells, 0),
        A=A,
        R_0=R_0,
        drift=drift,
        slope=slope,
        step=walked * (change_cells >= 0)[:, None, None],
        log_weight=log_weight,
        weight=weight,
        sd_J=noise.sd_J,
        sd_weight_J=noise.sd_weights(nodes.place_rss.ravel(), weight.ravel()),
        families=families,
        prior=prior,
        changes=changes,
        moved=float(np.sum(off * weight[walks])),
        log_c_range=sample.log_c_range,
    )


def _falling(sample: Sample, noise: Noise, prior: Prior, best: float) -> Nodes | None:
    """Lay the nodes of falling log-logistic curves (A below R_0), which are rising ones upside down.

    Return None if they lie so far below level `best` that they have no mass.
    """
    upside = replace(sample, y_N=1.0 - sample.y_N, r0=None if sample.r0 is None else 1.0 - sample.r0)
    # A rising run has no C_mid of a fall: the search starts where most runs have theirs.
    log_mid, log_b = sample.log_c_range[1] + USUAL_MID, math.log(LOG_LOGISTIC.usual_B[0])
    if _best_flat(sample):
        # A flat curve has its highest prior here. Checked before the search, which is costly: most runs rise.
        usual = np.full((1, 1, 1), log_b), np.full((1, 1), log_mid)
        if level_of_cells(upside, (LOG_LOGISTIC,), noise, prior, *usual).max() < best - WORTH:
            return None
    elif (curve := least_squares(upside, LOG_LOGISTIC, steps=8).curve).A - curve.R_0 > _LITTLE:
        log_mid = math.log(curve.C_mid)
    ridges = find_ridges(upside, (LOG_LOGISTIC,), noise, prior, [log_mid])
    # Checked before the nodes are laid, which is costly: most runs rise.
    if ridges.level < best - WORTH:
        return None
    part = lay_nodes(upside, ridges, noise, prior, best)
    log_weight = part.log_weight + math.log(prior.falls)
    turned = {"A": 1.0 - part.A, "R_0": 1.0 - part.R_0, "walk": -part.walk, "slope": -part.slope}
    return replace(part, log_weight=log_weight, **turned)


def _best_flat(sample: Sample) -> bool:
    """Return whether no falling curve beats a flat one: the mean from every row on is R_0 or more."""
    y_N, weight_N = sample.y_N, sample.weight_N
    R_0 = float(weight_N @ y_N / weight_N.sum()) if sample.r0 is None else sample.r0
    return bool((np.cumsum((weight_N * (y_N - R_0))[::-1]) >= -1e-12).all())


def _walked(noise: Noise, nodes: Nodes) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return A and R_0 shifted by each node's walk, its drift and slope from there, and the walk itself."""
    place, models = nodes.place_rss, nodes.model_cells
    A, R_0 = np.tile(nodes.A[:, :, None], place.shape[2]), nodes.R_0.copy()
    drift, slope, walked = (np.zeros_like(place) for _ in range(3))
    mine = noise.walks.of_model(models)
    if len(mine):
        expected = np.stack([nodes.walk, nodes.slope])
        walk, slope[mine], drift[mine] = noise.walks.drawn(
            models[mine], nodes.place_cells[mine], expected, noise.sd_at(place[mine])
        )
        A[mine], R_0[mine] = np.clip(A[mine] + walk, 0.0, 1.0), np.clip(R_0[mine] + walk, 0.0, 1.0)
        walked[mine] = walk
    return A, R_0, drift, slope, walked


def _since(compute: np.ndarray, log_c_range: tuple[float, float]) -> np.ndarray:
    """Return the root of the wander's clock since the last evaluation, 0 before it; shape as given."""
    return np.sqrt(np.maximum(clock(compute, *log_c_range) - 1.0, 0.0))


def _ahead(compute: np.ndarray, log_c_range: tuple[float, float]) -> np.ndarray:
    """Return the compute beyond the last evaluation as a share of the run's, 0 before it; shape as given."""
    # By e^20 times the run any slope has left [0, 1]; beyond, the product would overflow.
    return np.maximum(np.expm1(np.minimum(log_compute(compute) - log_c_range[1], 20.0)), 0.0)


def _normalised(log_weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the log-weights and the weights, scaled so that the weights sum to 1."""
    # The weights of far nodes may underflow; those of the best must not.
    log_weight = log_weight - log_weight.max()
    weight = np.exp(log_weight)
    total = weight.sum()
    return log_weight - np.log(total), weight / total
