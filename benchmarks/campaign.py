"""What sibling runs are worth: runs forecast from their first part, alone and with a prior from siblings.

    python benchmarks/campaign.py [--campaigns 30] [--seed 0] [--runs runs/seeds]

Simulated campaigns: 12 recipes of one budget, log B ~ N(log 1.9, .25), A ~ N(.60, .05), R_0 .3, C_mid
log-uniform over a factor of 3 (the budget is 2.7 to 8 of them), 40 evaluations and one at step 0, noise sd
.0045-.010, AR(1) 0-.5, so that siblings differ in B and A by more than seeds do. Strangers are runs whose
log B, and whose A, lies `SHIFT` sd from the mean of their campaign. `--runs` adds the runs of
`benchmarks/seeds.py`, on the axis flops: one recipe, many seeds. Siblings are fitted whole, the run itself at
1/4 and 1/2, and the end is forecast. `error` is the mean forecast less the mean curve there (less the
measured evaluation, of real runs), `in` the share of 95 % intervals that hold it, widths are medians.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from scalerl.curve import LOG_LOGISTIC, Curve, Fit, Points, fit
from scalerl.curve.campaign import CampaignPrior, learn
from scalerl.record.reader import RunRecord
from simulation import noise

BUDGET, R_0, N_EVALS, SIZE = 16_000.0, 0.3, 40, 12
FRACTIONS = (1 / 4, 1 / 2)
SHIFT = 3.0


@dataclass(frozen=True)
class Run:
    """A whole run; `end` is the mean curve at its last evaluation, if known."""

    points: Points
    end: float | None = None
    ceiling: float = math.nan

    def first(self, fraction: float) -> Points:
        """Return the evaluations of the first `fraction` of the compute."""
        compute_N = self.points.compute_N
        return self.points.select(compute_N <= fraction * compute_N.max() * (1 + 1e-9))


@dataclass(frozen=True)
class Score:
    """One forecast of the end of one run."""

    error: float
    curve_width: float
    curve_in: float
    width: float
    inside: bool
    ceiling_width: float
    ceiling_in: float


def simulate(rng: np.random.Generator, stranger: bool = False) -> Run:
    z_B, z_A = rng.choice([-SHIFT, SHIFT], 2) if stranger else rng.normal(size=2)
    A = float(np.clip(0.60 + 0.05 * z_A, 0.4, 0.9))
    C_mid = BUDGET / 8 * math.exp(rng.uniform(0, math.log(3)))
    truth = Curve(LOG_LOGISTIC, A, 1.9 * math.exp(0.25 * z_B), C_mid, R_0)
    compute_N = np.linspace(0, BUDGET, N_EVALS + 1)
    sd, phi = float(rng.uniform(0.0045, 0.010)), float(rng.uniform(0, 0.5))
    noise_N = noise(N_EVALS + 1, sd, phi, rng, first=1)
    points = Points.from_arrays(compute_N, np.clip(truth(compute_N) + noise_N, 0, 1))
    return Run(points, float(truth(BUDGET)), A)


def score(run: Run, early: Fit, prior: CampaignPrior | None) -> Score:
    result = early if prior is None else replace(early, posterior=prior.apply(early.posterior))
    last = int(np.argmax(run.points.compute_N))
    measured = float(run.points.pass_rate_N[last])
    forecast = result.forecast(float(run.points.compute_N[last]))
    end = measured if run.end is None else run.end
    A = _quantiles(result)
    return Score(
        forecast.median - end,
        forecast.interval[1] - forecast.interval[0],
        math.nan if run.end is None else float(forecast.interval[0] <= end <= forecast.interval[1]),
        forecast.prediction[1] - forecast.prediction[0],
        forecast.prediction[0] <= measured <= forecast.prediction[1],
        A[1] - A[0],
        math.nan if math.isnan(run.ceiling) else float(A[0] <= run.ceiling <= A[1]),
    )


def _quantiles(result: Fit) -> np.ndarray:
    return np.quantile(result.posterior.draws(8192).A_n, [0.025, 0.975])


PRIORS: dict[str, Callable[[list[Fit], Fit, np.random.Generator], CampaignPrior | None]] = {
    "flat": lambda siblings, own, rng: None,
    "5 siblings": lambda siblings, own, rng: learn(
        [siblings[i] for i in rng.permutation(len(siblings))[:5]], own
    )[0],
    "all siblings": lambda siblings, own, rng: learn(siblings, own)[0],
}


Scores = dict[tuple[float, str], list[Score]]


def forecast_run(run: Run, siblings: list[Fit], rng: np.random.Generator, scores: Scores) -> None:
    for fraction in FRACTIONS:
        early = fit(run.first(fraction))
        for name, prior in PRIORS.items():
            scores.setdefault((fraction, name), []).append(score(run, early, prior(siblings, early, rng)))


def leave_one_out(runs: list[Run], rng: np.random.Generator, scores: Scores) -> list[Fit]:
    """Forecast every run of a campaign from all others; return the fits of the whole runs."""
    whole = [fit(run.points) for run in runs]
    for index, run in enumerate(runs):
        siblings = [sibling for i, sibling in enumerate(whole) if i != index]
        forecast_run(run, siblings, rng, scores)
    return whole


def report(title: str, scores: Scores) -> None:
    print(f"\n{title}")
    print(f"{'share':>5} {'prior':<13} {'runs':>4} {'rms error':>9} {'bias':>7} {'curve':>6} {'in':>5} "
          f"{'evaluation':>10} {'in':>5} {'A':>6} {'in':>5}")  # fmt: skip
    for (fraction, name), rows in scores.items():
        column = {key: np.array([getattr(row, key) for row in rows], float) for key in Score.__annotations__}
        print(
            f"{fraction:>5.2f} {name:<13} {len(rows):>4} {np.sqrt(np.mean(column['error'] ** 2)):>9.4f} "
            f"{column['error'].mean():>+7.4f} {np.median(column['curve_width']):>6.3f} "
            f"{column['curve_in'].mean():>5.3f} {np.median(column['width']):>10.3f} "
            f"{column['inside'].mean():>5.3f} {np.median(column['ceiling_width']):>6.3f} "
            f"{column['ceiling_in'].mean():>5.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--campaigns", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, help="folder of finished runs of one recipe")
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    simulated: Scores = {}
    strangers: Scores = {}
    for _ in range(args.campaigns):
        siblings = leave_one_out([simulate(rng) for _ in range(SIZE)], rng, simulated)
        for _ in range(SIZE // 2):
            forecast_run(simulate(rng, stranger=True), siblings, rng, strangers)
    report(f"{args.campaigns} simulated campaigns of {SIZE} recipes", simulated)
    report(f"strangers to them, {SHIFT:g} sd off in log B and in A", strangers)
    if args.runs:
        folders = sorted(path.parent for path in args.runs.glob("*/evals.jsonl"))
        runs = [Run(Points.from_record(RunRecord.read(folder), "flops")) for folder in folders]
        seeds: Scores = {}
        leave_one_out(runs, rng, seeds)
        report(f"{len(runs)} seeds of one recipe", seeds)


if __name__ == "__main__":
    main()
