"""Who forecasts the end of a finished run best? Ours and ten rivals on a bank of runs, at 1/4, 1/2, 3/4.

    python benchmarks/bank.py [FOLDER --x steps --y pass_rate] [--seed 0] [--runs 28] [--each]

FOLDER holds tables, run folders and logs, as for `scalerl backtest --bank FOLDER`, whose five rivals are here
too. Without one the bank is simulated: gain over noise 2 to 50, 6 to 60 evaluations, correlation 0 to .5, and
seven kinds of runs (log-logistic and Weibull; ceiling 1; two speeds; a delayed start; a decline; flat).
Beside the five, by SciPy (`pip install '.[bench]'`):

    GP, sigmoidal mean   least-squares log-logistic, and a Gaussian process in log C about it
    ARIMA                (p, 1, q) with p, q up to 1 by AICc, conditional least squares, a step per evaluation
    POW4, MMF4           the best two of Mohr and van Rijn, LCDB 1.0, 2022; Wald intervals
    11 curves            those of Domhan, Springenberg and Hutter, IJCAI 2015, by least squares, weighted by
                         BIC, parameters drawn from their Wald covariance (no MCMC, no prior of a rise)

Printed for every method: runs answered, and of the evaluation at the end the median absolute error, coverage,
mean width, interval score and CRPS of 95 % intervals, the coverage at all later evaluations, and the calls of
go and no-go on targets .05 below and above the end that were right and wrong. `--each` adds
the runs one by one. Of a FOLDER all is printed again without the cuts after which a run fell by .1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from scalerl.curve import LOG_LOGISTIC, Curve, Points, Weibull
from scalerl.curve.least_squares import least_squares
from scalerl.curve.noise import ar1
from scalerl.curve.sample import make_sample
from scalerl.errors import CannotAnswerError, InputError
from scalerl.forecast.backtest import backtest
from scalerl.forecast.backtest_result import OURS, Backtest, Cut
from scalerl.forecast.bank import Bank
from scalerl.forecast.rivals import BANK_RIVALS, Predicted, Rival, Seen, normal, require
from scalerl.ingest.load import read_all
from scalerl.ingest.options import ReadOptions

optimize: Any = import_module("scipy.optimize")  # by name, as the tests run without SciPy
FRACTIONS = (0.25, 0.5, 0.75)
KINDS = ("log-logistic", "Weibull", "A = 1", "two speeds", "delayed start", "decline", "flat")
_DRAWS, _STARTS = 400, 2


@dataclass(frozen=True)
class Shape:
    """A curve for least squares: x is compute divided by the first compute above 0, y the pass rate."""

    f: Callable[..., np.ndarray]
    start: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def _pow4(x: np.ndarray, c: float, a: float, b: float, alpha: float) -> np.ndarray:
    return c - (a * x + b) ** -alpha


def _mmf4(x: np.ndarray, a: float, b: float, c: float, d: float) -> np.ndarray:
    return (a * b + c * x**d) / (b + x**d)


POW4 = Shape(_pow4, (0.8, 0.3, 1.5, 0.8), (0, 1e-4, 1e-2, 0.05), (1, 1e3, 1e2, 10))
MMF4 = Shape(_mmf4, (0.3, 10.0, 0.7, 1.0), (0, 1e-3, 0, 0.05), (1, 1e6, 1, 8))
ELEVEN = (
    Shape(lambda x, a, b, c: np.exp(a + b / x + c * np.log(x)), (-1, -0.3, 0.05), (-9, -9, -1), (1, 9, 1)),
    Shape(lambda x, c, a, al: c - a * x**-al, (0.7, 0.4, 0.5), (0, 0, 0.02), (1, 3, 8)),
    Shape(lambda x, a, b: np.log(np.maximum(a * np.log(x) + b, 1e-6)), (0.2, 1.4), (0, 0.5), (3, 3)),
    Shape(lambda x, y, e, k: y * x**e / (k**e + x**e), (0.7, 0.7, 2), (0, 0.02, 1e-3), (1, 8, 1e4)),
    Shape(lambda x, a, b, c: a / (1 + (x / np.exp(b)) ** c), (0.7, 0.7, -0.7), (0, -9, -8), (1, 9, -0.02)),
    POW4,
    MMF4,
    Shape(
        lambda x, c, a, b, al: c - np.exp(-a * x**al + b),
        (0.7, 0.5, -0.5, 0.6), (0, 1e-4, -6, 0.05), (1, 9, 2, 4),
    ),
    Shape(
        lambda x, a, b, k, d: a - (a - b) * np.exp(-k * x**d),
        (0.7, 0.3, 0.2, 0.8), (0, 0, 1e-5, 0.05), (1, 1, 9, 4),
    ),
    Shape(
        lambda x, a, b, k, d: a - (a - b) * np.exp(-((k * x) ** d)),
        (0.7, 0.3, 0.15, 1.0), (0, 0, 1e-5, 0.05), (1, 1, 9, 4),
    ),
    Shape(lambda x, c, a: c - a / np.log(x + 1), (0.7, 0.2), (0, 0), (1, 3)),
)  # fmt: skip


@dataclass(frozen=True)
class Fitted:
    shape: Shape
    parameters_P: np.ndarray
    covariance_PP: np.ndarray
    sd: float
    bic: float


def fitted(shape: Shape, x_N: np.ndarray, y_N: np.ndarray, rng: np.random.Generator) -> Fitted:
    """Return the best fit from a few starts; raise CannotAnswerError if there is none."""
    n, p = len(x_N), len(shape.start)
    if n <= p:
        raise CannotAnswerError(f"{n} evaluations at distinct compute, {p + 1} are needed")
    low_P, high_P = np.array(shape.low), np.array(shape.high)
    best: tuple[float, np.ndarray] | None = None
    for start in range(_STARTS):
        moved = np.array(shape.start) * (np.exp(rng.normal(0, 0.8, p)) if start else 1.0)
        begin_P = np.clip(moved, low_P + 1e-6, high_P - 1e-6)
        found = optimize.least_squares(
            lambda p_P: shape.f(x_N, *p_P) - y_N, begin_P, bounds=(low_P, high_P), max_nfev=100
        ).x
        rss = float(np.sum((shape.f(x_N, *found) - y_N) ** 2))
        if np.isfinite(rss) and (best is None or rss < best[0]):
            best = rss, found
    if best is None:
        raise CannotAnswerError("least squares found no minimum")
    rss, found = best
    sd, bic = np.sqrt(rss / (n - p)), n * np.log(max(rss / n, 1e-12)) + p * np.log(n)
    # Parameters may trade off exactly, as those of POW4 do early in a run: the pseudo-inverse leaves out
    # directions that the data do not determine. SciPy's curve_fit returns no covariance in that case.
    slopes_NP = slopes(shape, found, x_N)
    scale_P = np.maximum(np.linalg.norm(slopes_NP, axis=0), 1e-12)
    inverse_PP = np.linalg.pinv((slopes_NP / scale_P).T @ (slopes_NP / scale_P), rcond=1e-8, hermitian=True)
    return Fitted(shape, found, sd**2 * inverse_PP / np.outer(scale_P, scale_P), float(sd), float(bic))


def slopes(shape: Shape, parameters_P: np.ndarray, x_K: np.ndarray) -> np.ndarray:
    """Return derivatives with respect to the parameters, by central differences, (K, P)."""
    step_P = 1e-5 * np.maximum(np.abs(parameters_P), 1e-3)
    moved = [shape.f(x_K, *(parameters_P + s)) - shape.f(x_K, *(parameters_P - s)) for s in np.diag(step_P)]
    return np.array(moved).T / (2 * step_P)


def rows_of(seen: Seen) -> tuple[np.ndarray, np.ndarray]:
    """Return compute and pass rate of the evaluations above compute 0, averaged at equal compute."""
    points = seen.points.select(seen.points.compute_N > 0)
    compute_N, place = np.unique(points.compute_N, return_inverse=True)
    if not len(compute_N):
        raise CannotAnswerError("no evaluation above compute 0")
    return compute_N, np.bincount(place, points.pass_rate_N) / np.bincount(place)


def wald(shape: Shape, seen: Seen, compute_K: np.ndarray, at_Q: np.ndarray) -> Predicted:
    compute_N, y_N = rows_of(seen)
    found = fitted(shape, compute_N / compute_N[0], y_N, np.random.default_rng(0))
    x_K = compute_K / compute_N[0]
    slopes_KP = slopes(shape, found.parameters_P, x_K)
    variance_K = np.einsum("ki,ij,kj->k", slopes_KP, found.covariance_PP, slopes_KP)
    sd_K = np.sqrt(np.maximum(variance_K, 0) + found.sd**2)
    return normal(shape.f(x_K, *found.parameters_P), sd_K, at_Q)


def eleven(seen: Seen, compute_K: np.ndarray, at_Q: np.ndarray) -> Predicted:
    (compute_N, y_N), rng = rows_of(seen), np.random.default_rng(0)
    x_K, curves = compute_K / compute_N[0], []
    for shape in ELEVEN:
        with suppress(CannotAnswerError):  # four parameters may be too many where two are not
            curves.append(fitted(shape, compute_N / compute_N[0], y_N, rng))
    if not curves:
        raise CannotAnswerError(f"{len(y_N)} evaluations at distinct compute, 3 are needed")
    bic = np.array([one.bic for one in curves])
    weight = np.exp(-0.5 * (bic - bic.min()))
    weight /= weight.sum()
    drawn = []
    for pick in rng.choice(len(curves), _DRAWS, p=weight):
        one = curves[pick]
        sample_P = rng.multivariate_normal(one.parameters_P, one.covariance_PP, method="svd")
        value_K = one.shape.f(x_K, *np.clip(sample_P, one.shape.low, one.shape.high))
        drawn.append(value_K + rng.normal(0, one.sd))
    point_K = np.sum(
        [w * one.shape.f(x_K, *one.parameters_P) for w, one in zip(weight, curves, strict=True)], 0
    )
    return Predicted(point_K, np.quantile(np.array(drawn), at_Q, axis=0))


def gaussian_process(seen: Seen, compute_K: np.ndarray, at_Q: np.ndarray) -> Predicted:
    require(seen.points, 5)
    mean = least_squares(make_sample(seen.points, seen.r0), LOG_LOGISTIC).curve
    compute_N, y_N = rows_of(seen)
    left_N, x_N, x_K = y_N - mean(compute_N), np.log(compute_N), np.log(compute_K)

    def kernel(a: np.ndarray, b: np.ndarray, log_3: np.ndarray) -> np.ndarray:
        return np.exp(2 * log_3[0] - 0.5 * ((a[:, None] - b) / np.exp(log_3[1])) ** 2)

    def factor(log_3: np.ndarray) -> np.ndarray:
        return np.linalg.cholesky(kernel(x_N, x_N, log_3) + np.exp(2 * log_3[2]) * np.eye(len(x_N)))

    def loss(log_3: np.ndarray) -> float:
        root = factor(log_3)
        return float(0.5 * np.sum(np.linalg.solve(root, left_N) ** 2) + np.log(np.diag(root)).sum())

    scale, bounds = np.log(max(left_N.std(), 1e-4)), [(-9.0, 0.0), (-1.5, 2.0), (-7.0, -1.0)]
    starts = [(scale + ds, dl, np.clip(scale, -7, -1)) for ds, dl in ((-0.3, 0.0), (0.0, 1.0), (-2.0, -0.5))]
    best = min((optimize.minimize(loss, s, bounds=bounds) for s in starts), key=lambda found: found.fun).x
    root, cross_NK = factor(best), kernel(x_N, x_K, best)
    solved_NK = np.linalg.solve(root, cross_NK)
    mean_K = mean(compute_K) + solved_NK.T @ np.linalg.solve(root, left_N)
    variance_K = np.exp(2 * best[0]) - np.sum(solved_NK**2, axis=0) + np.exp(2 * best[2])
    return normal(mean_K, np.sqrt(np.maximum(variance_K, 1e-12)), at_Q)


def arima(seen: Seen, compute_K: np.ndarray, at_Q: np.ndarray) -> Predicted:
    compute_N, y_N = rows_of(seen)
    step_N = np.diff(y_N)
    if len(step_N) < 5:
        raise CannotAnswerError(f"{len(y_N)} evaluations at distinct compute, 6 are needed")

    def errors(phi: float, theta: float) -> np.ndarray:
        error_N = np.zeros(len(step_N))
        for i in range(1, len(step_N)):
            error_N[i] = step_N[i] - phi * step_N[i - 1] - theta * error_N[i - 1]
        return error_N

    found: list[tuple[float, float, float, float]] = []
    n = len(step_N) - 1
    for free in ((0, 0), (1, 0), (0, 1), (1, 1)):
        mask = np.array(free)
        bounds = [(-0.95, 0.95)] * 2
        best = (
            optimize.minimize(
                lambda p, m=mask: float(np.sum(errors(*(p * m)) ** 2)), 0.1 * mask, bounds=bounds
            ).x
            * mask
        )
        rss, k = float(np.sum(errors(*best) ** 2)), int(mask.sum()) + 1
        if n - k - 1 > 0:
            aicc = n * np.log(max(rss / n, 1e-12)) + 2 * k * n / (n - k - 1)
            found.append((aicc, *best.tolist(), rss / max(n - k + 1, 1)))
    if not found:
        raise CannotAnswerError(f"{len(y_N)} evaluations are too few for AICc")
    _, phi, theta, variance = min(found)
    ahead_K = np.maximum((compute_K - compute_N[-1]) / np.median(np.diff(compute_N)), 1.0)
    most = min(int(np.ceil(ahead_K.max())), 10_000) + 1
    psi = np.concatenate([[1.0], (phi + theta) * phi ** np.arange(most)])
    spread = variance * np.cumsum(np.cumsum(psi) ** 2)
    first = phi * step_N[-1] + theta * errors(phi, theta)[-1]
    moved = y_N[-1] + first * np.cumsum(phi ** np.arange(most))
    at = np.arange(1, most + 1)
    return normal(np.interp(ahead_K, at, moved), np.sqrt(np.interp(ahead_K, at, spread[:most])), at_Q)


RIVALS: dict[str, Rival] = {
    **BANK_RIVALS,
    "GP, sigmoidal mean": gaussian_process,
    "ARIMA": arima,
    "POW4": partial(wald, POW4),
    "MMF4": partial(wald, MMF4),
    "11 curves": eleven,
}


def simulated(kind: str, rng: np.random.Generator, source: str) -> Points:
    """Return a simulated run of one kind, up to compute 1,000."""
    n = round(float(np.exp(rng.uniform(np.log(6), np.log(60)))))
    compute_N = np.linspace(0, 1000, n + 1)[int(rng.integers(2)) :]
    gain, r0 = float(rng.uniform(0.1, 0.4)), float(rng.uniform(0.1, 0.5))
    sd, mid, b = (
        gain / float(np.exp(rng.uniform(np.log(2), np.log(50)))),
        1000 / rng.uniform(1, 6),
        rng.uniform(1, 2.5),
    )
    curve = Curve(LOG_LOGISTIC, 1.0 if kind == "A = 1" else r0 + gain, b, mid, r0)
    mean_N = curve(compute_N)
    if kind == "Weibull":
        mean_N = Curve(Weibull(), r0 + gain, rng.uniform(0.6, 1.5), mid, r0)(compute_N)
    elif kind == "two speeds":
        slow = Curve(LOG_LOGISTIC, r0 + gain, b, mid * rng.uniform(4, 10), r0)
        share = rng.uniform(0.3, 0.7)
        mean_N = share * curve(compute_N) + (1 - share) * slow(compute_N)
    elif kind == "delayed start":
        mean_N = curve(np.maximum(compute_N - rng.uniform(0.1, 0.3) * 1000, 0))
    elif kind == "decline":
        at = rng.uniform(0.3, 0.7) * 1000
        mean_N = mean_N - gain * rng.uniform(0.2, 1.0) * np.maximum(compute_N - at, 0) / (1000 - at)
    elif kind == "flat":
        mean_N = np.full(len(compute_N), r0)
    noise_N = ar1(rng.normal(0, sd, len(compute_N)), float(rng.choice([0.0, 0.25, 0.5])))
    return Points.from_arrays(compute_N, np.clip(mean_N + noise_N, 0, 1), source=source)


def runs_of(args: argparse.Namespace) -> list[Points]:
    if args.folder is None:
        found = []
        for i in range(args.runs):
            kind = KINDS[i % len(KINDS)]
            found.append(simulated(kind, np.random.default_rng([args.seed, i]), f"{kind} {i // len(KINDS)}"))
        return found
    found = []
    for place in sorted(place for place in args.folder.iterdir() if not place.name.startswith(".")):
        try:
            found += [data.points for data in read_all(place, args.x, ReadOptions(args.y), None)]
        except InputError as error:
            print(f"left out: {error}", file=sys.stderr)
    return found


def fell(cut: Cut) -> bool:
    """Return whether the run ended more than .1 below its last evaluation before the cut."""
    later = cut.later
    last_M = None if later is None else later.point_M.get("last value, other runs")
    return later is not None and last_M is not None and bool(later.pass_rate_M[-1] < last_M[-1] - 0.1)


def each(test: Backtest) -> None:
    """Print our forecast of the end of every run, and whether its interval held."""
    print("\n| run | cut | evaluations | outcome | forecast | 95 % interval | measured | |")
    print("|---|---|---|---|---|---|---|---|")
    for cut in test.cuts:
        line = f"| {Path(cut.source).stem} | {cut.fraction:g} | {cut.n_fitted} | {cut.outcome} |"
        if cut.later is None or OURS not in cut.later.point_M:
            print(f"{line} {cut.why} | | | |")
            continue
        later, end = cut.later, int(np.argmax(cut.later.compute_M))
        low, high, y = later.low_M[OURS][end], later.high_M[OURS][end], later.pass_rate_M[end]
        held = "inside" if low <= y <= high else "outside"
        print(f"{line} {later.point_M[OURS][end]:.3f} | [{low:.3f}, {high:.3f}] | {y:.3f} | {held} |")


def kinds(test: Backtest) -> None:
    """Print coverage and width of our intervals at the end, by the kind of the simulated run."""
    print("\n| kind | " + " | ".join(f"inside at {f:g} | width" for f in FRACTIONS) + " |")
    print("|---|" + "---|---|" * len(FRACTIONS))
    for kind in KINDS:
        cells = []
        for fraction in FRACTIONS:
            cuts = tuple(cut for cut in test.cuts if cut.source.rpartition(" ")[0] == kind)
            score = replace(test, cuts=cuts).interval_score(OURS, fraction, end=True)
            cells += [f"{score.coverage:.2f} of {score.runs}", f"{score.width:.3f}"] if score else ["", ""]
        print(f"| {kind} | " + " | ".join(cells) + " |")


def progress(done: int, to_do: int) -> None:
    if done % 10 == 0 or done == to_do:
        print(f"{done} of {to_do} cuts", file=sys.stderr, flush=True)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--x", default=None, help="compute axis, or column of the tables")
    parser.add_argument("--y", default=None, help="column or metric with the pass rates")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=28, help="simulated runs, of seven kinds in turn")
    parser.add_argument("--each", action="store_true", help="our forecasts of every run")
    args = parser.parse_args(words)
    start = time.perf_counter()
    with np.errstate(all="ignore"):  # SciPy may overflow on its way to a minimum
        test = backtest(runs_of(args), fractions=FRACTIONS, rivals=RIVALS, watch=progress)
    print(Bank(test))
    if args.folder is None:
        kinds(test)
        cuts = tuple(cut for cut in test.cuts if not cut.source.startswith("decline"))
        print(f"\nwithout the declines, which no saturating curve has\n{Bank(replace(test, cuts=cuts))}")
    else:
        cuts = tuple(cut for cut in test.cuts if not fell(cut))
        left_out = f"{len(test.cuts) - len(cuts)} of {len(test.cuts)} cuts"
        print(f"\nwithout {left_out}, after which the run fell by more than .1")
        print(Bank(replace(test, cuts=cuts)))
    if args.each:
        each(test)
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
