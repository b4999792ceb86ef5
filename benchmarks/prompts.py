"""What is it worth to know the noise from the successes of every prompt? Run folders, fitted twice.

    python benchmarks/prompts.py runs/seeds/seed* [--ceiling .82]

Every run is fitted at 1/4, 1/2 and 3/4 of its compute, twice: with the least noise by the number of samples,
sqrt(mean p(1-p) / (n k)), as in `fit`, and with that which eval_prompts.jsonl measures. Each is held against
all later evaluations, by the prediction interval of 95 %:

    floor, sd    the least noise, and the noise of an evaluation as fitted, means
    error        mean absolute error of the forecast; `end`: of the last evaluation alone
    inside       share of the later evaluations in their intervals; score: interval score, mean
    A            ceilings that are identified; with --ceiling, how many of their intervals hold it

With --simulated N: do the prompts bound the ceiling? N runs of 500 prompts and 30 evaluations, at the
same shares. A prompt begins to be solved at its own compute (sd 1.2 in log) and ends at its own pass rate: 0
for .1 of them, 1 for .5, and anything between for the rest. Beside A and the lower end of its interval:

    solved    share of prompts whose samples were all right in the last two evaluations: a bound of A
    ever      share of prompts that were right once: a bound if all of them end at 1
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from scalerl.curve import Points, fit
from scalerl.errors import CannotAnswerError
from scalerl.forecast.scores import covered, interval_score
from scalerl.record.prompts import noise_between
from scalerl.record.reader import RunRecord

SHARES = (0.25, 0.5, 0.75)
SOURCES = ("samples", "prompts")


@dataclass(frozen=True)
class Forecasts:
    """The forecasts of one fit, compared with the evaluations after it (M,)."""

    share: float
    source: str
    floor: float
    sd: float
    error_M: np.ndarray
    inside_M: np.ndarray
    score_M: np.ndarray
    A: tuple[float, float] | None


def forecasts(run: RunRecord) -> Iterator[Forecasts]:
    """Yield forecasts of all later evaluations from each share of the compute, with either noise."""
    compute_N = run.compute(run.default_axis)
    rate_N = np.array([point.pass_rate for point in run.evals])
    for share in SHARES:
        n = int(np.count_nonzero(compute_N <= share * compute_N[-1] * (1 + 1e-9)))
        part = replace(run, evals=run.evals[:n], lines=run.lines[:n])
        by_samples = Points.from_record(part, run.default_axis)
        trained_N = by_samples.noise_sd_N[by_samples.compute_N > 0]
        ratio = (noise_between(part) or math.nan) / math.sqrt(float(np.mean(trained_N**2)))
        by_prompt = replace(by_samples, noise_sd_N=ratio * by_samples.noise_sd_N)
        for source, points in zip(SOURCES, (by_samples, by_prompt), strict=True):
            try:
                result = fit(points)
            except CannotAnswerError as error:
                print(f"{run.path.name} at {share}: {error}")
                continue
            made = [result.forecast(float(compute)) for compute in compute_N[n:]]
            low_M, high_M = np.array([forecast.prediction for forecast in made]).T
            point_M = np.array([forecast.median for forecast in made])
            yield Forecasts(
                share,
                source,
                result.noise.floor,
                result.noise.sd,
                np.abs(point_M - rate_N[n:]),
                covered(low_M, high_M, rate_N[n:]),
                interval_score(low_M, high_M, rate_N[n:], 0.95),
                result.intervals.A if result.identified else None,
            )


def bounds(n: int) -> None:
    """Print how prompts' successes bound the ceiling of simulated runs."""
    print("| share | samples | A | lower end | solved | tightens | ever | above A |\n|" + "---|" * 8)
    for share, k in itertools.product(SHARES, (1, 4, 16)):
        found = []
        for i in range(n):
            rng = np.random.default_rng([k, i])
            end_P = rng.choice([0.0, 1.0, math.nan], 500, p=[0.1, 0.5, 0.4])
            end_P = np.where(np.isnan(end_P), rng.uniform(0, 1, 500), end_P)
            log_mid_P, compute_N = rng.normal(math.log(0.3), 1.2, 500), np.arange(1, 31) / 30
            rate_NP = end_P / (1 + np.exp(-1.8 * (np.log(compute_N)[:, None] - log_mid_P)))
            right_NP = rng.binomial(k, rate_NP)[: round(30 * share)]
            result = fit(Points.from_arrays(compute_N[: len(right_NP)], right_NP.mean(axis=1) / k))
            solved, ever = (right_NP[-2:] == k).all(axis=0).mean(), (right_NP > 0).any(axis=0).mean()
            found.append((end_P.mean(), result.intervals.A[0], solved, ever))
        A, low, solved, ever = np.array(found).T
        cells = [f"{values.mean():.3f}" for values in (A, low, solved, solved > low, ever, ever > A)]
        print(f"| {share} | {k} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN")
    parser.add_argument("--simulated", type=int, metavar="N", help="simulate N runs instead")
    parser.add_argument("--ceiling", type=float, help="the true ceiling, where it is known")
    args = parser.parse_args()
    if args.simulated:
        bounds(args.simulated)
        return
    found = [one for path in args.runs for one in forecasts(RunRecord.read(path))]
    print("| share | noise from | floor | sd | error | end | inside | score | A identified | A holds |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for share in SHARES:
        for source in SOURCES:
            chosen = [one for one in found if (one.share, one.source) == (share, source)]
            if not chosen:
                continue
            told = [one.A for one in chosen if one.A is not None]
            holds = "-" if args.ceiling is None else sum(low <= args.ceiling <= high for low, high in told)
            floor, sd = (float(np.mean([getattr(one, name) for one in chosen])) for name in ("floor", "sd"))
            error, inside, score = (
                float(np.mean(np.concatenate([getattr(one, name) for one in chosen])))
                for name in ("error_M", "inside_M", "score_M")
            )
            end = float(np.mean([one.error_M[-1] for one in chosen]))
            print(
                f"| {share} | {source} | {floor:.4f} | {sd:.4f} | {error:.4f} | {end:.4f} | {inside:.3f} | "
                f"{score:.4f} | {len(told)} of {len(chosen)} | {holds} |"
            )


if __name__ == "__main__":
    main()
