"""Do the intervals hold, and are the forecasts and the verdicts right? Simulated runs of known truth.

    python benchmarks/coverage.py [--shapes one-phase ...] [--runs 60] [--seed 0] [--jobs 2] [--oracle]

Runs of the shapes of `benchmarks/shapes.py`, each fitted at 1/4, 1/2 and 3/4 of its compute and held against
its end: the mean curve there, and an evaluation there. A row is a cell of shape and fraction:

    answered       runs of which a forecast was made; the figures to the right are of these
    curve, eval    share of 95 % intervals of the mean curve, and of an evaluation, that hold it
    width          of the curve's interval, median
    score          interval score of an evaluation's interval, mean
    error          median absolute error of the forecast of the mean curve, beside that of rivals: least
                   squares (the paper's curve), last value, power law, log-linear
    ident, A       share with an identified ceiling, and the share of those whose interval holds it
    misfit, susp   share reported as a misfit; share with a change of slope that is suspected, and no ceiling
    r|h            share reported or suspected, or held by the curve's interval
    seen, r|h      runs whose change (a second rise, a decline, a new slope) lies in the first nine tenths of
                   what is fitted, and the share of those that is reported, suspected or held
    most           that share, if the changes were told by who knows the noise, this very curve and the best
                   one of a single rise (Neyman and Pearson: no test has more power), with ours held beside it
    right, wrong   calls of go and no-go on targets .05 below and above the mean curve at the end
    oracle         with --oracle, where a family is the truth: coverage of the curve and of an evaluation by
                   who knows it and the correlation, and our width as a multiple of the oracle's (medians)

After it, what was asked and which cells miss it by more than two standard errors: sqrt(p (1 - p) / n) of a
share p asked of n runs, ten at least, and by 400 resamples for an error.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from statistics import NormalDist

import numpy as np

from scalerl.curve import Family, Points, fit
from scalerl.errors import CannotAnswerError
from scalerl.forecast.rivals import fit_last_value, fit_log_linear, fit_power_law
from scalerl.forecast.scores import interval_score
from shapes import GROUPS
from simulation import FRACTIONS, Simulated

Interval = tuple[float, float]
RIVALS = (fit_last_value, fit_power_law, fit_log_linear)
_FALSE_ALARMS = 0.04  # share of one-phase runs suspected, reported or not
_ROUNDING, _LEAST_RUNS = 1e-9, 10  # a ceiling of 1 may end its interval; runs to judge a cell
RIVAL_NAMES = ("LS", "last", "power", "loglin")


@dataclass(frozen=True)
class Outcome:
    """One run, fitted at one fraction and compared with its truth."""

    curve: bool
    evaluation: bool
    width: float
    score: float
    error: float
    rivals: tuple[float, ...]
    identified: bool
    A: bool | None
    """Whether the interval of an identified ceiling holds; None if not identified or the truth has none."""
    misfit: bool
    suspected: bool
    seen: bool
    tells: float
    """Probability that a test with known curves detects the change; 0 if there is none to see."""
    calls: tuple[bool, ...]
    """Whether each call of go or no-go was right."""
    oracle: tuple[bool, bool, float] | None

    @property
    def told(self) -> bool:
        """Whether the run was reported as a misfit or suspected of one, or the curve's interval held."""
        return self.misfit or self.suspected or self.curve


def outcome(run: Simulated, points: Points, known: tuple[Family, float] | None) -> Outcome | None:
    """Fit `points` and judge the forecast at the end of the run; None if there is no answer."""
    try:
        result = fit(points)
    except CannotAnswerError:
        return None
    end, mean, value = float(run.compute_N[-1]), float(run.mean_N[-1]), float(run.pass_rate_N[-1])
    forecast = result.forecast(end)
    low, high = forecast.prediction
    others = (float(np.clip(fit_rival(points)(end), 0.0, 1.0)) for fit_rival in RIVALS)
    calls = [
        (verdict == "go") == (target <= mean)
        for target in (mean - 0.05, mean + 0.05)
        if 0 <= target <= 1 and (verdict := result.verdict(target, end)) in ("go", "no-go")
    ]
    told_A = result.identified and not math.isnan(run.A)
    seen = bool(run.change <= 0.9 * points.compute_N.max())
    return Outcome(
        _holds(forecast.interval, mean),
        _holds(forecast.prediction, value),
        forecast.interval[1] - forecast.interval[0],
        float(interval_score(np.array([low]), np.array([high]), np.array([value]), 0.95)[0]),
        abs(forecast.median - mean),
        tuple(abs(point - mean) for point in (forecast.paper_point, *others)),
        result.identified,
        _holds(result.intervals.A, run.A) if told_A else None,
        result.misfit is not None,
        result.suspected is not None,
        seen,
        power(run, points) if seen else 0.0,
        tuple(calls),
        oracle(run, points, known) if known else None,
    )


def power(run: Simulated, points: Points) -> float:
    """Return the power of the likelihood ratio of two known curves: the run's and the nearest single rise.

    The rate of false alarms is `_FALSE_ALARMS`. Between the two the mean of the log ratio differs by d^2 =
    r' K^-1 r / sd^2, with r the difference of the curves and K the correlation of the noise; its sd is d.
    """
    from scalerl.curve.least_squares import least_squares
    from scalerl.curve.sample import make_sample

    n, families = len(points.compute_N), {shape.known[0] for shape in GROUPS["one-phase"] if shape.known}
    mean_N, index_N = run.mean_N[:n], np.arange(n)
    sample = make_sample(Points.from_arrays(points.compute_N, mean_N), None)
    nearest = min((least_squares(sample, family) for family in families), key=lambda found: found.rss)
    r_N = mean_N - nearest.curve(points.compute_N)
    correlation_NN = run.phi ** np.abs(index_N[:, None] - index_N)
    if points.compute_N[0] == 0:  # noise before training is independent of the rest
        correlation_NN[0, 1:] = correlation_NN[1:, 0] = 0.0
    d = math.sqrt(r_N @ np.linalg.solve(correlation_NN, r_N)) / run.sd
    return NormalDist().cdf(d - NormalDist().inv_cdf(1 - _FALSE_ALARMS))


def oracle(run: Simulated, points: Points, known: tuple[Family, float]) -> tuple[bool, bool, float]:
    """Return coverage of curve and evaluation at the end, and the width, given family and correlation."""
    # These are internals of the model, which may move; without --oracle the table does not need them.
    from scalerl.curve.least_squares import least_squares
    from scalerl.curve.posterior import posterior
    from scalerl.curve.prior import FLAT, SD_RANGE, NoiseModel
    from scalerl.curve.sample import make_sample
    from scalerl.quantiles import noisy_quantiles, tails, weighted_quantiles

    (family, phi), at_Q, sample = known, tails(0.95), make_sample(points, None)
    # No prior of the noise sd, as the shapes are drawn without one.
    known_noise = replace(FLAT, noise=(NoiseModel(phi, 0.0),))
    post = posterior(sample, SD_RANGE[0], [least_squares(sample, family)], known_noise)
    value = post.curve_at(float(run.compute_N[-1]))
    low, high = weighted_quantiles(value, post.weight, at_Q).tolist()
    least, most = noisy_quantiles(value, post.weight, post.sd_J, post.sd_weight_J, at_Q).tolist()
    held = _holds((low, high), float(run.mean_N[-1]))
    return held, _holds((least, most), float(run.pass_rate_N[-1])), high - low


def _holds(interval: Interval, value: float) -> bool:
    return interval[0] - _ROUNDING <= value <= interval[1] + _ROUNDING


def runs_of(task: tuple[str, int, float], runs: int, seed: int, with_oracle: bool) -> list[Outcome | None]:
    """Return the outcomes of one cell of the table; its runs do not depend on the other cells."""
    group, place, fraction = task
    shape = GROUPS[group][place]
    key, outcomes = [seed, zlib.crc32(shape.name.encode()), round(100 * fraction)], []
    for i in range(runs):
        run = shape.run(fraction, np.random.default_rng([*key, i]))
        outcomes.append(outcome(run, run.first(fraction), shape.known if with_oracle else None))
    return outcomes


@dataclass(frozen=True)
class Cell:
    group: str
    shape: str
    fraction: float
    outcomes: Sequence[Outcome | None]

    @property
    def name(self) -> str:
        """The shape and the fraction."""
        return f"{self.shape}, at {self.fraction:g}"

    @property
    def answered(self) -> list[Outcome]:
        """The outcomes of the runs with a forecast."""
        return [one for one in self.outcomes if one is not None]

    def row(self) -> str:
        """Return one line of the table."""
        of, n = self.answered, len(self.outcomes)
        seen, found = [o for o in of if o.seen], [o.oracle for o in of if o.oracle]
        calls = [call for o in of for call in o.calls]
        cells = [f"{n}", f"{len(of)}"]
        cells += [_share([o.curve for o in of]), _share([o.evaluation for o in of])]
        cells += [_median([o.width for o in of], 3), _mean([o.score for o in of], 3)]
        cells += [_median([o.error for o in of], 4)]
        cells += [_median([o.rivals[i] for o in of], 4) for i in range(len(RIVAL_NAMES))]
        cells += [_share([o.identified for o in of]), _share([o.A for o in of if o.A is not None])]
        cells += [_share([o.misfit for o in of]), _share([o.suspected for o in of])]
        cells += [_share([o.told for o in of])]
        cells += [f"{len(seen)}", _share([o.told for o in seen])]
        cells += [_mean([max(o.tells, float(o.curve)) for o in seen], 3)]
        cells += [f"{sum(calls)}", f"{len(calls) - sum(calls)}"]
        if found:
            ratio = np.median([o.width / o.oracle[2] for o in of if o.oracle])
            cells += [
                " ".join([_share([o[0] for o in found]), _share([o[1] for o in found]), f"{ratio:.2f}"])
            ]
        return _line(self.name, cells)


COLUMNS = ("runs", "answered", "curve", "eval", "width", "score", "error", *RIVAL_NAMES)
COLUMNS += ("ident", "A", "misfit", "susp", "r|h", "seen", "r|h", "most", "right", "wrong")


def _line(name: str, cells: Sequence[str]) -> str:
    widths = [max(len(column), 6) for column in COLUMNS] + [17] * (len(cells) - len(COLUMNS))
    return f"{name:<32} " + " ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _mean(values: Sequence[float], digits: int) -> str:
    return _cell(float(np.mean(values)) if values else None, digits)


def _share(held: Sequence[bool]) -> str:
    return _mean(held, 3)


def _median(values: Sequence[float], digits: int) -> str:
    return _cell(float(np.median(values)) if values else None, digits)


@dataclass(frozen=True)
class Asked:
    """A share required of every cell of some groups; `held` is None for a run that does not count."""

    what: str
    groups: tuple[str, ...]
    held: Callable[[Outcome], bool | None]
    least: float
    oracle: int | None = None
    """Index in `Outcome.oracle` of the share that, less .02, is required instead if it is less."""

    def report(self, cells: Sequence[Cell]) -> None:
        """Print in how many cells the share is reached, and where it is not."""
        missed, looked, pooled = [], 0, []
        for cell in cells:
            held = [h for o in cell.answered if (h := self.held(o)) is not None]
            if cell.group not in self.groups:
                continue
            pooled += held
            if len(held) < _LEAST_RUNS:
                continue
            looked += 1
            least, known = self.least, [o.oracle for o in cell.answered if o.oracle]
            if self.oracle is not None and known:
                least = min(least, float(np.mean([of[self.oracle] for of in known])) - 0.02)
            if np.mean(held) < least - 2 * math.sqrt(least * (1 - least) / len(held)):
                missed.append(f"{cell.name}: {np.mean(held):.3f} of {len(held)}")
        if pooled:
            what = f"{self.what} at least {self.least:g}"
            _report(what, looked, missed, f", all together {_share(pooled)} of {len(pooled)}")


ONE_RISE = ("one-phase", "ceiling", "few", "many", "failed")
ASKED = (
    Asked("one rise: curve", ONE_RISE, lambda o: o.curve, 0.93, 0),
    Asked("one rise: evaluation", ONE_RISE, lambda o: o.evaluation, 0.93, 1),
    Asked("two speeds: curve", ("two-speeds",), lambda o: o.curve, 0.92),
    Asked("two speeds: A, where identified", ("two-speeds",), lambda o: o.A, 0.8),
    Asked(
        "change seen: reported, suspected or held",
        ("two-phase", "decline"),
        lambda o: o.told if o.seen else None,
        0.9,
    ),
)


def errors_of_flat_runs(cells: Sequence[Cell]) -> None:
    """Print whether the error is at most twice that of least squares on flat runs."""
    missed, looked = [], 0
    rng = np.random.default_rng(0)
    for cell in cells:
        if cell.group != "flat" or not cell.answered:
            continue
        looked += 1
        both_2N = np.array([(o.error, o.rivals[0]) for o in cell.answered]).T
        beyond = _beyond(both_2N)
        drawn = [_beyond(both_2N[:, rng.integers(0, both_2N.shape[1], both_2N.shape[1])]) for _ in range(400)]
        if beyond > 2 * float(np.std(drawn)):
            ours, theirs = np.median(both_2N, axis=1)
            missed.append(f"{cell.name}: {ours:.4f} against {theirs:.4f} of {len(cell.answered)}")
    if looked:
        _report("flat: error at most twice that of least squares", looked, missed, "")


def _beyond(both_2N: np.ndarray) -> float:
    ours, theirs = np.median(both_2N, axis=1)
    return float(ours - 2 * theirs)


def _report(what: str, looked: int, missed: Sequence[str], more: str) -> None:
    print(f"{what}: {looked - len(missed)} of {looked} cells{more}")
    print("".join(f"    not in {miss}\n" for miss in missed), end="")


def by_group(cells: Sequence[Cell]) -> None:
    print("\neach group pooled")
    for group, fraction in itertools.product(dict.fromkeys(cell.group for cell in cells), FRACTIONS):
        mine = [cell for cell in cells if (cell.group, cell.fraction) == (group, fraction)]
        print(Cell(group, group, fraction, [o for cell in mine for o in cell.outcomes]).row())
    calls = [call for cell in cells for o in cell.answered for call in o.calls]
    print(f"\ncalls of go and no-go: {len(calls)}, right {_share(calls)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=tuple(GROUPS), default=tuple(GROUPS), help="groups")
    parser.add_argument("--runs", type=int, default=60, help="simulated runs for each cell")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--oracle", action="store_true", help="beside it who knows family and correlation")
    args, start = parser.parse_args(), time.perf_counter()
    tasks = [(g, i, at) for g in args.shapes for i in range(len(GROUPS[g])) for at in FRACTIONS]
    # Spawned processes read these before they import numpy: one thread each.
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    work = partial(runs_of, runs=args.runs, seed=args.seed, with_oracle=args.oracle)
    cells = []
    print(_line("", (*COLUMNS, "oracle") if args.oracle else COLUMNS))
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        for (group, place, fraction), outcomes in zip(tasks, pool.map(work, tasks), strict=True):
            cells.append(Cell(group, GROUPS[group][place].name, fraction, outcomes))
            print(cells[-1].row(), flush=True)
    by_group(cells)
    print("\nwhat was asked, and the cells that miss it by more than two standard errors")
    for asked in ASKED:
        asked.report(cells)
    errors_of_flat_runs(cells)
    print(f"\n{sum(len(cell.outcomes) for cell in cells)} runs in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
