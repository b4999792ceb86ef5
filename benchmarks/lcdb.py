"""Who forecasts the end of curves that nobody here drew? Ours and rivals on scikit-learn's, from LCDB 1.0.

    pip install --no-deps --target build/lcdb lcdb       # MIT; 68 MB to load, 459 MB on disk
    PYTHONPATH=build/lcdb python benchmarks/lcdb.py [--curves 500] [--seed 0] [--jobs 2] [--each]

The learning curves of Mohr, Viering, Loog and van Rijn ("LCDB 1.0", ECML PKDD 2022): 20 learners on 248 data
sets of OpenML. The training-set size (16, 23, 32, 45, ... to .9 of the data) stands for compute, the accuracy
on the validation set, a mean over the splits, for the pass rate. It is RL's problem without RL: saturating
curves of many shapes, means of few noisy values, and some that fall or have two speeds.

A curve is fitted to its first half on the log scale, sizes up to sqrt(first x last), and forecast at the last
size. Curves with fewer than six sizes in that half are left out, and those whose accuracy stays within .001,
as of a learner that predicts the most frequent class whatever the size. `--each` names the curves.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from bank import MMF4, POW4, wald
from scalerl.curve import Points, fit
from scalerl.errors import CannotAnswerError
from scalerl.forecast.rivals import BANK_RIVALS, Predicted, Rival, Seen
from scalerl.forecast.scores import covered, interval_score

LEAST_SIZES, CONSTANT, LEVEL = 6, 1e-3, 0.95
OURS, LAST = "scalerl", "last value (random walk)"
RIVALS: dict[str, Rival] = {
    "POW4": partial(wald, POW4),
    "MMF4": partial(wald, MMF4),
    LAST: BANK_RIVALS["random walk"],
}
Forecasts = dict[str, tuple[float, float, float]]
"""Point and both ends of the prediction interval, by method; methods without an answer are missing."""


@dataclass(frozen=True)
class Learned:
    """A learning curve: mean validation accuracies by training-set size."""

    name: str
    size_N: np.ndarray
    accuracy_N: np.ndarray

    @property
    def first(self) -> np.ndarray:
        """Whether each size lies in the first half on the log scale, (N,)."""
        return self.size_N <= np.sqrt(self.size_N[0] * self.size_N[-1])


def read(folder: Path) -> list[Learned]:
    """Return all curves that are neither too short nor constant, by data set and learner."""
    with (folder / "datasets.csv").open(newline="") as file:
        name = {row["openmlid"]: row["Name"] for row in csv.DictReader(file)}
    splits: dict[tuple[str, str], dict[int, list[float]]] = {}
    with (folder / "database-accuracy.csv").open(newline="") as file:
        rows = csv.reader(file)
        columns = next(rows)
        at = [columns.index(c) for c in ("openmlid", "learner", "size_train", "score_valid")]
        for row in rows:
            dataset, learner, size, accuracy = (row[i] for i in at)
            splits.setdefault((dataset, learner), {}).setdefault(int(size), []).append(float(accuracy))
    found = []
    for (dataset, learner), of_size in sorted(splits.items()):
        sizes = sorted(of_size)
        mean_N = np.array([np.mean(of_size[size]) for size in sizes])
        title = f"{learner.rpartition('.')[2]} on {name.get(dataset, 'OpenML')} ({dataset})"
        curve = Learned(title, np.array(sizes, float), mean_N)
        if curve.first.sum() >= LEAST_SIZES and np.ptp(mean_N) >= CONSTANT:
            found.append(curve)
    return found


def forecasts(curve: Learned) -> Forecasts:
    """Forecast the last accuracy by every method."""
    points = Points.from_arrays(curve.size_N[curve.first], curve.accuracy_N[curve.first], source=curve.name)
    end, found = float(curve.size_N[-1]), Forecasts()
    try:
        forecast = fit(points).forecast(end)
        found[OURS] = (forecast.median, *forecast.prediction)
    except CannotAnswerError:
        pass
    seen = Seen(points, float(points.compute_N.max()), None, None, "", ())
    at_Q = np.array([(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    for name, rival in RIVALS.items():
        try:
            with np.errstate(all="ignore"):  # SciPy may overflow on its way to a minimum
                predicted: Predicted = rival(seen, np.array([end]), at_Q)
        except CannotAnswerError:
            continue
        assert predicted.value_QK is not None
        point, low, high = np.clip([predicted.point_K[0], *predicted.value_QK[:, 0]], 0, 1).tolist()
        found[name] = (point, low, high)
    return found


def table(curves: Sequence[Learned], found: Sequence[Forecasts]) -> dict[str, tuple[float, float]]:
    """Print a row for every method; return median error and coverage by method."""
    print("| method | answered | inside | width | interval score | median error |\n|---|---|---|---|---|---|")
    figures = {}
    for name in (OURS, *RIVALS):
        rows = [(of[name], c.accuracy_N[-1]) for c, of in zip(curves, found, strict=True) if name in of]
        if not rows:
            continue
        point_M, low_M, high_M = np.array([row for row, _ in rows]).T
        end_M = np.array([end for _, end in rows])
        inside = float(np.mean(covered(low_M, high_M, end_M)))
        score = float(np.mean(interval_score(low_M, high_M, end_M, LEVEL)))
        figures[name] = float(np.median(np.abs(point_M - end_M))), inside
        print(
            f"| {name} | {len(rows)} | {inside:.3f} | {np.median(high_M - low_M):.4f} | {score:.4f} "
            f"| {figures[name][0]:.4f} |"
        )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--curves", type=int, default=500, help="drawn from all, without replacement")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--each", action="store_true", help="name the curves, with our forecasts")
    args, start = parser.parse_args(), time.perf_counter()
    try:
        folder = Path(str(distribution("lcdb").locate_file("lcdb")))
    except PackageNotFoundError:
        print("LCDB is missing: pip install --no-deps --target build/lcdb lcdb (459 MB), and set "
              "PYTHONPATH=build/lcdb", file=sys.stderr)  # fmt: skip
        sys.exit(2)
    every = read(folder)
    drawn = np.random.default_rng(args.seed).permutation(len(every))[: args.curves]
    curves = [every[i] for i in sorted(drawn)]
    # Spawned processes read these before they import numpy: one thread each.
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        found = list(pool.map(forecasts, curves, chunksize=8))
    print(f"{len(curves)} of {len(every)} curves, at the last size from their first half on the log scale\n")
    ours = table(curves, found).get(OURS)
    both = [(c, of) for c, of in zip(curves, found, strict=True) if OURS in of]
    print(f"\nthe {len(both)} curves with an answer of {OURS}\n")
    alike = table([c for c, _ in both], [of for _, of in both])
    if ours:
        best = min(alike[name][0] for name in ("POW4", "MMF4"))
        print(f"\nasked: coverage at least .92: {ours[1]:.3f}; median error on the same curves at most that")
        print(f"of the best of POW4 and MMF4, {best:.4f}: {alike[OURS][0]:.4f}")
    if args.each:
        print("\n| curve | sizes | forecast | 95 % interval | last accuracy |\n|---|---|---|---|---|")
        for curve, of in zip(curves, found, strict=True):
            point, low, high = of.get(OURS, (np.nan,) * 3)
            print(f"| {curve.name} | {curve.first.sum()} of {len(curve.size_N)} | {point:.3f} "
                  f"| [{low:.3f}, {high:.3f}] | {curve.accuracy_N[-1]:.3f} |")  # fmt: skip
    print(f"\n{time.perf_counter() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
