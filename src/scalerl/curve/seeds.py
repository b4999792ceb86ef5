"""How a recipe's curve varies with its seed: the prior, its update by replicates, and a rerun.

    theta_run = theta_recipe + tau * z        theta = (A, log B, log C_mid),  z ~ N(0, 1) for each

tau, the seed sd, has a log-normal prior, so the effect of one seed has heavy tails. R_0 has no seed effect:
it is that of the model before training. Runs in blocks (a base model and a set of prompts each, which all
recipes share) also have the effect of their block, which cancels in differences within a block:

    theta_run = theta_recipe + theta_block + tau * z

Shapes: n draws, T values of tau, R runs, 3 parameters in the order of theta, P fixed effects.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from scalerl.curve.posterior import Draws

_NODES, _REACH = 61, 3.5  # nodes of log tau, over this many prior standard deviations either way


@dataclass(frozen=True)
class SeedPrior:
    """Root mean square of the effect of one seed, and the sd of log tau behind it.

    A: three seeds of one recipe lay within +-.015 (arXiv 2510.13786). log B and log C_mid: nothing is
    published for seeds. The paper's nine leave-one-out arms, which differ by a component besides the seed and
    the error of the fit, spread by .08 and .10; 20 seeds of the demonstration spread by .018 and .015 (and by
    .0013 in A). `log_sd` .7 lets tau be four times its median, or a quarter of it, at two sd.
    """

    A: float = 0.013
    log_b: float = 0.08
    log_mid: float = 0.06
    log_sd: float = 0.7

    @property
    def median_3(self) -> np.ndarray:
        """Median of tau for A, log B and log C_mid: of a log-normal, E tau^2 = median^2 exp(2 log_sd^2)."""
        return np.array([self.A, self.log_b, self.log_mid]) * math.exp(-(self.log_sd**2))

    def spread(self) -> SeedSpread:
        """Return the prior as a distribution of tau on nodes."""
        z_T = np.linspace(-_REACH, _REACH, _NODES)
        tau_3T = self.median_3[:, None] * np.exp(self.log_sd * z_T)
        weight_T = np.exp(-0.5 * z_T**2)
        return SeedSpread(tau_3T, np.tile(weight_T / weight_T.sum(), (3, 1)))


@dataclass(frozen=True)
class SeedSpread:
    """A distribution of tau: nodes, and weights that sum to 1 for each parameter; both (3, T)."""

    tau_3T: np.ndarray
    weight_3T: np.ndarray

    @property
    def rms_3(self) -> np.ndarray:
        """Root mean square of the effect of one seed on (A, log B, log C_mid)."""
        return np.sqrt(np.sum(self.weight_3T * self.tau_3T**2, axis=1))

    def given(
        self, mean_R3: np.ndarray, sd_R3: np.ndarray, recipe_R: np.ndarray, block_R: np.ndarray | None = None
    ) -> SeedSpread:
        """Update by runs, given posterior means and sds of their parameters, their recipes and blocks.

        The likelihood is the restricted one of a mixed model (Patterson and Thompson, 1971), with a mean for
        every recipe and every block, and one tau. Recipes and blocks with one run do not inform it. Run
        posteriors enter as normal.
        """
        fixed_RP = _fixed_effects([recipe_R] if block_R is None else [recipe_R, block_R])
        # What the fixed effects explain does not inform tau, and would cost digits.
        left_R3 = mean_R3 - fixed_RP @ (fixed_RP.T @ mean_R3)
        precision_3TR = 1.0 / (sd_R3.T[:, None] ** 2 + self.tau_3T[:, :, None] ** 2)
        weighed_3TPR = fixed_RP.T * precision_3TR[:, :, None]
        # Restricted: without log |F' V^-1 F| replicates of two would make tau too small.
        gram_3TPP = weighed_3TPR @ fixed_RP
        moment_3TP1 = weighed_3TPR @ left_R3.T[:, None, :, None]
        explained_3T = np.sum(moment_3TP1 * np.linalg.solve(gram_3TPP, moment_3TP1), axis=(2, 3))
        square_3T = np.sum(precision_3TR * left_R3.T[:, None] ** 2, axis=2) - explained_3T
        log_3T = 0.5 * (np.log(precision_3TR).sum(axis=2) - np.linalg.slogdet(gram_3TPP)[1] - square_3T)
        weight_3T = self.weight_3T * np.exp(log_3T - log_3T.max(axis=1, keepdims=True))
        return replace(self, weight_3T=weight_3T / weight_3T.sum(axis=1, keepdims=True))

    def effects(self, n: int, seed: int = 0, runs: int = 1) -> np.ndarray:
        """Draw the seed effects on theta of `runs` runs that share their tau, (runs, 3, n)."""
        # A systematic sample of tau, as of the posterior: every set of draws has its tails alike.
        rng = np.random.default_rng(seed)
        tau_3n = np.empty((3, n))
        for j in range(3):
            held = np.cumsum(self.weight_3T[j])
            nodes = np.searchsorted(held, (np.arange(n) + 0.5) / n * held[-1])
            tau_3n[j] = rng.permutation(self.tau_3T[j, nodes])
        return tau_3n * rng.standard_normal((runs, 3, n))


SEED_PRIOR = SeedPrior()
"""The default prior of the seed effects, stated in every comparison."""
MODEL_PRIOR = SeedPrior(A=0.05, log_b=0.15, log_mid=0.3)
"""The prior of the effects of seeds with base models of their own: our own judgement. Within pairs of one
base model these effects cancel."""


def _fixed_effects(labels: Sequence[np.ndarray]) -> np.ndarray:
    """Return an orthonormal basis of one mean for each value of every label, (R, P)."""
    means = [label_R[:, None] == np.unique(label_R) for label_R in labels]
    # Recipes and blocks share the overall mean, so their columns are collinear, and X' V^-1 X of them would
    # be singular. The directions without size, which are left out, are what they share.
    basis_RP, size_P, _ = np.linalg.svd(np.hstack(means).astype(float), full_matrices=False)
    return basis_RP[:, size_P > 1e-9 * size_P[0]]


def shifted(draws: Draws, effect_3n: np.ndarray) -> Draws:
    """Shift the curves by seed effects (3, n); the ceiling stays in [R_0, 1], or [0, R_0] where it falls."""
    falls_n = draws.A_n < draws.R_0_n
    low_n, high_n = np.where(falls_n, 0.0, draws.R_0_n), np.where(falls_n, draws.R_0_n, 1.0)
    A_n = np.clip(draws.A_n + effect_3n[0], low_n, high_n)
    log_b_n, log_mid_n = draws.log_b_n + effect_3n[1], draws.log_mid_n + effect_3n[2]
    return replace(draws, A_n=A_n, log_b_n=log_b_n, log_mid_n=log_mid_n)


def rerun(draws: Draws, prior: SeedPrior) -> Draws:
    """Return the curves of a rerun with another seed, one for every draw of this run.

    Both seed effects share one tau, so the two runs differ by a variance of 2 tau^2 in each of theta.
    """
    here_3n, there_3n = prior.spread().effects(len(draws.A_n), runs=2)
    return shifted(draws, there_3n - here_3n)


def theta_moments(runs: Sequence[Draws]) -> tuple[np.ndarray, np.ndarray]:
    """Return means and sds of (A, log B, log C_mid) for every run, both (R, 3)."""
    theta_R3n = np.array([[draws.A_n, draws.log_b_n, draws.log_mid_n] for draws in runs])
    return theta_R3n.mean(axis=2), theta_R3n.std(axis=2)


def pooled(runs: Sequence[Draws], spread: SeedSpread) -> tuple[Draws, float]:
    """Return the mean of the runs of one recipe, draw by draw, and the share of one seed's variance in it.

    A run is weighted by the inverse of its variance (its own and the seed's), so one that was cut short
    counts less. With equal runs and normal posteriors this is the random-effects mean, and the share is
    1 / R. The runs are draws of equal length, given one family.
    """
    return _mean(runs, 1.0 / _variance(runs, spread))


def pooled_alike(
    base: Sequence[Draws], recipe: Sequence[Draws], spread: SeedSpread, groups: Sequence[Hashable]
) -> tuple[tuple[Draws, Draws], float]:
    """Return `pooled` of two recipes with one run each in every block, with the same weights: blocks cancel.

    A block is weighted by the inverse of the variance of its difference. The share of a seed's variance that
    is left is the same in both means. Blocks of one group (a base model) are taken to share their effect
    entirely, which is the worst case: what a recipe does to one seed of a base model, it does to all.
    """
    weight_R = 1.0 / (_variance(base, spread) + _variance(recipe, spread))
    weight_R /= weight_R.sum()
    (base_mean, _), (recipe_mean, _) = _mean(base, weight_R), _mean(recipe, weight_R)
    held = [sum(w for w, g in zip(weight_R, groups, strict=True) if g == group) for group in set(groups)]
    return (base_mean, recipe_mean), float(np.sum(np.square(held)))


def _variance(runs: Sequence[Draws], spread: SeedSpread) -> np.ndarray:
    """Return the variance of every run, its own and the seed's, in units of the seed's, (R,)."""
    _, sd_R3 = theta_moments(runs)
    return np.mean((sd_R3 / spread.rms_3) ** 2 + 1.0, axis=1)


def _mean(runs: Sequence[Draws], weight_R: np.ndarray) -> tuple[Draws, float]:
    """Return the weighted mean, and the sum of the squared weights; weights are scaled to sum to 1."""
    weight_R = weight_R / weight_R.sum()
    means = {
        name: weight_R @ np.stack([getattr(draws, name) for draws in runs])
        for name in ("A_n", "log_b_n", "log_mid_n", "R_0_n", "drift_n", "slope_n")
    }
    # Each run changes its level at places of its own.
    changes = tuple(change for draws in runs for change in draws.changes)
    step_dn = np.concatenate([w * draws.step_dn for w, draws in zip(weight_R, runs, strict=True)])
    mean = replace(runs[0], **means, changes=changes, step_dn=step_dn)
    return mean, float(np.sum(weight_R**2))
