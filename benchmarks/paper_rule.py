"""What does the paper's rule say of two recipes that differ in A alone? (B compared at an averaged A.)

    python benchmarks/paper_rule.py [--pairs 200] [--seed 0]

Pairs of runs to 8,000 GPU-hours, 40 evaluations, R_0 .40 given, C_mid 2,542 and B 1.92 for both; their
ceilings lie `apart`, evenly about .60. `by B` is the share of pairs whose fitted ceilings differ by .02 at
most, so that B is compared. Of these, `B differs` is the mean of the difference, higher ceiling less lower,
and `favoured` the share in which the run with the higher ceiling gets the higher B: .5 would be right. Below
the table: two runs, without noise, that do differ in B; and the asymptotic standard error of A, evaluated
as often with noise .0075, as the paper fits it (R_0 given, compute under 1,500 left out), by how far the data
reach.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np

from scalerl.curve import LOG_LOGISTIC, Curve, Points
from scalerl.curve.least_squares import LeastSquares
from scalerl.curve.sample import make_sample
from scalerl.forecast.paper import PAPER_MIN_COMPUTE, PaperComparison, paper_compare, paper_fit
from scalerl.forecast.standard_errors import standard_errors

R_0, B, C_MID, END, EVALUATIONS = 0.40, 1.92, 2542.0, 8000.0, 40
APART = (0.005, 0.010, 0.015, 0.020)
SDS = (0.0045, 0.0075, 0.010)
REACHES = (2.0, 1.6, 1.0)
"""C_max / C_mid."""
HIDDEN = (0.610, 1.92), (0.595, 2.40)
"""(A, B) of two runs whose difference in B the rule hides."""


def ruled(truths: tuple[tuple[float, float], ...], sd: float, rng: np.random.Generator) -> PaperComparison:
    """Apply the rule to one simulated run of each (A, B)."""
    compute_N = np.linspace(0, END, EVALUATIONS + 1)
    fits = []
    for A, own_B in truths:
        y_N = Curve(LOG_LOGISTIC, A, own_B, C_MID, R_0)(compute_N) + rng.normal(0, sd, len(compute_N))
        fits.append(paper_fit(Points.from_arrays(compute_N, np.clip(y_N, 0, 1), axis="gpu_hours"), R_0))
    return paper_compare(*fits)


def error_of_ceiling(reach: float, sd: float = 0.0075) -> float:
    """Return the standard error of A with data up to `reach` C_mid."""
    n = round(reach * C_MID * EVALUATIONS / END)
    compute_N = np.linspace(0, reach * C_MID, n + 1)
    compute_N, truth = compute_N[compute_N >= PAPER_MIN_COMPUTE], Curve(LOG_LOGISTIC, 0.61, B, C_MID, R_0)
    sample = make_sample(Points.from_arrays(compute_N, truth(compute_N)), R_0)
    rss = sd**2 * (len(compute_N) - 3)
    return standard_errors(sample, LeastSquares(truth, rss, (), ())).A


def rows(pairs: int, seed: int) -> Iterator[str]:
    """Yield the lines of the table; without noise one pair is enough."""
    for sd in (0.0, *(SDS if pairs else ())):
        for apart in APART:
            rng = np.random.default_rng([seed, round(1e4 * sd), round(1e3 * apart)])
            truths = (0.60 - apart / 2, B), (0.60 + apart / 2, B)
            found = [ruled(truths, sd, rng) for _ in range(pairs if sd else 1)]
            by_b = np.array([answer.difference for answer in found if answer.by == "B"])
            yield (
                f"{sd:>8.4f} {apart:>6.3f} {len(by_b) / len(found):>6.2f} {by_b.mean():>+9.2f} "
                f"{np.mean(by_b > 0):>9.2f}"
            )
    hidden = ruled(HIDDEN, 0.0, np.random.default_rng(seed))
    yield f"B 1.92 at A .610 against B 2.40 at A .595: {hidden.by} differs by {hidden.difference:+.2f}"
    errors = ", ".join(f"{error_of_ceiling(reach):.2f} at {reach:g}" for reach in REACHES)
    yield f"standard error of A by C_max / C_mid: {errors}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200, help="of each line with noise; 0 leaves those out")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(f"{'noise sd':>8} {'apart':>6} {'by B':>6} {'B differs':>9} {'favoured':>9}")
    for text in rows(args.pairs, args.seed):
        print(text, flush=True)


if __name__ == "__main__":
    main()
