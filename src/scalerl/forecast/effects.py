"""Which switches of a factorial move the ceiling and C_mid, and which of them only together.

    theta_run = mu + sum_i b_i x_i + sum_c b_c x_c + block + tau z + e         theta = A, or log C_mid

x_i is +1/2 in the arms with switch i on and -1/2 in those with it off, so that b_i is the **main effect**:
the mean of theta with the switch on less that with it off, over the settings of all others in the design.
x_c is 2 x_i x_j, so that b_c is the **interaction**: half of (the effect of i with j on, less that with j
off), as in Box, Hunter and Hunter. Interactions of one chain of aliases have one column, and b_c is their
sum. Those of three switches and more are taken to be none.

A block is a seed, which all arms share. mu and the blocks are flat. Main effects and interactions are normal
about 0, each with a scale of its own, integrated over a half-t prior; tau is what is left of a seed within a
block, with the prior of `scalerl.curve.seeds`. e is the run's own posterior, as a normal, given the family
that all runs share, and families are averaged by how well they do for all. Holm's correction is over all
effects on both parameters together: any false verdict at all has probability 1 - level at most.

Shapes: R runs, P effects.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scalerl.curve.answers import check_level
from scalerl.curve.quantiles import tails
from scalerl.curve.result import Fit
from scalerl.curve.seeds import SEED_PRIOR, SeedPrior, theta_moments
from scalerl.errors import CannotAnswerError, InputError
from scalerl.forecast.compare import holm
from scalerl.forecast.effect_tables import Effect, Effects, OnParameter, Verdict
from scalerl.forecast.sides import joint_weights
from scalerl.forecast.splits.mixed import LinearPosterior, ScalePrior, half_t, linear_posterior, mixture

MAIN_SCALE = {"A": 0.03, "log_C_mid": 0.3}
"""Scale of the half-t prior of how large main effects are. Ours: the paper's choices of one part move A by
0 to .09, and mostly by less than .02 (arXiv 2510.13786)."""
INTERACTION_SHARE = 0.5
"""The same for interactions, as a share of it."""
_THETA = {"A": 0, "log_C_mid": 2}  # places in (A, log B, log C_mid)
_LITTLE = 1e-2  # weight of a family that is not worth a model
_DRAWS = 4096
_CLOSE = 0.05  # correlation of two columns from which it is said that they are not free of one another

Names = Sequence[tuple[tuple[str, ...], ...]]
"""Of effects: the switches of each, as in `Effect.of`."""
_VERDICTS: dict[str, tuple[Verdict, Verdict]] = {
    "A": ("higher ceiling", "lower ceiling"),
    "log_C_mid": ("reaches it later", "reaches it sooner"),
}


@dataclass(frozen=True)
class DesignRun:
    """A run of a factorial: its arm, its block, and its fit."""

    arm: str
    seed: int
    fit: Fit


@dataclass(frozen=True)
class Moments:
    """Means and sd of (A, log B, log C_mid) of the runs, given a family of this weight; both (R, 3)."""

    weight: float
    mean_R3: np.ndarray
    sd_R3: np.ndarray


def effects(
    runs: Sequence[DesignRun],
    design: Mapping[str, Any],
    *,
    level: float = 0.95,
    seed_prior: SeedPrior = SEED_PRIOR,
) -> Effects:
    """Main effects and interactions of a two-level design, from the fits of its runs.

    Runs that are missing, or that no curve describes, are left out; what is there still answers, with a
    caution where effects are then no longer free of one another.

    Args:
        runs: a fit for every run that has one; runs of one seed are a block.
        design: "factors", "levels" of every arm and "aliases", as `Factorial.design` writes them.
        level: of the intervals; 1 - level is the family-wise error of the verdicts.
        seed_prior: how far seeds are apart.

    Raises:
        InputError: a run of an arm that is not in the design, fits on several axes, or a level out of range.
        CannotAnswerError: no two arms share a seed.
    """
    if len({run.fit.axis for run in runs}) > 1:
        raise InputError("all runs need one compute axis")
    used = [run for run in runs if not run.fit.misfit]
    left_out = tuple(f"{run.arm} seed {run.seed}: {run.fit.why}" for run in runs if run.fit.misfit)
    vague = [run for run in used if not run.fit.identified]
    why = ""
    if 2 * len(vague) > len(used):
        why = f"no claim on ceilings: {len(vague)} of {len(used)} runs leave theirs open ({vague[0].fit.why})"
    return effects_of(
        _moments([run.fit for run in used]) if used else [],
        [run.arm for run in used],
        [run.seed for run in used],
        design,
        level=level,
        seed_prior=seed_prior,
        left_out=left_out,
        why_no_ceiling=why,
    )


def effects_of(
    moments: Sequence[Moments],
    arms: Sequence[str],
    seeds: Sequence[int],
    design: Mapping[str, Any],
    *,
    level: float = 0.95,
    seed_prior: SeedPrior = SEED_PRIOR,
    left_out: tuple[str, ...] = (),
    why_no_ceiling: str = "",
) -> Effects:
    """`effects`, of runs known by the moments of their parameters, given each family that they may share."""
    check_level(level)
    factors = list(design["factors"])
    if astray := [arm for arm in arms if arm not in design["levels"]]:
        raise InputError(f"a run of arm {astray[0]!r}, which is not in the design")
    names = [((factor,),) for factor in factors]
    names += [tuple(tuple(pair) for pair in chain) for chain in design["aliases"]]
    x_RF = np.array([design["levels"][arm] for arm in arms]).reshape(len(arms), len(factors)) - 0.5
    X_RP = _columns(x_RF, factors, names)
    fixed_RF = _fixed(seeds)
    found = {
        parameter: _posterior(moments, parameter, X_RP, len(factors), fixed_RF, seed_prior)
        for parameter in _THETA
    }
    p = {parameter: _p(post) for parameter, post in found.items()}
    adjusted = iter(holm([float(value) for p_P in p.values() for value in p_P]))
    on = [
        _on(
            parameter,
            post,
            names,
            list(zip(p[parameter].tolist(), adjusted, strict=False)),
            level,
            withheld=parameter == "A" and bool(why_no_ceiling),
        )
        for parameter, post in found.items()
    ]
    cautions = [*([why_no_ceiling] if why_no_ceiling else []), *_gaps(arms, design, X_RP, fixed_RF, names)]
    return Effects(tuple(factors), len(arms), level, tuple(on), left_out, tuple(cautions))


def _on(
    parameter: str,
    post: LinearPosterior,
    names: Names,
    p: Sequence[tuple[float, float]],
    level: float,
    withheld: bool,
) -> OnParameter:
    low, high = tails(level)
    rows = zip(names, post.quantiles(np.array([low, 0.5, high])).T.tolist(), p, strict=True)
    made = []
    for of, (least, median, most), (raw, adjusted) in rows:
        more, less = _VERDICTS[parameter]
        verdict = more if median > 0 else less
        if withheld:
            verdict = "no claim"
        elif adjusted > 1 - level:
            verdict = "not distinguishable"
        made.append(Effect(of, median, (least, most), raw, adjusted, verdict))
    scales = [post.rms(post.scale_NG[:, g]) for g in range(post.scale_NG.shape[1])]
    return OnParameter(parameter, tuple(made), post.rms(post.tau_N), scales[0], [*scales, math.nan][1])


def _p(post: LinearPosterior) -> np.ndarray:
    """Two-sided tail mass at 0; not below 1e-6, where the normal table ends to be right."""
    above_P = post.above(np.zeros(post.mean_NP.shape[1]))
    return np.clip(2 * np.minimum(above_P, 1 - above_P), 1e-6, 1.0)


def _columns(x_RF: np.ndarray, factors: list[str], names: Names) -> np.ndarray:
    """+1/2 and -1/2 for every effect; a chain is told by the first of its interactions."""
    columns = []
    for of in names:
        places = [factors.index(factor) for factor in of[0]]
        columns.append(0.5 * np.prod(2 * x_RF[:, places], axis=1))
    return np.array(columns).T


def _fixed(seeds: Sequence[int]) -> np.ndarray:
    """A column for every block."""
    distinct = sorted(set(seeds))
    if len(distinct) > len(seeds) - 1:
        raise CannotAnswerError("no two runs share a seed: the effects of switches and of seeds are one")
    return np.array([[float(seed == one) for one in distinct] for seed in seeds])


def _posterior(
    moments: Sequence[Moments],
    parameter: str,
    X_RP: np.ndarray,
    mains: int,
    fixed_RF: np.ndarray,
    seed_prior: SeedPrior,
) -> LinearPosterior:
    """Of the effects on one parameter, families averaged."""
    place, scale, spread = _THETA[parameter], MAIN_SCALE[parameter], seed_prior.spread()
    weight_T = spread.weight_3T[place, ::4]  # every fourth node is enough
    tau = ScalePrior(spread.tau_3T[place, ::4], weight_T / weight_T.sum())
    groups = [(X_RP[:, :mains], half_t(scale))]
    if X_RP.shape[1] > mains:
        groups.append((X_RP[:, mains:], half_t(INTERACTION_SHARE * scale)))
    parts = [
        linear_posterior(given.mean_R3[:, place], given.sd_R3[:, place], fixed_RF, groups, tau)
        for given in moments
    ]
    return mixture(parts, [given.weight for given in moments])


def _moments(fits: Sequence[Fit]) -> list[Moments]:
    """Of the runs, given each family that is worth a model if all of them share it."""
    return [
        Moments(float(weight), *theta_moments([fit.posterior.only(f).draws(_DRAWS) for fit in fits]))
        for f, weight in enumerate(joint_weights(fits))
        if weight > _LITTLE
    ]


def _gaps(
    arms: Sequence[str],
    design: Mapping[str, Any],
    X_RP: np.ndarray,
    fixed_RF: np.ndarray,
    names: Names,
) -> list[str]:
    """What cannot be told: effects in one chain, arms without a run, and seeds without replicates."""
    said = []
    chains = sum(len(of) > 1 for of in names)
    if chains:
        said.append(
            f"{chains} sums of interactions that this design cannot tell apart: resolution 5 would, or runs "
            "of the two switches alone"
        )
    missing = [arm for arm in design["levels"] if arm not in arms]
    if missing:
        said.append(f"no run of {', '.join(missing)} to go by")
    said += _correlated(X_RP, fixed_RF, names)
    rank = np.linalg.matrix_rank(np.hstack([fixed_RF, X_RP]))
    if len(arms) - rank < 3:
        said.append(
            "almost every run is needed for the effects: how far seeds are apart is taken from the prior, "
            "and more seeds of every arm would show it"
        )
    return said


def _correlated(X_RP: np.ndarray, fixed_RF: np.ndarray, names: Names) -> list[str]:
    """Main effects that the gaps mix up with another effect, each with the one that is closest."""
    X = X_RP - fixed_RF @ np.linalg.lstsq(fixed_RF, X_RP, rcond=None)[0]
    norm_P = np.linalg.norm(X, axis=0)
    said = []
    labels = [" + ".join(" x ".join(pair) for pair in of) for of in names]
    for i, of in enumerate(names):
        if len(of[0]) > 1:
            break
        if norm_P[i] < 1e-9:
            said.append(f"{labels[i]} is never switched within a block: nothing is known of its effect")
            continue
        cosine_P = np.abs(X.T @ X[:, i]) / (norm_P[i] * np.maximum(norm_P, 1e-9))
        cosine_P[i] = 0.0
        j = int(np.argmax(cosine_P))
        if cosine_P[j] > _CLOSE:
            said.append(
                f"with the runs that are missing, {labels[i]} is not free of {labels[j]} "
                f"(correlation {cosine_P[j]:.2f})"
            )
    return said
