"""How long must a run be before its forecast says much, and how many seeds does a comparison take?

    python benchmarks/planning.py [--runs 60] [--seed 0] [--lengths 1 1.5]

Runs of benchmarks/simulation.py (gain .20 or .35, an evaluation every .06 or .10 C_mid, half of them with a
step 0, AR(1) 0-.8), fitted up to a multiple of C_mid, by the sd of the noise; first of a log-logistic truth,
then of all shapes. `forecast` is the median width of the 95 % interval of the mean curve at 6 C_mid, `holds`
the share of them that hold it, `A` the median width of the ceiling's interval, `A|LL` the same given the
log-logistic, and `too early` the share of runs whose ceiling is not called identified. `seeds` is how many of
each recipe tell ceilings apart that differ by .04, with power .8 and the three questions of a comparison
corrected for; a run has the variance of the seed prior and of A given the log-logistic, which both sides
share.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from scalerl.curve import SEED_PRIOR, fit
from scalerl.errors import CannotAnswerError
from scalerl.forecast.compare import seeds_needed
from simulation import GAINS, PHIS, RATIO, SDS, SPACINGS, TRUTHS, Cell, Truth, simulate

LENGTHS = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.5)
"""Compute seen, in C_mid."""
DIFFERENCE, ALPHA = 0.04, 0.05 / 3
"""Difference of the ceilings to tell apart; level of each of a comparison's three questions."""


def look(cell: Cell, length: float, rng: np.random.Generator) -> tuple[float, ...]:
    """Return for a simulated run: forecast width, whether it holds, widths of A and A | LL, if too early."""
    run = simulate(cell, rng)
    result = fit(run.first(length / RATIO))
    low, high = result.forecast(float(run.compute_N[-1])).interval
    widths = [ends[1] - ends[0] for ends in (result.intervals.A, result.intervals.A_given_family)]
    return high - low, low <= run.mean_N[-1] <= high, *widths, not result.identified


def row(truths: Sequence[Truth], length: float, sd: float, runs: int, seed: int) -> str:
    """Return one line of the table; runs that cannot be fitted yet are left out."""
    rng = np.random.default_rng([seed, len(truths), round(10 * length), round(1e4 * sd)])
    looks = []
    for i in range(runs):
        phi, gain, spacing = (float(rng.choice(values)) for values in (PHIS, GAINS, SPACINGS))
        cell = Cell(truths[i % len(truths)], phi, sd, gain, spacing, bool(rng.integers(2)))
        with suppress(CannotAnswerError):
            looks.append(look(cell, length, rng))
    look_L = np.array(looks, dtype=float).T
    forecast, A, given = np.median(look_L[[0, 2, 3]], axis=1)
    seeds = seeds_needed(DIFFERENCE, 2 * (SEED_PRIOR.A**2 + (given / 4) ** 2), ALPHA)
    return (
        f"{length:>6.2f} {sd:>8.4f} {forecast:>9.3f} {look_L[1].mean():>6.2f} {A:>7.3f} {given:>7.3f} "
        f"{look_L[4].mean():>10.2f} {seeds or '> 100':>6}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=60, help="simulated runs for every line")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lengths", type=float, nargs="+", default=LENGTHS, metavar="L", help="in C_mid")
    args = parser.parse_args()
    for title, truths in (("log-logistic", TRUTHS[:1]), ("all shapes", TRUTHS)):
        print(f"{title}\n{'C_mid':>6} {'noise sd':>8} {'forecast':>9} {'holds':>6} {'A':>7} {'A|LL':>7} "
              f"{'too early':>10} {'seeds':>6}")  # fmt: skip
        for length in args.lengths:
            for sd in SDS:
                print(row(truths, length, sd, args.runs, args.seed), flush=True)


if __name__ == "__main__":
    main()
