"""How fast is the fit, and does it find the least? Ratios against SciPy's curve_fit, measured side by side.

    pip install 'scalerl[bench]'
    python benchmarks/curve.py [--only a,b,c,d,e,f,g] [--sets 1000] [--seed 0]

One core, one thread, CPU time; the machine may be shared, so what counts is the ratio within one run.
Our fit is `make_sample` and `least_squares` of the log-logistic with all four parameters free. SciPy's is
`curve_fit` (method trf) within the same bounds, in R_0, the gain as a share of 1 - R_0, log B and log C_mid,
without derivatives, as most write it.
"""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # read when numpy is imported

import argparse
import contextlib
import importlib
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scalerl.curve import LOG_LOGISTIC, Curve, Points, fit
from scalerl.curve.least_squares import least_squares, least_squares_many
from scalerl.curve.noise import ar1
from scalerl.curve.sample import Sample, make_sample
from scalerl.errors import CannotAnswerError
from scalerl.forecast.paper import PAPER_CEILINGS, paper_fit

TRUTH = Curve(LOG_LOGISTIC, 0.61, 1.92, 2542.0, 0.40)
BOX = np.array([[0.0, 0.0, np.log(0.05), 0.0], [1.0, 1.0, np.log(20.0), 0.0]])
"""Bounds of (R_0, (A - R_0) / (1 - R_0), log B, log C_mid); the last depend on the data."""


@dataclass(frozen=True)
class Row:
    """A line of the table; `met` is None if nothing is required."""

    what: str
    ours: str
    theirs: str
    ratio: str
    asked: str = ""
    met: bool | None = None


def cpu(work: Callable[[], Any], repeats: int = 7) -> float:
    """Return the median CPU seconds of a call, after one warm-up call."""
    work()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return statistics.median(times)


def run(rng: np.random.Generator, n: int = 50, end: float = 8000.0, sd: float = 0.005) -> Points:
    """Return a run like the paper's: step 0 and n - 1 evaluations up to `end` GPU-hours."""
    compute_N = np.linspace(0, end, n)
    return Points.from_arrays(compute_N, np.clip(TRUTH(compute_N) + rng.normal(0, sd, n), 0, 1))


def ours(points: Points) -> float:
    """Return the sum of squares of our fit."""
    return least_squares(make_sample(points, None), LOG_LOGISTIC).rss


def model(compute_N: np.ndarray, R_0: float, gain: float, log_b: float, log_mid: float) -> np.ndarray:
    """Return the log-logistic curve as curve_fit wants it; `gain` in [0, 1] makes it rise, to 1 at most."""
    with np.errstate(divide="ignore", over="ignore"):
        return R_0 + gain * (1 - R_0) / (1 + np.exp(-np.exp(log_b) * (np.log(compute_N) - log_mid)))


def box(points: Points) -> np.ndarray:
    """Return the bounds of our fit, (2, 4)."""
    positive_N = points.compute_N[points.compute_N > 0]
    bounds = BOX.copy()
    bounds[:, 3] = np.log(positive_N.min() / 100), np.log(positive_N.max() * 100)
    return bounds


def scipy_once(curve_fit: Any, points: Points, start: np.ndarray, bounds: np.ndarray) -> float:
    """Return the sum of squares of one bounded curve_fit; infinite if it gives up."""
    try:
        theta, _ = curve_fit(model, points.compute_N, points.pass_rate_N, p0=start, bounds=bounds)
    except RuntimeError:
        return np.inf
    return float(np.sum((points.pass_rate_N - model(points.compute_N, *theta)) ** 2))


def scipy_many(curve_fit: Any, points: Points, rng: np.random.Generator, starts: int = 20) -> float:
    """Return the least sum of squares from `starts` starts spread over the range of the data."""
    bounds = box(points)
    positive_N = points.compute_N[points.compute_N > 0]
    best = np.inf
    for _ in range(starts):
        log_mid = rng.uniform(np.log(positive_N.min()), np.log(positive_N.max() * 3))
        start = np.array([*rng.uniform(0, 1, 2), rng.uniform(np.log(0.3), np.log(6)), log_mid])
        best = min(best, scipy_once(curve_fit, points, start, bounds))
    return best


def plain_start(points: Points) -> np.ndarray:
    """Return the start that one would guess by eye."""
    middle = np.log(np.median(points.compute_N[points.compute_N > 0]))
    low, high = points.pass_rate_N.min(), points.pass_rate_N.max()
    return np.array([low, (high - low) / (1 - low), np.log(1.5), middle])


def paper_cells(curve_fit: Any, points: Points, rng: np.random.Generator, cells: int = 300) -> float:
    """Return CPU seconds of the paper's search with curve_fit, scaled from a sample of its 71 x 100 cells."""
    c_mids, y_N, compute_N = np.linspace(100, 4000, 100), points.pass_rate_N[1:], points.compute_N[1:]
    start = time.process_time()
    for _ in range(cells):
        A, C_mid = rng.choice(PAPER_CEILINGS), rng.choice(c_mids)

        def cell(c_N: np.ndarray, B: float, A: float = A, C_mid: float = C_mid) -> np.ndarray:
            return 0.40 + (A - 0.40) / (1 + (C_mid / c_N) ** B)

        try:
            curve_fit(cell, compute_N, y_N, p0=[1.5])
        except RuntimeError:
            continue
    return (time.process_time() - start) / cells * len(PAPER_CEILINGS) * len(c_mids)


def at_least(what: str, mine: float, theirs: float, asked: float, against: str) -> Row:
    """Return a row on how many times faster we are."""
    ratio = theirs / mine
    return Row(
        what, clock(mine), f"{clock(theirs)} {against}", f"{ratio:,.0f}x", f">= {asked:,.0f}x", ratio >= asked
    )


def at_most(what: str, mine: float, theirs: float, asked: float, against: str) -> Row:
    """Return a row on how many times as long we may take."""
    ratio = mine / theirs
    return Row(
        what, clock(mine), f"{clock(theirs)} {against}", f"{ratio:.2f}", f"<= {asked:g}", ratio <= asked
    )


def clock(seconds: float) -> str:
    """Return seconds as text in a suitable unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def section_a(curve_fit: Any, rng: np.random.Generator, _: int) -> list[Row]:
    """Compare one fit, and a batch, with the paper's search."""
    runs = [run(rng) for _ in range(100)]
    theirs = paper_cells(curve_fit, runs[0], rng)
    single = cpu(lambda: [ours(points) for points in runs]) / len(runs)
    batch = cpu(lambda: fit_batch(runs)) / len(runs)
    grid = cpu(lambda: paper_fit(runs[0], 0.40))
    against = "curve_fit of B in 71 x 100 cells (300 timed)"
    return [
        at_least("a  one fit, 50 points", single, theirs, 3000, against),
        at_least("a  one fit of a batch of 100", batch, theirs, 10000, against),
        Row("a  paper_fit, 71 x 199 cells", clock(grid), "the same", f"{theirs / grid:,.0f}x"),
    ]


def fit_batch(runs: list[Points]) -> None:
    """Fit many runs by least squares in one call."""
    least_squares_many([make_sample(points, None) for points in runs], LOG_LOGISTIC)


def section_b(curve_fit: Any, rng: np.random.Generator, _: int) -> list[Row]:
    """Compare one fit with twenty starts."""
    runs = [run(rng) for _ in range(20)]
    theirs = cpu(lambda: scipy_many(curve_fit, runs[0], rng), repeats=5)
    mine = cpu(lambda: [ours(points) for points in runs]) / len(runs)
    return [at_least("b  one fit, 50 points", mine, theirs, 100, "curve_fit from 20 starts")]


def draw(rng: np.random.Generator) -> Points:
    """Draw a data set, easy or hard: everything about it is random."""
    A = rng.uniform(0.3, 1.0)
    truth = Curve(
        LOG_LOGISTIC, A, np.exp(rng.uniform(np.log(0.3), np.log(6))), 1000.0, rng.uniform(0, 0.8) * A
    )
    n, end = (
        int(np.exp(rng.uniform(np.log(6), np.log(200)))),
        1000 * np.exp(rng.uniform(np.log(0.3), np.log(30))),
    )
    compute_N = np.linspace(0, end, n) if rng.random() < 0.5 else np.geomspace(end / 100, end, n)
    compute_N = compute_N[int(rng.random() < 0.3) :]
    noise_N = np.exp(rng.uniform(np.log(5e-4), np.log(0.05))) * rng.normal(size=len(compute_N))
    return Points.from_arrays(compute_N, np.clip(truth(compute_N) + noise_N, 0, 1))


def section_c(curve_fit: Any, rng: np.random.Generator, sets: int) -> list[Row]:
    """Compare squared errors on random data sets with the best of twenty starts and of the paper's grid."""
    excess = []
    for points in [draw(rng) for _ in range(sets)]:  # drawn first: the same sets whatever fits draw
        best = scipy_many(curve_fit, points, rng)
        with_0 = (points.compute_N == 0).any()
        if with_0 and points.pass_rate_N[0] < PAPER_CEILINGS[-1]:
            with contextlib.suppress(CannotAnswerError):  # paper mode wants a rise
                grid = paper_fit(points, min_compute=0).curve
                best = min(best, float(np.sum((points.pass_rate_N - grid(points.compute_N)) ** 2)))
        scale = float(np.sum((points.pass_rate_N - points.pass_rate_N.mean()) ** 2))
        excess.append((ours(points) - best) / max(best, 1e-13 * scale))
    higher, lower = [e for e in excess if e > 1e-9], [-e for e in excess if e < -1e-9]
    return [
        Row(
            f"c  squared error, {sets} data sets",
            f"higher in {len(higher)}" + (f", by {max(higher):.1e} at most" if higher else ""),
            f"higher in {len(lower)}" + (f", by {max(lower):.1e} at most" if lower else ""),
            f"{len(higher)}/{len(lower)}",
            "0 above 1e-9",
            not higher,
        )
    ]


def bootstrap(points: Points, rng: np.random.Generator, count: int, phi: float = 0.4) -> list[Points]:
    """Return data sets about the fitted curve with AR(1) noise of the size of the residuals."""
    best = least_squares(make_sample(points, None), LOG_LOGISTIC)
    n = len(points)
    noise = ar1(rng.normal(0, np.sqrt(best.rss / (n - 4)), (count, n)), phi)
    mean_N = best.curve(points.compute_N)
    return [Points.from_arrays(points.compute_N, np.clip(mean_N + e_N, 0, 1)) for e_N in noise]


def section_d(curve_fit: Any, rng: np.random.Generator, _: int) -> list[Row]:
    """Compare a thousand bootstrap refits with two hundred single starts from the truth."""
    points = run(rng)
    gain = (TRUTH.A - TRUTH.R_0) / (1 - TRUTH.R_0)
    start = np.array([TRUTH.R_0, gain, np.log(TRUTH.B), np.log(TRUTH.C_mid)])
    some, bounds = bootstrap(points, rng, 200), box(points)
    theirs = cpu(lambda: [scipy_once(curve_fit, p, start, bounds) for p in some], repeats=3)
    mine = cpu(lambda: fit_batch(bootstrap(points, rng, 1000)), repeats=3)
    return [at_most("d  1,000 AR bootstrap refits", mine, theirs, 1, "200 curve_fit from the truth")]


def section_e(curve_fit: Any, rng: np.random.Generator, _: int) -> list[Row]:
    """Compare the whole answer, families averaged, with twenty single starts."""
    points = run(rng)
    start, bounds = plain_start(points), box(points)
    theirs = cpu(lambda: [scipy_once(curve_fit, points, start, bounds) for _ in range(20)])
    mine = cpu(lambda: fit(points))
    return [at_most("e  fit: posterior, families averaged", mine, theirs, 1, "20 curve_fit from one start")]


def section_f(curve_fit: Any, rng: np.random.Generator, _: int) -> list[Row]:
    """Compare the command, from start to exit, with importing numpy."""
    points = run(rng)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.csv"
        rows = zip(points.compute_N, points.pass_rate_N, strict=True)
        log.write_text("gpu_hours,pass_rate\n" + "".join(f"{c},{y}\n" for c, y in rows))
        command = [sys.executable, "-m", "scalerl", "fit", str(log), "--json"]
        pairs = [(child(command), child([sys.executable, "-c", "import numpy"])) for _ in range(9)]
    mine, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    return [at_most("f  scalerl fit FILE --json", mine, theirs, 3, "python -c 'import numpy'")]


def child(command: list[str]) -> float:
    """Return the user plus system seconds of a process."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def section_g(curve_fit: Any, rng: np.random.Generator, _: int) -> list[Row]:
    """Measure time and peak memory of long runs and of many runs."""
    sizes = (1_000, 10_000, 100_000, 1_000_000)
    runs = [run(rng, n) for n in sizes]
    cost = [measure(lambda p=points: fit(p)) for points in runs]
    rows = [
        Row(f"g  fit, {n:,} points", f"{clock(seconds)}, {peak / 1e6:.1f} MB", "", "")
        for n, (seconds, peak) in zip(sizes, cost, strict=True)
    ]
    growth = [max(a / b for a, b in zip(cost[i], cost[i - 1], strict=True)) for i in range(1, len(cost))]
    rows.append(
        Row("g  growth for ten times the points", f"{max(growth):.1f}x", "", "", "<= 13x", max(growth) <= 13)
    )
    samples: list[Sample] = [make_sample(run(rng), None) for _ in range(10_000)]
    cost = [measure(lambda s=samples[:n]: least_squares_many(s, LOG_LOGISTIC)) for n in (1_000, 10_000)]
    growth = cost[1][0] / cost[0][0]
    text = f"{clock(cost[1][0])}, {cost[1][1] / 1e6:.0f} MB"
    rows.append(
        Row(
            "g  10,000 runs of 50 points, one call",
            text,
            "10 x 1,000 runs",
            f"{growth / 10:.2f}",
            "<= 1.3",
            growth <= 13,
        )
    )
    return rows


def measure(work: Callable[[], Any]) -> tuple[float, float]:
    """Return CPU seconds and peak bytes of a call."""
    seconds = cpu(work, repeats=3)
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return seconds, float(peak)


SECTIONS = {name[-1]: function for name, function in list(globals().items()) if name.startswith("section_")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="a,b,c,d,e,f,g", help="sections, say a,b")
    parser.add_argument("--sets", type=int, default=1000, help="random data sets of section c")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        curve_fit = importlib.import_module("scipy.optimize").curve_fit
    except ModuleNotFoundError:
        raise SystemExit("this compares with SciPy: pip install 'scalerl[bench]'") from None
    warnings.simplefilter("ignore")  # curve_fit's, on covariances that are not used here
    scipy = importlib.import_module("scipy").__version__
    print(f"Python {sys.version.split()[0]}, numpy {np.__version__}, SciPy {scipy}, CPU time, one thread")
    for name in args.only.split(","):
        for row in SECTIONS[name](curve_fit, np.random.default_rng([args.seed, ord(name)]), args.sets):
            met = {True: "met", False: "NOT MET", None: ""}[row.met]
            line = f"{row.what:<38} {row.ours:<34} {row.theirs:<52} {row.ratio:>9} {row.asked:>12}  {met}"
            print(line.rstrip(), flush=True)


if __name__ == "__main__":
    main()
