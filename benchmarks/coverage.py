"""Do the intervals hold, and are the forecasts and the verdicts right? Simulated runs of known truth.

    python benchmarks/coverage.py [--runs 200] [--seed 0] [--jobs 2]

Six shapes of the mean curve x four correlations of the noise x fits at 1/4, 1/2 and 3/4 of the compute (1.5,
3 and 4.5 C_mid): 72 cells. In each the noise sd (.0045, .0075, .010), the gain (.2, .35), the spacing of the
evaluations (.06, .10 C_mid) and whether step 0 is there are drawn alike; they are reported pooled.

    curve, eval   share of 95 % intervals that hold the mean curve at the end, and an evaluation there;
                  in brackets what an oracle covers that knows the family and the correlation
    width         of the curve's interval, and as a multiple of the oracle's (medians)
    A, A|LL       coverage of the ceiling: families averaged, and given the log-logistic; with the latter's
                  width over the oracle's (log-logistic truth only: A means something else under another)
    error         median absolute error of the forecast of the mean curve at the end, beside the rivals'
    early, misfit share of "too early", and of runs called a misfit (all of them are healthy)

After it, what was asked of every cell and which cells miss it. A share p of n runs has a standard error of
sqrt(p (1 - p) / n); a cell misses where it is below what was asked by more than two of them.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np

from scalerl.curve import Points, fit
from scalerl.curve.answers import ceiling
from scalerl.curve.least_squares import least_squares
from scalerl.curve.posterior import posterior
from scalerl.curve.prior import SD_RANGE
from scalerl.curve.quantiles import noisy_quantiles, tails, weighted_quantiles
from scalerl.curve.sample import make_sample
from scalerl.forecast.baselines import fit_last_value, fit_log_linear, fit_power_law
from simulation import FRACTIONS, GAINS, PHIS, RATIO, SDS, SPACINGS, TRUTHS, Cell, Truth, simulate

AT = tails(0.95)
RIVALS: tuple[tuple[str, Callable[[Points], Callable[[float], np.ndarray]]], ...] = (
    ("power law", fit_power_law),
    ("last value", fit_last_value),
    ("log-linear", fit_log_linear),
)


@dataclass(frozen=True)
class Outcome:
    """One run, fitted at one fraction, held against its truth."""

    cell: Cell
    fraction: float
    curve: bool
    evaluation: bool
    width: float
    oracle_curve: bool
    oracle_evaluation: bool
    oracle_width: float
    A: bool
    A_family: bool
    A_ratio: float
    error: float
    paper_error: float
    rivals: tuple[float, ...]
    verdict: str
    right: bool
    misfit: bool


def outcome(cell: Cell, fraction: float, rng: np.random.Generator) -> Outcome:
    """Simulate, fit, and look at the end of the run; the target asked for lies within .05 of the truth."""
    run = simulate(cell, rng)
    points = run.first(fraction)
    result = fit(points)
    end, mean, measured = float(run.compute_N[-1]), float(run.mean_N[-1]), float(run.pass_rate_N[-1])
    forecast = result.forecast(end)
    oracle = _oracle(points, cell, end)
    target = float(np.clip(mean + rng.uniform(-0.05, 0.05), 0, 1))
    verdict = result.verdict(target, end)
    given = result.intervals.A_given_family
    return Outcome(
        cell,
        fraction,
        _holds(forecast.interval, mean),
        _holds(forecast.prediction, measured),
        forecast.interval[1] - forecast.interval[0],
        _holds(oracle[0], mean),
        _holds(oracle[1], measured),
        oracle[0][1] - oracle[0][0],
        _holds(result.intervals.A, run.A),
        _holds(given, run.A),
        (given[1] - given[0]) / (oracle[2][1] - oracle[2][0]),
        forecast.mean - mean,
        forecast.paper_point - mean,
        tuple(_forecast(fit_rival, points, end) - mean for _, fit_rival in RIVALS),
        verdict,
        (verdict == "go") == (mean >= target),
        result.misfit is not None,
    )


def _oracle(points: Points, cell: Cell, end: float) -> tuple[tuple[float, float], ...]:
    """Intervals of the mean curve, an evaluation, and A, for who knows the family and the correlation."""
    sample = make_sample(points, None)
    post = posterior(sample, SD_RANGE[0], [least_squares(sample, cell.truth.family)], (cell.phi,))
    value = post.curve_at(end)
    curve = weighted_quantiles(value, post.weight, AT)
    noisy = noisy_quantiles(value, post.weight, post.sd_J, post.sd_weight_J, AT)
    return tuple((float(low), float(high)) for low, high in (curve, noisy, ceiling(post, AT)))


def _forecast(
    fit_rival: Callable[[Points], Callable[[float], np.ndarray]], points: Points, end: float
) -> float:
    return float(np.clip(fit_rival(points)(end), 0.0, 1.0))


def _holds(interval: tuple[float, float], value: float) -> bool:
    return interval[0] <= value <= interval[1]


def runs_of(task: tuple[Truth, float, float, int], runs: int) -> list[Outcome]:
    """All runs of one cell of the table."""
    truth, phi, fraction, seed = task
    key = [seed, TRUTHS.index(truth), round(100 * phi), round(100 * fraction)]
    rng = np.random.default_rng(key)
    outcomes = []
    for _ in range(runs):
        sd, gain, spacing = (float(rng.choice(values)) for values in (SDS, GAINS, SPACINGS))
        cell = Cell(truth, phi, sd, gain, spacing, bool(rng.integers(2)))
        outcomes.append(outcome(cell, fraction, rng))
    return outcomes


def share(of: Sequence[Outcome], name: str) -> float:
    """Share of runs for which `name` holds."""
    return float(np.mean([getattr(o, name) for o in of]))


def error(of: Sequence[Outcome], name: str = "error", place: int | None = None) -> float:
    """Median absolute error."""
    values = [getattr(o, name) if place is None else o.rivals[place] for o in of]
    return float(np.median(np.abs(values)))


def width_ratio(of: Sequence[Outcome]) -> float:
    """Median width of the curve's interval over the oracle's."""
    return float(np.median([o.width / o.oracle_width for o in of]))


def row(name: str, of: Sequence[Outcome]) -> str:
    """One line of the table."""
    ceilings = " " * 24
    if all(o.cell.truth.name == "log_logistic" for o in of):
        ratio = float(np.median([o.A_ratio for o in of]))
        ceilings = f"{share(of, 'A'):8.3f} {share(of, 'A_family'):7.3f} {ratio:7.2f}"
    rivals = " ".join(f"{error(of, place=i):6.4f}" for i in range(len(RIVALS)))
    early = float(np.mean([o.verdict == "too early" for o in of]))
    return (
        f"{name:<24} {len(of):>5} {share(of, 'curve'):6.3f} ({share(of, 'oracle_curve'):.3f}) "
        f"{share(of, 'evaluation'):6.3f} ({share(of, 'oracle_evaluation'):.3f}) "
        f"{np.median([o.width for o in of]):6.3f} {width_ratio(of):5.2f} {ceilings} "
        f"{error(of):7.4f} {error(of, 'paper_error'):7.4f} {rivals} {early:6.3f} {share(of, 'misfit'):6.3f}"
    )


HEAD = (
    f"{'':<24} {'runs':>5} {'curve':>6} {'':7} {'eval':>6} {'':7} {'width':>6} {'ratio':>5} {'A':>8} "
    f"{'A|LL':>7} {'ratio':>7} {'error':>7} {'paper':>7} {'power':>6} {'last':>6} {'loglin':>6} {'early':>6} "
    f"{'misfit':>6}"
)


def asked(cells: dict[tuple[str, float, float], list[Outcome]]) -> None:
    """Print what was asked of every cell, in how many it holds, and those in which it does not."""
    for what in ("curve", "evaluation"):
        short, wide = [], []
        for key, of in cells.items():
            got, oracle = share(of, what), share(of, f"oracle_{what}")
            bound = min(0.93, oracle - 0.02)
            if got < bound - 2 * math.sqrt(bound * (1 - bound) / len(of)):
                short.append(f"{_name(key)} {got:.3f} (oracle {oracle:.3f})")
            if got > 0.99 and np.median([o.oracle_width for o in of]) <= 0.2:
                wide.append(f"{_name(key)} {got:.3f}")
        _report(f"{what}: at least .93, or the oracle's less .02", short, len(cells))
        _report(f"{what}: not above .99 unless the oracle's width exceeds .2", wide, len(cells))
    own = {key: of for key, of in cells.items() if key[0] == "log_logistic"}
    late = {key: of for key, of in own.items() if key[2] * RATIO > 2}
    found = [f"{_name(k)} {width_ratio(of):.2f}" for k, of in own.items() if width_ratio(of) > 2.25]
    _report("log-logistic truth: width at most 2.25 times the oracle's", found, len(own))
    ratios = {key: float(np.median([o.A_ratio for o in of])) for key, of in late.items()}
    found = [f"{_name(key)} {ratio:.2f}" for key, ratio in ratios.items() if ratio > 2.5]
    _report("log-logistic truth, beyond 2 C_mid: A given it at most 2.5 times the oracle's", found, len(late))
    found = [
        f"{_name(key)} {error(of):.4f} against {min(error(of, place=i) for i in range(3)):.4f}"
        for key, of in cells.items()
        if error(of) > 1.25 * min(error(of, place=i) for i in range(3))
    ]
    _report("error: at most 1.25 times the best rival's", found, len(cells))
    found = [_name(key) for key, of in late.items() if error(of) > 0.5 * error(of, place=0)]
    _report("log-logistic truth, beyond 2 C_mid: error at most half the power law's", found, len(late))
    calls = [o for of in cells.values() for o in of if o.verdict in ("go", "no-go")]
    print(f"calls of go and no-go: {len(calls)}, right {share(calls, 'right'):.3f} (asked .93)")
    for fraction in FRACTIONS:
        mine = [o for o in calls if o.fraction == fraction]
        print(f"  at {fraction:g}: {len(mine)}, right {share(mine, 'right') if mine else math.nan:.3f}")
    late_runs = [o for of in cells.values() for o in of if o.fraction * RATIO > 3 and o.cell.sd <= 0.0075]
    early = float(np.mean([o.verdict == "too early" for o in late_runs]))
    print(f"too early beyond 3 C_mid with noise <= .0075: {early:.3f} of {len(late_runs)} (asked 0)")


def _name(key: tuple[str, float, float]) -> str:
    return f"{key[0]}, phi {key[1]:g}, at {key[2]:g}"


def _report(what: str, missed: Sequence[str], cells: int) -> None:
    print(f"{what}: {cells - len(missed)} of {cells} cells" + "".join(f"\n    not in {m}" for m in missed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=200, help="simulated runs for each of the 72 cells")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    tasks = [(truth, phi, at, args.seed) for truth in TRUTHS for phi in PHIS for at in FRACTIONS]
    with ProcessPoolExecutor(args.jobs) as pool:
        outcomes = list(pool.map(functools.partial(runs_of, runs=args.runs), tasks))
    cells = {(t.name, phi, at): of for (t, phi, at, _), of in zip(tasks, outcomes, strict=True)}
    print(HEAD)
    for key, of in cells.items():
        print(row(_name(key), of))
    print("\npooled over all cells")
    everything = [o for of in outcomes for o in of]
    factors: tuple[tuple[str, Sequence[object], Callable[[Outcome], object]], ...] = (
        ("at", FRACTIONS, lambda o: o.fraction),
        ("noise sd", SDS, lambda o: o.cell.sd),
        ("gain", GAINS, lambda o: o.cell.gain),
        ("spacing", SPACINGS, lambda o: o.cell.spacing),
        ("step 0", (True, False), lambda o: o.cell.step_0),
    )
    for name, values, of_outcome in factors:
        for value in values:
            print(row(f"{name} {value}", [o for o in everything if of_outcome(o) == value]))
    print()
    asked(cells)


if __name__ == "__main__":
    main()
