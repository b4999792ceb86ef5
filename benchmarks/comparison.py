"""Are verdicts between recipes right? Simulated runs, seed effects from the stated prior, compared in pairs.

    python benchmarks/comparison.py [--groups 200] [--runs 10] [--pairs 25] [--one-family .7] [--seed 0]

A group is one recipe: its curve (R_0 .25-.40, a gain of .20-.42, B 1.2-2.4; a fifth Weibull, the others
log-logistic), the tau of its seeds, its evaluations (data to 3-6 C_mid, 14-40 of them and one at step 0) and
their noise (sd .0045-.01, AR(1) 0-.8). Its runs differ by seed effect and noise. `any` is the share of pairs
with any verdict, `seen`, `ceiling` and `efficiency` with that one, `inconclusive` where a ceiling was not
identified, `A .05` and `C .05` the two p-values before Holm, `runs alone` any without the seed variance
(Bonferroni); below each line, how often every verdict came. The standard error counts groups, not pairs.
Variants are compared in half as many pairs; three seeds with three once in each group.

One recipe against itself: what is found is false. A higher by .03-.06 alone: an efficiency verdict is
false, a ceiling verdict is power. C_mid lower by 25-45 % alone: the other way round. The same A and a slower
tail (.4-.8 of the gain as the recipe, the rest 4-20 times later and less steep), both to 2, 4, 8 and 16 C_mid
of the recipe: a ceiling verdict is false, lower at the compute seen and later are true.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from scalerl.curve import FAMILIES, LOG_LOGISTIC, SEED_PRIOR, Curve, Fit, Points, fit
from scalerl.curve.families import TwoSpeeds
from scalerl.errors import CannotAnswerError
from scalerl.forecast import compare, sides
from scalerl.forecast.comparison import Pair
from simulation import noise


@dataclass(frozen=True)
class Setting:
    """What the runs of one group share: compute of the evaluations in units of C_mid, and their noise."""

    ratio_N: np.ndarray
    sd: float
    phi: float
    known: bool


@dataclass(frozen=True)
class Group:
    """A recipe and its seed sd (A, log B, log C_mid)."""

    curve: Curve
    tau_3: np.ndarray
    setting: Setting


def draw_group(rng: np.random.Generator, scale: float) -> Group:
    """Draw a recipe, its seed sd (`scale` times the prior's), and how its runs are evaluated."""
    family = FAMILIES[1] if rng.random() < 0.2 else LOG_LOGISTIC
    r0 = float(rng.uniform(0.25, 0.40))
    curve = Curve(family, r0 + float(rng.uniform(0.2, 0.42)), float(rng.uniform(1.2, 2.4)), 3000.0, r0)
    tau_3 = scale * SEED_PRIOR.median_3 * np.exp(SEED_PRIOR.log_sd * rng.standard_normal(3))
    n, top = int(rng.integers(14, 41)), float(rng.uniform(3, 6))
    setting = Setting(
        np.linspace(0, top, n + 1),
        float(rng.uniform(0.0045, 0.01)),
        float(rng.uniform(0, 0.8)),
        rng.random() < 0.5,
    )
    return Group(curve, tau_3, setting)


def run(group: Group, curve: Curve, rng: np.random.Generator) -> Fit | None:
    """Simulate and fit one run of `curve` with its own seed effect; None if it cannot be fitted."""
    setting = group.setting
    A, log_b, log_mid = group.tau_3 * rng.standard_normal(3)
    own = replace(
        curve,
        A=float(np.clip(curve.A + A, curve.R_0, 1.0)),
        B=curve.B * float(np.exp(log_b)),
        C_mid=curve.C_mid * float(np.exp(log_mid)),
    )
    compute_N = group.curve.C_mid * setting.ratio_N
    noise_N = noise(len(compute_N), setting.sd, setting.phi, rng)
    # In half of the groups the sampling noise of an evaluation, a part of its noise, is known.
    known = 0.6 * setting.sd if setting.known else None
    try:
        return fit(Points.from_arrays(compute_N, np.clip(own(compute_N) + noise_N, 0, 1), noise_sd=known))
    except CannotAnswerError:
        return None


SAME, HIGHER, SOONER, SLOWER = "one recipe", "A higher", "C_mid lower", "slower tail"
TOPS = (2, 4, 8, 16)
NOTHING = ("not significant", "inconclusive")


def slower(curve: Curve, rng: np.random.Generator) -> Curve:
    """Return a curve of two speeds to the same ceiling; its first part has the B and C_mid of `curve`."""
    early, later, slow = rng.uniform(0.4, 0.8), rng.uniform(4, 20), rng.uniform(0.6, 1)
    family = TwoSpeeds("slower", "slower", early, curve.B * math.log(later), slow / curve.B)
    # A family's C_mid is at half of the whole gain; the first part has half of its own gain at u = -_shift.
    return replace(curve, family=family, C_mid=curve.C_mid * math.exp(family._shift / curve.B))


def compared(base: list[Fit], recipe: list[Fit]) -> Pair:
    """Return the comparison of two sets of runs."""
    (pair,) = compare({"base": base, "recipe": recipe}).pairs
    return pair


def study(
    group: Group, runs: int, pairs: int, rng: np.random.Generator, variants: bool
) -> dict[str, list[Pair]]:
    """Return all comparisons of one group: of its runs with one another, and with runs of its variants."""

    def fitted(curve: Curve, n: int, group: Group = group) -> list[Fit]:
        return [result for result in (run(group, curve, rng) for _ in range(n)) if result is not None]

    own = fitted(group.curve, runs)
    among = list(itertools.combinations(own, 2))
    found = {
        SAME: [compared([among[i][0]], [among[i][1]]) for i in rng.permutation(len(among))[:pairs]],
        f"{SAME}, 3 and 3 seeds": [compared(own[:3], own[3:6])],
    }
    if variants:
        higher = replace(group.curve, A=group.curve.A + float(rng.uniform(0.03, 0.06)))
        sooner = replace(group.curve, C_mid=group.curve.C_mid * float(rng.uniform(0.55, 0.75)))
        for title, curve in ((HIGHER, higher), (SOONER, sooner)):
            others = fitted(curve, 3)
            crossed = list(itertools.product(own, others))
            found[title] = [
                compared([crossed[i][0]], [crossed[i][1]])
                for i in rng.permutation(len(crossed))[: pairs // 2]
            ]
            found[f"{title}, 3 and 3 seeds"] = [compared(own[:3], others)]
        slow, n = slower(group.curve, rng), len(group.setting.ratio_N)
        for top in TOPS:
            setting = replace(group.setting, ratio_N=np.linspace(0, top, n))
            sides = [fitted(curve, 3, replace(group, setting=setting)) for curve in (group.curve, slow)]
            title = f"{SLOWER}, to {top} C_mid"
            found[title] = [compared([base], [other]) for base, other in zip(*sides, strict=False)]
            found[f"{title}, 3 and 3"] = [compared(*sides)]
    return found


def _at_most(p: float | None, alpha: float) -> bool:
    return p is not None and p <= alpha


def line(title: str, pairs: list[Pair], group_P: np.ndarray) -> str:
    """Return shares of the pairs, with a standard error over groups, and below them that of every verdict."""
    claims = [tuple(pair.claims.values()) for pair in pairs]
    made = np.array([[c.verdict not in NOTHING for c in of_pair] for of_pair in claims])
    raw = np.array([[_at_most(c.p, 0.05) for c in of_pair] for of_pair in claims])
    runs_only = np.array([any(_at_most(c.p_runs_only, 0.05 / 3) for c in of_pair) for of_pair in claims])
    verdicts = Counter(c.verdict for of_pair in claims for c in of_pair if c.verdict not in NOTHING)
    each = ", ".join(f"{verdict} {n / len(pairs):.3f}" for verdict, n in verdicts.most_common())
    anything: np.ndarray = np.any(made, axis=1)
    by_group = [anything[group_P == g].mean() for g in np.unique(group_P)]
    error = np.std(by_group, ddof=1) / np.sqrt(len(by_group))
    unclaimed = np.mean([pair.ceiling.verdict == "inconclusive" for pair in pairs])
    return (
        f"{title:<44} {len(pairs):>5} {anything.mean():>6.3f} +-{error:.3f} {made[:, 0].mean():>6.3f} "
        f"{made[:, 1].mean():>8.3f} {made[:, 2].mean():>10.3f} {unclaimed:>12.3f} {raw[:, 1].mean():>7.3f} "
        f"{raw[:, 2].mean():>7.3f} {runs_only.mean():>10.3f}\n    {each or 'no verdict'}"
    )


def table(scale: float, groups: int, runs: int, pairs: int, seed: int, variants: bool) -> list[str]:
    """Return the lines for seed effects of `scale` times the prior."""
    claims: dict[str, list[Pair]] = {}
    group_of: dict[str, list[int]] = {}
    for g in range(groups):
        rng = np.random.default_rng([seed, round(10 * scale), g])
        for title, found in study(draw_group(rng, scale), runs, pairs, rng, variants).items():
            claims.setdefault(title, []).extend(found)
            group_of.setdefault(title, []).extend([g] * len(found))
    return [line(f"{title}, tau x {scale:g}", claims[title], np.array(group_of[title])) for title in claims]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--groups", type=int, default=200, help="recipes simulated")
    parser.add_argument("--runs", type=int, default=10, help="runs of each, 6 or more")
    parser.add_argument("--pairs", type=int, default=25, help="pairs compared in each, for every line")
    parser.add_argument(
        "--scales", type=float, nargs="*", default=[1.0, 1.5], help="seed sd in units of the prior's"
    )
    parser.add_argument("--one-family", type=float, default=sides.ONE_FAMILY, help="its prior probability")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    sides.ONE_FAMILY = args.one_family
    print(f"{'pairs of':<44} {'n':>5} {'any':>6} {'':>7} {'seen':>6} {'ceiling':>8} {'efficiency':>10} "
          f"{'inconclusive':>12} {'A .05':>7} {'C .05':>7} {'runs alone':>10}")  # fmt: skip
    for scale in args.scales:
        for text in table(scale, args.groups, args.runs, args.pairs, args.seed, variants=scale == 1.0):
            print(text, flush=True)


if __name__ == "__main__":
    main()
