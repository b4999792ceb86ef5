"""What stopping hopeless trials by their forecasts is worth in a sweep, beside ASHA and the median rule.

    python benchmarks/sweep.py [--studies 200] [--seed 0] [--jobs 2]

Simulated studies of 20 trials, all pruners on the same ones, each in a real Optuna study with a random
sampler. A study has one base model (R_0 .2-.4) and evaluation set (noise sd .0045-.010), and evaluates every
trial 25 to 40 times on its way to its end. A trial has a shape of benchmarks/simulation.py (one of them is
none of the families that are fitted, one wanders), its own gain (.05-.35), C_mid (end / 10 to end /
1.5, log-uniform) and noise correlation (0-.8). Gain and C_mid are independent, so that curves cross.
`one after another` runs a trial when the one before has ended; `four at a time` keeps four running.

A trial that is not pruned returns its last evaluation, and the largest is chosen, as Optuna does. `budget` is
the share of the compute of all whole trials that was used; `regret` the true pass rate at the end of the
best trial less that of the chosen one, in points of a hundred; `best kept` the share of studies whose best
trial was not pruned, with its 95 % interval (Wilson); other errors are standard errors over studies. `budget
at a regret` is read off every pruner's frontier, from pruning nothing on, interpolated; 1.00 where it has no
such regret below the whole budget.
A study takes 8 to 11 seconds of a core; all 200 about a quarter of an hour on two that are free.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import multiprocessing
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import optuna

from scalerl.curve import Curve, Points
from scalerl.curve.answers import MIN_EVALUATIONS
from scalerl.curve.fit import fit
from scalerl.errors import CannotAnswerError
from scalerl.integrations.optuna import ForecastPruner
from scalerl.integrations.rule import UNKNOWN, Reach, Rule, Sweep, Values
from simulation import PHIS, SDS, TRUTHS, drift, noise

TRIALS, END = 20, 4800
EVALUATIONS = (25, 40)
GAIN, MID = (0.05, 0.35), (1 / 10, 1 / 1.5)
"""Ranges of a trial's gain and of its C_mid as a share of the end."""
OPTIONS = ((0.0, 0.95), (-0.02, 0.95), (0.02, 0.95), (0.0, 0.8), (0.0, 0.5))
"""Margin and level of the forecasts; the first are the defaults."""
REGRETS, ALIKE = (0.002, 0.005, 0.01), 0.0001
"""Regrets at which budgets are read; regrets that differ by at most `ALIKE` count as equal."""
ORDERS = {"one after another": 1, "four at a time": 4}
OURS = ("forecast, margin 0, level 0.95", "early forecast, margin 0, level 0.95")


@dataclass(frozen=True)
class Trials:
    """The trials of a study: steps (N,), true curves and measured pass rates (TRIALS, N)."""

    step_N: np.ndarray
    mean_TN: np.ndarray
    pass_rate_TN: np.ndarray


@dataclass(frozen=True)
class Outcome:
    budget: float
    regret: float
    kept: bool


def draw(rng: np.random.Generator) -> Trials:
    n = int(rng.integers(EVALUATIONS[0], EVALUATIONS[1] + 1))
    step_N = np.round(np.linspace(0, END, n + 1)).astype(int)
    if rng.random() < 0.5:
        step_N = step_N[1:]
    r0, sd = float(rng.uniform(0.2, 0.4)), float(rng.choice(SDS))
    mean, measured = [], []
    for _ in range(TRIALS):
        truth = TRUTHS[rng.integers(len(TRUTHS))]
        mid = END * float(np.exp(rng.uniform(*np.log(MID))))
        curve = Curve(truth.family, r0 + float(rng.uniform(*GAIN)), truth.B, mid, r0)
        mean_N = curve(step_N) + (drift(step_N / mid, rng) if truth.drift else 0.0)
        mean.append(mean_N)
        measured.append(mean_N + noise(len(step_N), sd, float(rng.choice(PHIS)), rng, int(step_N[0] == 0)))
    return Trials(step_N, np.array(mean), np.clip(measured, 0, 1))


class SharedSweep(Sweep):
    """A sweep that reuses the fits of others on the same trials, as fits depend only on the data."""

    def __init__(self, rule: Rule, made: dict[tuple[Hashable, int], dict[Rule, Reach]]) -> None:
        super().__init__(rule)
        self._made = made

    def reach(self, trial: Hashable, values: Values) -> Reach:
        """Return the reach of a trial as `Sweep.reach` does, from a shared fit."""
        seen = self.rule.looked_at(values)
        key = trial, len(seen)
        if key not in self._made:
            self._made[key] = _reaches(self.rule.points(seen))
        return self._made[key][self.rule]


RULES = [Rule(END, margin, level, early=early) for margin, level in OPTIONS for early in (False, True)]


def _reaches(points: Points) -> dict[Rule, Reach]:
    """Return what every rule says of a trial, from one fit."""
    if len(points) < MIN_EVALUATIONS:
        return dict.fromkeys(RULES, UNKNOWN)
    try:
        result = fit(points)
    except CannotAnswerError:
        return dict.fromkeys(RULES, UNKNOWN)
    return {rule: rule.reach_of(result) for rule in RULES}


def pruners() -> dict[str, dict[str, optuna.pruners.BasePruner]]:
    """Return the pruners by method and setting; the first of a method is its default, or ours."""
    asha, median, ours, early = {}, {}, {}, {}
    for factor, first in itertools.product((4, 2), (16, 8, 4, 2)):
        name = f"ASHA, factor {factor}, from 1/{first}"
        asha[name] = optuna.pruners.SuccessiveHalvingPruner(END // first, factor)
    for percent, first in itertools.product((50, 75), (0, 4, 2)):
        kept = "median" if percent == 50 else f"best {percent} %"
        name = f"{kept}, from {f'1/{first}' if first else 'the start'}"
        warmup = END // first if first else 0
        median[name] = optuna.pruners.PercentilePruner(float(percent), n_warmup_steps=warmup)
    for margin, level in OPTIONS:
        name = f"margin {margin:g}, level {level:g}"
        ours[f"forecast, {name}"] = ForecastPruner(END, margin=margin, level=level)
        early[f"early forecast, {name}"] = ForecastPruner(END, margin=margin, level=level, early=True)
    return {"none": {"none": optuna.pruners.NopPruner()}, "ASHA": asha, "median": median} | {
        "forecast": ours,
        "early forecast": early,
    }


def sweep(trials: Trials, pruner: optuna.pruners.BasePruner, at_a_time: int) -> Outcome:
    """Run a study with `at_a_time` trials side by side, which evaluate in turn."""
    sampler = optuna.samplers.RandomSampler(seed=0)
    study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)
    waiting = TRIALS
    running: dict[int, optuna.Trial] = {}
    used = 0
    while waiting or running:
        while waiting and len(running) < at_a_time:
            trial = study.ask()
            running[trial.number], waiting = trial, waiting - 1
        for number, trial in list(running.items()):
            i = len(study.get_trials(deepcopy=False)[number].intermediate_values)
            trial.report(trials.pass_rate_TN[number, i], int(trials.step_N[i]))
            if i + 1 == len(trials.step_N):
                study.tell(trial, trials.pass_rate_TN[number, i])
            elif trial.should_prune():
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            else:
                continue
            used += int(trials.step_N[i])
            del running[number]
    end_T = trials.mean_TN[:, -1]
    complete = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    best = int(np.argmax(end_T))
    regret = (
        float(end_T[best] - end_T[study.best_trial.number]) if complete else float(end_T[best] - end_T.min())
    )
    return Outcome(used / (TRIALS * END), regret, best in {trial.number for trial in complete})


def study_of(seed: int, index: int) -> dict[tuple[str, str], Outcome]:
    """Return the outcomes of one study, by order and setting."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    trials = draw(np.random.default_rng([seed, index]))
    made: dict[tuple[Hashable, int], dict[Rule, Reach]] = {}
    found = {}
    for order, at_a_time in ORDERS.items():
        for name, pruner in itertools.chain(*(settings.items() for settings in pruners().values())):
            if isinstance(pruner, ForecastPruner):
                pruner.sweep = SharedSweep(pruner.sweep.rule, made)
            found[order, name] = sweep(trials, pruner, at_a_time)
    return found


def budget_at(regret: float, points: list[tuple[float, float]], whole: tuple[float, float]) -> float:
    """Return the least budget on the frontier of (budget, regret) with a mean regret of at most `regret`."""
    best = 1.0
    for (b0, r0), (b1, r1) in itertools.product([*points, whole], repeat=2):
        if r0 <= regret:
            best = min(best, b0)
            if r1 > regret and b1 < b0:  # mix the two settings over studies
                share = (r1 - regret) / (r1 - r0)
                best = min(best, share * b0 + (1 - share) * b1)
    return best


def wilson(share: float, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of `n` (Wilson 1927), which is also valid at shares of 0 and 1."""
    z2 = 1.96**2
    middle, half = share + z2 / (2 * n), math.sqrt(z2 * (share * (1 - share) / n + z2 / (4 * n**2)))
    return (middle - half) / (1 + z2 / n), (middle + half) / (1 + z2 / n)


def report(order: str, found: list[dict[tuple[str, str], Outcome]]) -> None:
    print(f"\n{order}\n\n| pruner | budget | regret | best kept |\n|---|---|---|---|")
    means: dict[str, tuple[float, float]] = {}
    for name in itertools.chain(*pruners().values()):
        rows = np.array([[o.budget, o.regret, o.kept] for o in (f[order, name] for f in found)], dtype=float)
        budget, regret, kept = rows.mean(axis=0)
        errors = rows.std(axis=0, ddof=1) / np.sqrt(len(rows)) if len(rows) > 1 else np.full(3, np.nan)
        means[name] = budget, regret
        print(f"| {name} | {budget:.3f} ± {errors[0]:.3f} | {100 * regret:.2f} ± {100 * errors[1]:.2f} "
              f"| {kept:.3f} ({' to '.join(f'{end:.3f}' for end in wilson(kept, len(rows)))}) |")  # fmt: skip
    # A regret below that of no pruning is luck.
    regrets = [*(max(means[name][1], means["none"][1]) + ALIKE for name in OURS), *REGRETS]
    heads = [f"{100 * regret:.2f}" for regret in regrets]
    heads[:2] = f"{heads[0]} (the forecast's)", f"{heads[1]} (the early one's)"
    print(f"\n| budget at a regret of | {' | '.join(heads)} |")
    print("|---" * (1 + len(regrets)) + "|")
    for method, settings in itertools.islice(pruners().items(), 1, None):
        points = [means[name] for name in settings]
        cells = [f"{budget_at(regret, points, means['none']):.3f}" for regret in regrets]
        print(f"| {method} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--studies", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    with multiprocessing.Pool(args.jobs) as pool:
        found = pool.map(functools.partial(study_of, args.seed), range(args.studies), chunksize=1)
    for order in ORDERS:
        report(order, found)


if __name__ == "__main__":
    main()
