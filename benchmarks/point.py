"""Which point stands best beside the intervals? Rules for the forecast of R(C) and for the ceiling A.

    python benchmarks/point.py [--runs 40] [--seed 0] [--real RUN ...] [--x flops] [--ceiling .82]

Simulated runs of six shapes (R_0 .20-.40, A .55-.85, noise sd .0045-.01 with AR(1) 0-.5, 30-48 evaluations
and one at step 0, to 1.5-6 C_mid), and of curves as published (arXiv 2510.13786: log-logistic, A .49-.645, B
1.4-2.1, R_0 .40, noise sd .0033-.006 with AR(1) 0-.4, an evaluation every .06-.10 C_mid, to 3-6 C_mid), are
fitted on the first 1/8, 1/4, 1/2 and 3/4 of their compute; every rule then forecasts the mean curve at the
end, and A. Real runs are held against their last evaluation, and against `--ceiling` where it is known.
Errors are in thousandths of pass rate: median of |error| / rms / bias.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scalerl.curve import (
    FAMILIES,
    Curve,
    Family,
    Fit,
    Frechet,
    Gompertz,
    LogLogistic,
    Points,
    PowerLaw,
    Weibull,
    fit,
)
from scalerl.curve.least_squares import least_squares
from scalerl.curve.sample import make_sample
from scalerl.errors import CannotAnswerError
from scalerl.record import RunRecord

FRACTIONS = (1 / 8, 1 / 4, 1 / 2, 3 / 4)
N_DRAWS = 4096


@dataclass(frozen=True)
class Shape:
    """A family of true curves, and how they are evaluated; pairs are ranges, drawn from uniformly."""

    family: Family
    B: tuple[float, float]
    A: tuple[float, float] = (0.55, 0.85)
    R_0: tuple[float, float] = (0.2, 0.4)
    sd: tuple[float, float] = (0.0045, 0.010)
    phi: tuple[float, float] = (0.0, 0.5)
    ratio: tuple[float, float] = (1.5, 6.0)
    spacing: tuple[float, float] | None = None
    """Between evaluations, in C_mid; None for 30 to 48 of them."""


TRUTHS = {
    "published": Shape(
        LogLogistic(), (1.4, 2.1), (0.49, 0.645), (0.4, 0.4), (0.0033, 0.006), (0, 0.4), (3, 6), (0.06, 0.10)
    ),
    "log_logistic": Shape(LogLogistic(), (1.2, 2.2)),
    "weibull .75": Shape(Weibull(), (0.75, 0.75)),
    "weibull 1.4": Shape(Weibull(), (1.4, 1.4)),
    "frechet": Shape(Frechet(), (1.0, 2.0)),
    "gompertz": Shape(Gompertz(), (1.5, 3.0)),
    "power law": Shape(PowerLaw(), (0.5, 1.2)),
}


@dataclass(frozen=True)
class Truth:
    """What a cut is held against: the pass rate at compute `end`, and the ceiling (NaN if not known)."""

    end: float
    pass_rate: float
    ceiling: float


@dataclass(frozen=True)
class Candidates:
    """What the rules combine, first axis (R at the end, A): draws, least squares and weights by family."""

    draws_2n: np.ndarray
    best_2F: np.ndarray
    weight_F: np.ndarray


RULES: dict[str, Callable[[Candidates], np.ndarray]] = {
    "posterior mean": lambda c: c.draws_2n.mean(axis=1),
    "posterior median": lambda c: np.median(c.draws_2n, axis=1),
    "log-logistic LS": lambda c: c.best_2F[:, 0],
    "equal-weight LS": lambda c: c.best_2F.mean(axis=1),
    "evidence-weight LS": lambda c: c.best_2F @ c.weight_F,
    "mean, half LS": lambda c: (c.draws_2n.mean(axis=1) + c.best_2F[:, 0]) / 2,
}


def candidates(points: Points, result: Fit, end: float) -> Candidates:
    draws = result.posterior.draws(N_DRAWS)
    sample = make_sample(points, None)
    curves = [least_squares(sample, family).curve for family in FAMILIES]
    return Candidates(
        np.stack([draws.curves_at(np.array([end]))[:, 0], draws.A_n]),
        np.array([[float(curve(end)) for curve in curves], [curve.A for curve in curves]]),
        np.array([result.families[family.name] for family in FAMILIES]),
    )


def simulate(shape: Shape, rng: np.random.Generator) -> tuple[Points, Truth]:
    truth = Curve(shape.family, rng.uniform(*shape.A), rng.uniform(*shape.B), 1000.0, rng.uniform(*shape.R_0))
    sd, phi, ratio = rng.uniform(*shape.sd), rng.uniform(*shape.phi), rng.uniform(*shape.ratio)
    n = round(ratio / rng.uniform(*shape.spacing)) if shape.spacing else int(rng.integers(30, 49))
    compute_N = np.linspace(0, 1000.0 * ratio, n + 1)
    noise_N = rng.normal(0, sd, n + 1)
    for i in range(1, n + 1):
        noise_N[i] = phi * noise_N[i - 1] + np.sqrt(1 - phi**2) * noise_N[i]
    points = Points.from_arrays(compute_N, np.clip(truth(compute_N) + noise_N, 0, 1))
    end = float(compute_N[-1])
    return points, Truth(end, float(truth(end)), truth.A)


class Table:
    """Errors by (row, fraction), of every rule; `identified` counts the cuts whose ceiling was."""

    def __init__(self) -> None:
        self.errors: dict[tuple[str, float], list[np.ndarray]] = defaultdict(list)
        self.identified: dict[tuple[str, float], list[bool]] = defaultdict(list)
        self.unanswered: dict[tuple[str, float], int] = defaultdict(int)

    def add(self, row: str, points: Points, truth: Truth) -> None:
        """Fit every cut of one run, and note the errors of every rule, shape (rules, 2)."""
        for fraction in FRACTIONS:
            early = points.select(points.compute_N <= fraction * truth.end * (1 + 1e-9))
            try:
                result = fit(early)
            except CannotAnswerError:
                self.unanswered[row, fraction] += 1
                continue
            found = candidates(early, result, truth.end)
            known = np.array([truth.pass_rate, truth.ceiling])
            self.errors[row, fraction].append(np.stack([rule(found) - known for rule in RULES.values()]))
            self.identified[row, fraction].append(result.identified)

    def show(self, of: int, what: str) -> None:
        """Print the errors of R at the end (0) or of A (1)."""
        print(f"\n{what}: median |error| / rms / bias, in thousandths")
        print(f"{'truth':<13} {'cut':>5} {'n':>4} {'known':>5}  " + "".join(f"{r:<24}" for r in RULES))
        for (row, fraction), errors in sorted(self.errors.items(), key=lambda item: item[0][1]):
            cells = "".join(f"{summary(np.array(errors)[:, i, of]):<24}" for i in range(len(RULES)))
            known = np.mean(self.identified[row, fraction])
            print(f"{row:<13} {fraction:>5g} {len(errors):>4} {known:>5.2f}  {cells}")
        for title, want in (("all", (False, True)), ("too early", (False,)), ("identified", (True,))):
            kept = [
                error
                for key, errors in self.errors.items()
                for error, known in zip(errors, self.identified[key], strict=True)
                if known in want
            ]
            cells = "".join(f"{summary(np.array(kept)[:, i, of]):<24}" for i in range(len(RULES)))
            print(f"{title:<13} {'':>5} {len(kept):>4} {'':>5}  {cells}")


def summary(error: np.ndarray) -> str:
    error = 1000 * error
    return f"{np.median(np.abs(error)):.1f} / {np.sqrt(np.mean(error**2)):.1f} / {error.mean():+.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=40, help="simulated runs of each shape")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real", type=Path, nargs="*", default=[], help="run folders")
    parser.add_argument("--x", default="flops", help="compute axis of the run folders")
    parser.add_argument("--ceiling", type=float, default=np.nan, help="known ceiling of the run folders")
    args = parser.parse_args()
    real, simulated = Table(), Table()
    for folder in args.real:
        points = Points.from_record(RunRecord.read(folder), args.x)
        last = Truth(float(points.compute_N[-1]), float(points.pass_rate_N[-1]), args.ceiling)
        real.add("real", points, last)
    for index, (name, shape) in enumerate(TRUTHS.items()):
        rng = np.random.default_rng([args.seed, index])
        for _ in range(args.runs):
            simulated.add(name, *simulate(shape, rng))
    for table in (real, simulated):
        if table.errors:
            table.show(0, "R at the end")
            table.show(1, "A")
            print("no answer:", {f"{row} {cut:g}": n for (row, cut), n in table.unanswered.items()})


if __name__ == "__main__":
    main()
