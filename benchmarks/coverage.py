"""Do the intervals hold? Simulated runs of three shapes, fitted to the first half, forecast to the end.

    python benchmarks/coverage.py [--runs 40] [--seed 0]

Truth: R_0 .25, A .82, B 1.2-2.2, noise sd .004-.010 (AR(1) 0-.5), 12-15 evaluations over the first half and
one at step 0. `evaluation` is the share of 95 % prediction intervals that hold an evaluation at the end of
the run, `curve` of 95 % intervals that hold the mean curve there; widths are medians.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np

from scalerl.curve import FAMILIES, Curve, Family, Points, fit

R_0, A, C_MID = 0.25, 0.82, 3000.0
RATIOS = (1.5, 2.5, 4.0)


@dataclass(frozen=True)
class Outcome:
    """One simulated run: was it covered, how wide, and was the ceiling called identified."""

    evaluation: bool
    curve: bool
    ceiling: bool
    width: float
    error: float
    identified: bool


def simulate(family: Family, ratio: float, rng: np.random.Generator, known_noise: bool = False) -> Outcome:
    """Draw one run to twice ratio x C_mid, fit its first half, and look at its end."""
    truth = Curve(family, A, float(rng.uniform(1.2, 2.2)), C_MID, R_0)
    sd, phi, n = float(rng.uniform(0.004, 0.010)), float(rng.uniform(0, 0.5)), int(rng.integers(12, 16))
    half = ratio * C_MID
    compute_N = np.linspace(0, half, n + 1)
    noise_N = rng.normal(0, sd, n + 1)
    for i in range(1, n + 1):
        noise_N[i] = phi * noise_N[i - 1] + np.sqrt(1 - phi**2) * noise_N[i]
    points = Points.from_arrays(
        compute_N, np.clip(truth(compute_N) + noise_N, 0, 1), noise_sd=0.6 * sd if known_noise else None
    )
    result = fit(points)
    forecast = result.forecast(2 * half)
    mean = float(truth(2 * half))
    end = mean + float(rng.normal(0, sd))
    (low, high), (low_A, high_A) = forecast.prediction, result.intervals.A
    return Outcome(
        evaluation=low <= end <= high,
        curve=forecast.interval[0] <= mean <= forecast.interval[1],
        ceiling=low_A <= A <= high_A,
        width=high - low,
        error=forecast.mean - mean,
        identified=result.identified,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=40, help="simulated runs for each row")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(f"{'truth':<13} {'C/C_mid':>7} {'evaluation':>10} {'curve':>6} {'A':>5} {'width':>6} "
          f"{'rms error':>9} {'identified':>10}")  # fmt: skip
    for index, family in enumerate(FAMILIES):
        for ratio in RATIOS:
            rng = np.random.default_rng([args.seed, index, int(10 * ratio)])
            runs = [simulate(family, ratio, rng) for _ in range(args.runs)]
            print(
                f"{family.name:<13} {ratio:>7} {np.mean([r.evaluation for r in runs]):>10.3f} "
                f"{np.mean([r.curve for r in runs]):>6.3f} {np.mean([r.ceiling for r in runs]):>5.3f} "
                f"{np.median([r.width for r in runs]):>6.3f} "
                f"{np.sqrt(np.mean([r.error**2 for r in runs])):>9.4f} "
                f"{np.mean([r.identified for r in runs]):>10.3f}"
            )


if __name__ == "__main__":
    main()
