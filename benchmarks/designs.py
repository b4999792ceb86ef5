"""Do the intervals of factorials and of allocations hold, how often are verdicts false, what is found?

    python benchmarks/designs.py [--studies 60] [--seed 0]

Runs are known by normal posteriors of A, log B and log C_mid, with sd .006, .05 and .04 (allocation: .004,
.05 and .03), and seeds differ as the prior has it, all of it within their block: sharing one does not help
here. Effects are normal in a random third of the switches and of the interactions, with the sd that is given
in A, and eight times that in log C_mid. `large ones found` is the share of verdicts among main effects above
.024 in A or .19 in log C_mid; `any false verdict` the share of studies with one that is wrong, if only in
its sign.

In the grids a larger n has a higher ceiling up to a point, later; the best P is 32. `width` is the ratio of
the ends of the interval of n, in the median; `growth` how often it is told, and how often it is then covered.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scalerl.curve import FAMILIES, SEED_PRIOR
from scalerl.curve.posterior import Draws
from scalerl.forecast.effects import Moments, effects_of
from scalerl.forecast.splits.allocation import GridRun, allocate
from scalerl.study.design import Resolution, alias_chains, columns, levels

SD, GRID_SD = np.array([0.006, 0.05, 0.04]), np.array([0.004, 0.05, 0.03])
PARAMETERS = ((0, "A", 1.0), (2, "log_C_mid", 8.0))
ACTIVE, LARGE = 1 / 3, 0.024


@dataclass(frozen=True)
class Study:
    """Switches, resolution, seeds of every arm, sd of the effects in A, and the share of runs missing."""

    switches: int
    resolution: Resolution
    seeds: int
    main: float
    interaction: float
    missing: float = 0.0


STUDIES = (
    Study(4, 4, 2, 0.0, 0.0),
    Study(4, 4, 1, 0.03, 0.01),
    Study(4, 4, 2, 0.03, 0.01),
    Study(7, 4, 1, 0.03, 0.01),
    Study(7, 4, 2, 0.03, 0.01),
    Study(7, 4, 2, 0.03, 0.01, 0.15),
    Study(5, 5, 2, 0.03, 0.01),
)


def design_of(study: Study) -> dict[str, Any]:
    m, columns_F = columns(study.switches, study.resolution)
    names = [f"s{i}" for i in range(study.switches)]
    rows = levels(m, columns_F)
    chains = [[[names[a], names[b]] for a, b in chain] for chain in alias_chains(columns_F)]
    return {"factors": names, "levels": {f"arm{r}": row for r, row in enumerate(rows)}, "aliases": chains}


def simulated(study: Study, design: dict[str, Any], rng: np.random.Generator) -> Iterator[tuple[bool, ...]]:
    """Of every effect: is it main, large, covered, found, and falsely so."""
    arm_R = [arm for arm in design["levels"] for _ in range(study.seeds)]
    seed_R = np.tile(np.arange(study.seeds), len(design["levels"]))
    x_RF = 2 * np.array([design["levels"][arm] for arm in arm_R]) - 1
    mean_R3, truth = np.zeros((len(arm_R), 3)), {}
    for j, name, unit in PARAMETERS:
        main_F = unit * study.main * rng.normal(size=study.switches)
        main_F *= rng.random(study.switches) < ACTIVE
        y_R, sums = 0.5 * x_RF @ main_F, []
        for chain in design["aliases"]:
            places = [[design["factors"].index(name) for name in pair] for pair in chain]
            size = unit * study.interaction * rng.normal(size=len(chain)) * (rng.random(len(chain)) < ACTIVE)
            for one, (a, b) in zip(size, places, strict=True):
                y_R = y_R + 0.5 * one * x_RF[:, a] * x_RF[:, b]
            sums.append(size.sum())
        tau = SEED_PRIOR.median_3[j] * np.exp(SEED_PRIOR.log_sd * rng.normal())
        mean_R3[:, j] = y_R + tau * rng.normal(size=len(arm_R)) + SD[j] * rng.normal(size=len(arm_R))
        truth[name] = np.concatenate([main_F, sums])
    keep = np.flatnonzero(rng.random(len(arm_R)) >= study.missing)
    given = [Moments(1.0, mean_R3[keep], np.tile(SD, (len(keep), 1)))]
    answer = effects_of(given, [arm_R[i] for i in keep], seed_R[keep].tolist(), design)
    for on, (_, name, unit) in zip(answer.on, PARAMETERS, strict=True):
        for effect, value in zip(on.effects, truth[name], strict=True):
            found = effect.verdict != "not distinguishable"
            covered = effect.interval[0] <= value <= effect.interval[1]
            large = abs(value) > LARGE * unit
            yield effect.is_main, large, covered, found, found and value * effect.median <= 0


def factorial_row(study: Study, studies: int, seed: int) -> str:
    rng, design = np.random.default_rng(seed), design_of(study)
    every = [np.array(list(simulated(study, design, rng))) for _ in range(studies)]
    main, large, covered, found, _ = np.vstack(every).T
    false = np.mean([one[:, 4].any() for one in every])
    share = f"{found[main & large].mean():.2f}" if (main & large).any() else "-"
    size = f"{study.main:g} | {study.interaction:g}" if study.main else "0 | 0"
    return (
        f"| {study.switches} | {study.resolution} | {len(design['levels'])} x {study.seeds} | {size} | "
        f"{study.missing:.0%} | {covered[main].mean():.3f} | {covered[~main].mean():.3f} | {false:.3f} | "
        f"{share} |"
    )


@dataclass(frozen=True)
class Grid:
    """Batches, seeds of each, and the surface: C_mid as n^later, A by log n and its square."""

    name: str
    prompts: tuple[int, ...]
    samples: tuple[int, ...]
    seeds: int
    later: float
    rise: float
    fall: float

    def theta(self, prompts: float, samples: Any) -> np.ndarray:
        """A, log B and log C_mid of the recipe with this batch."""
        v, u = np.log(samples / 16), np.log(prompts / 32)
        A = 0.6 + self.rise * v - self.fall * v**2 - (0.02 * u**2 if self.rise else 0.0)
        return np.array([A, np.log(1.9) + 0 * v, np.log(2500) + self.later * v])

    def best(self) -> np.ndarray:
        """The best n at every budget."""
        fine = np.geomspace(self.samples[0], self.samples[-1], 4000)
        A, log_b, log_mid = self.theta(32, fine)
        share = [1 / (1 + np.exp(-np.exp(log_b) * (np.log(c) - log_mid))) for c in BUDGETS]
        return np.array([fine[np.argmax(0.3 + (A - 0.3) * s)] for s in share])


BUDGETS = (2500.0, 3500.0, 5000.0, 7000.0, 10000.0)
WIDE, NARROW = (2, 4, 8, 16, 32, 64, 128, 256), (4, 8, 16, 32, 64)
GRIDS = (
    Grid("moves", (32,), WIDE, 1, 0.4, 0.08, 0.03),
    Grid("moves", (32,), WIDE, 3, 0.4, 0.08, 0.03),
    Grid("moves", (16, 32, 64), WIDE, 1, 0.4, 0.08, 0.03),
    Grid("moves, small grid", (16, 32, 64), NARROW, 1, 0.5, 0.06, 0.03),
    Grid("flat", (16, 32, 64), NARROW, 1, 0.0, 0.0, 0.0),
    Grid("beyond the edge", (16, 32, 64), NARROW, 1, 0.0, 0.04, 0.0),
)


def runs_of(grid: Grid, rng: np.random.Generator, n: int = 400) -> list[GridRun]:
    tau_3 = SEED_PRIOR.median_3 * np.exp(SEED_PRIOR.log_sd * rng.normal(size=3))
    runs = []
    for p in grid.prompts:
        for s in np.repeat(grid.samples, grid.seeds):
            centre_3 = grid.theta(p, s) + tau_3 * rng.normal(size=3) + GRID_SD * rng.normal(size=3)
            theta_3n = centre_3[:, None] + GRID_SD[:, None] * rng.normal(size=(3, n))
            A_n, log_b_n, log_mid_n = theta_3n
            draws = Draws(FAMILIES, np.zeros(n, dtype=int), A_n, log_b_n, log_mid_n, np.full(n, 0.3))
            runs.append(GridRun(p, int(s), draws, BUDGETS[-1]))
    return runs


def allocation_row(grid: Grid, studies: int, seed: int) -> str:
    rng, best = np.random.default_rng(seed), grid.best()
    slope = np.polyfit(np.log(BUDGETS), np.log(best), 1)[0]
    covered, widths, kinds, growth = [], [], [], []
    for _ in range(studies):
        answer = allocate(runs_of(grid, rng), 1.0, budgets=BUDGETS)
        for at, truth in zip(answer.budgets, best, strict=True):
            assert at.samples is not None
            low, high = at.samples.interval
            covered.append(low <= truth * 1.001 and truth <= high * 1.001)
            widths.append(high / low)
            kinds.append(0 if not at.samples.tells else 1 if at.samples.at_low or at.samples.at_high else 2)
        told = next(one for one in answer.growth if one.of == "samples").interval
        if told is not None:
            growth.append(told[0] <= slope <= told[1])
    share = [np.mean(np.array(kinds) == kind) for kind in (2, 1, 0)]
    holds = f"{len(growth) / studies:.2f}, {np.mean(growth):.2f}" if growth else "0, -"
    flat = grid.rise == 0
    return (
        f"| {grid.name} | {len(grid.prompts)} x {len(grid.samples)} x {grid.seeds} | "
        f"{'any' if flat else f'{best[0]:.0f} to {best[-1]:.0f}'} | "
        f"{'-' if flat else f'{np.mean(covered):.2f}'} | "
        f"{np.median(widths):.1f} | {share[0]:.2f} | {share[1]:.2f} | {share[2]:.2f} | {holds} |"
    )


def table(heads: Sequence[str], rows: Iterator[str]) -> None:
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|", flush=True)
    for row in rows:
        print(row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--studies", type=int, default=60, help="simulated studies for every row")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    heads = "switches, resolution, arms x seeds, sd of effects, of interactions, runs missing, "
    heads += "main effects covered, interactions covered, any false verdict, large ones found"
    table(heads.split(", "), (factorial_row(study, args.studies, args.seed) for study in STUDIES))
    print()
    heads = "surface, P x n x seeds, best n, covered, width, told, at least or at most, cannot tell, "
    heads += "growth told and covered"
    table(heads.split(", "), (allocation_row(grid, args.studies, args.seed) for grid in GRIDS))


if __name__ == "__main__":
    main()
