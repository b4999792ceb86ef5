"""Which point stands best beside the intervals? Rules for the forecast of R(C) and for the ceiling A.

    python benchmarks/point.py [--runs 40] [--seed 0] [--real RUN ...] [--x flops] [--ceiling .82]

Simulated runs (benchmarks/simulation.py: to 6 C_mid, gain .20-.35, noise sd .0045-.010, AR(1) 0-.8; and a
power law besides) are fitted on the first 1/4, 1/2 and 3/4 of their compute, and every rule points at the
mean curve at the end and at A. Real runs are held against their last evaluation, and against `--ceiling`
where it is known. Errors are in thousandths of pass rate: median of |error| / rms / bias. Of the rows that
pool, `all` weighs every cut alike.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from scalerl.curve import FAMILIES, Fit, Points, PowerLaw, fit
from scalerl.curve.least_squares import least_squares
from scalerl.curve.sample import make_sample
from scalerl.errors import CannotAnswerError
from scalerl.record.reader import RunRecord
from simulation import CELLS, FRACTIONS, TRUTHS, Truth, simulate

N_DRAWS = 2048
SHAPES = (*TRUTHS, Truth("power law", PowerLaw(), 0.8))


@dataclass(frozen=True)
class Known:
    """What a cut is compared with: the pass rate at compute `end`, and the ceiling (NaN if unknown)."""

    end: float
    pass_rate: float
    ceiling: float


@dataclass(frozen=True)
class Candidates:
    """What the rules combine: n draws and F families; an axis of 2 is (R at the end, A)."""

    draws_n2: np.ndarray
    family_n: np.ndarray
    best_F2: np.ndarray
    evidence_F: np.ndarray
    likelihood_F: np.ndarray
    """Weights by maximised likelihood; all families have the same number of parameters."""

    def given_family(self, middle: Callable[..., np.ndarray]) -> np.ndarray:
        """Return mean or median of each family's draws, (F, 2), or its least squares if it has no draws."""
        chosen = [self.draws_n2[self.family_n == f] for f in range(len(self.best_F2))]
        pairs = zip(chosen, self.best_F2, strict=True)
        return np.array([middle(draws, axis=0) if len(draws) else best for draws, best in pairs])


RULES: dict[str, Callable[[Candidates], np.ndarray]] = {
    "posterior mean": lambda c: c.draws_n2.mean(axis=0),
    "posterior median": lambda c: np.median(c.draws_n2, axis=0),
    "log-logistic LS": lambda c: c.best_F2[0],
    "equal-weight LS": lambda c: c.best_F2.mean(axis=0),
    "evidence-weight LS": lambda c: c.evidence_F @ c.best_F2,
    "likelihood x mean": lambda c: c.likelihood_F @ c.given_family(np.mean),
    "likelihood x median": lambda c: c.likelihood_F @ c.given_family(np.median),
}


def candidates(points: Points, result: Fit, end: float) -> Candidates:
    draws = result.posterior.draws(N_DRAWS)
    sample = make_sample(points, None)
    found = [least_squares(sample, family) for family in FAMILIES]
    n_effective = len(points) * (1 - result.noise.phi) / (1 + result.noise.phi)
    log_F = -0.5 * n_effective * np.log([best.rss for best in found])
    likelihood_F = np.exp(log_F - log_F.max())
    return Candidates(
        np.stack([draws.curves_at(np.array([end]))[:, 0], draws.A_n], axis=1),
        draws.family_n,
        np.array([(float(best.curve(end)), best.curve.A) for best in found]),
        np.array([result.families[family.name] for family in FAMILIES]),
        likelihood_F / likelihood_F.sum(),
    )


class Table:
    """Errors of every rule by (row, fraction), each (rules, 2), and whether the ceiling was identified."""

    def __init__(self) -> None:
        self.errors: dict[tuple[str, float], list[np.ndarray]] = defaultdict(list)
        self.identified: dict[tuple[str, float], list[bool]] = defaultdict(list)
        self.unanswered: dict[str, int] = defaultdict(int)

    def add(self, row: str, points: Points, known: Known) -> None:
        """Fit every cut of one run."""
        for fraction in FRACTIONS:
            early = points.select(points.compute_N <= fraction * known.end * (1 + 1e-9))
            try:
                result = fit(early)
            except CannotAnswerError:
                self.unanswered[f"{row} {fraction:g}"] += 1
                continue
            found, truth = candidates(early, result, known.end), np.array([known.pass_rate, known.ceiling])
            self.errors[row, fraction].append(np.stack([rule(found) - truth for rule in RULES.values()]))
            self.identified[row, fraction].append(result.identified)

    def show(self, of: int, what: str) -> None:
        """Print the errors of R at the end (0) or of A (1)."""
        print(f"\n{what}: median |error| / rms / bias, in thousandths")
        print(f"{'truth':<14}{'cut':>5}{'cuts':>6}{'identified':>11}  " + "".join(f"{r:<23}" for r in RULES))
        for (row, fraction), errors in sorted(self.errors.items(), key=lambda item: item[0][1]):
            known = f"{np.mean(self.identified[row, fraction]):.2f}"
            print(f"{row:<14}{fraction:>5g}{len(errors):>6}{known:>11}  {cells(errors, of)}")
        pooled = [
            pair for key in self.errors for pair in zip(self.errors[key], self.identified[key], strict=True)
        ]
        for title, want in (("all", (False, True)), ("too early", (False,)), ("identified", (True,))):
            errors = [error for error, known in pooled if known in want]
            if errors:
                print(f"{title:<14}{'':>5}{len(errors):>6}{'':>11}  {cells(errors, of)}")


def cells(errors: list[np.ndarray], of: int) -> str:
    thousandths = 1000 * np.array(errors)[:, :, of]
    columns = zip(
        np.median(np.abs(thousandths), axis=0),
        np.sqrt(np.mean(thousandths**2, axis=0)),
        thousandths.mean(axis=0),
        strict=True,
    )
    return "".join(f"{f'{middle:.1f} / {rms:.1f} / {bias:+.1f}':<23}" for middle, rms, bias in columns)


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
        real.add("real", points, Known(points.compute_N[-1], points.pass_rate_N[-1], args.ceiling))
    for index, shape in enumerate(SHAPES):
        rng = np.random.default_rng([args.seed, index])
        for _ in range(args.runs):
            run = simulate(replace(CELLS[rng.integers(len(CELLS))], truth=shape), rng)
            known = Known(float(run.compute_N[-1]), float(run.mean_N[-1]), run.A)
            simulated.add(shape.name, run.first(1.0), known)
    for table in (real, simulated):
        if table.errors:
            table.show(0, "R at the end")
            table.show(1, "A")
            print("no answer:", dict(table.unanswered))


if __name__ == "__main__":
    main()
