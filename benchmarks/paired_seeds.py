"""Is a comparison in blocks right, where base models differ? Simulated studies of four recipes.

    python benchmarks/paired_seeds.py [--studies 80] [--seeds 4 8] [--seed 0]

Recipes, evaluations, noise and seed effects as in `benchmarks/comparison.py`; and every seed has a base model
that all recipes share, which moves R_0, A and log C_mid by sd .03, .05 and .3. `one recipe four times`: every
verdict is false. `one of each`: the base, itself again, A higher by .03-.06, C_mid lower by 25-45 %; `false`
is the share of studies with any verdict that is not true; `seen` the share that find the recipe of the higher
A to be higher at the compute seen, `ceiling` its ceiling, `efficiency` the other to be sooner. `width` is the
median width of the intervals of the difference in A.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np

from comparison import draw_group, run
from scalerl.curve import Curve, Fit
from scalerl.forecast import Comparison, compare

BLOCK_SD = (0.03, 0.05, 0.3)
"""Sd of R_0, A and log C_mid between base models."""
Study = dict[str, list[Fit | None]]
"""Fits of every recipe, one per seed; None for a run that could not be fitted."""
SAME = ("base", "again", "third", "fourth")
EACH = ("base", "again", "higher", "sooner")


def simulate(rng: np.random.Generator, seeds: int) -> Study:
    """Simulate four equal recipes, one with a higher ceiling and one sooner; seeds share base models."""
    group = draw_group(rng, 1.0)
    group = replace(group, curve=replace(group.curve, R_0=0.3, A=0.6 + float(rng.uniform(-0.05, 0.1))))
    base = group.curve
    recipes = dict.fromkeys(SAME, base) | {
        "higher": replace(base, A=base.A + float(rng.uniform(0.03, 0.06))),
        "sooner": replace(base, C_mid=base.C_mid * float(rng.uniform(0.55, 0.75))),
    }
    blocks = rng.normal(0, BLOCK_SD, (seeds, 3))
    return {
        name: [run(group, _moved(curve, *block), rng) for block in blocks] for name, curve in recipes.items()
    }


def _moved(curve: Curve, r0: float, A: float, log_mid: float) -> Curve:
    R_0 = float(np.clip(curve.R_0 + r0, 0.02, 0.4))
    top = float(np.clip(curve.A + A, R_0 + 0.1, 0.98))
    return replace(curve, R_0=R_0, A=top, C_mid=curve.C_mid * float(np.exp(log_mid)))


def answer(study: Study, names: tuple[str, ...], seeds: int, paired: bool) -> Comparison:
    """Compare the named recipes on their first `seeds` seeds."""
    fits = {name: {s: f for s, f in enumerate(study[name][:seeds]) if f is not None} for name in names}
    blocks = {name: list(of) for name, of in fits.items()} if paired else None
    return compare({name: list(of.values()) for name, of in fits.items()}, blocks=blocks)


AHEAD = "higher at the compute seen"  # true of both recipes below
TRUE = {"higher": (AHEAD, "higher ceiling", ""), "sooner": (AHEAD, "", "reaches it sooner")}
NOTHING = ("not significant", "inconclusive")


def line(title: str, answers: list[Comparison]) -> str:
    """Return a line with the shares of studies, the first with its standard error."""
    false, widths = [], []
    found = {"seen": 0, "ceiling": 0, "efficiency": 0}
    for comparison in answers:
        wrong = False
        for pair in comparison.pairs:
            true = TRUE.get(pair.recipe, ("", "", ""))
            made = [claim.verdict for claim in pair.claims.values()]
            wrong |= any(v not in NOTHING and v != t for v, t in zip(made, true, strict=True))
            if pair.recipe == "higher":
                found["seen"] += made[0] == true[0]
                found["ceiling"] += made[1] == true[1]
            elif pair.recipe == "sooner":
                found["efficiency"] += made[2] == true[2]
            if "A" in pair.differences:
                low, high = pair.differences["A"].interval
                widths.append(high - low)
        false.append(wrong)
    n, rate = len(answers), float(np.mean(false))
    power = " ".join(f"{k / n:>9.2f}" if "one of each" in title else f"{'':>9}" for k in found.values())
    error = float(np.sqrt(max(rate * (1 - rate), 0.01) / n))
    return f"{title:<44} {n:>5} {rate:>6.3f} +-{error:.3f} {power} {np.median(widths):>7.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--studies", type=int, default=80)
    parser.add_argument("--seeds", type=int, nargs="*", default=[4, 8], help="of every recipe")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    found: dict[str, list[Comparison]] = {}
    for i in range(args.studies):
        study = simulate(np.random.default_rng([args.seed, i]), max(args.seeds))
        for names, what in ((SAME, "one recipe four times"), (EACH, "one of each")):
            for seeds in args.seeds:
                for paired in (True, False):
                    title = f"{what}, {seeds} seeds, {'paired' if paired else 'not paired'}"
                    found.setdefault(title, []).append(answer(study, names, seeds, paired))
    heads = f"{'seen':>9} {'ceiling':>9} {'efficiency':>9} {'width':>6}"
    print(f"{'recipes':<44} {'n':>5} {'false':>6} {'':>7} {heads}")
    for title, answers in found.items():
        print(line(title, answers))


if __name__ == "__main__":
    main()
