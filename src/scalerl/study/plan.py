"""The plan of a study: all of its runs, checked before any compute is spent.

The checks keep the comparison fair: seed for seed, all arms start from the same base model, are evaluated on
the same held-out prompts, draw their prompts in the same order, and have the same budget on the same axis.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scalerl.errors import InputError
from scalerl.files import folder_name, write_atomically, writing
from scalerl.jsonl import dumps, plain
from scalerl.kinds import tables_of
from scalerl.record.reader import UNTRAINED
from scalerl.rl.config.recipe import Recipe, changed, from_dict
from scalerl.rl.model.demo_base import CHAIN_BASE
from scalerl.rl.tracking.trackers import trackers_of
from scalerl.study.arms import Arm, combine, expand, source_of, sparse
from scalerl.study.record import PLAN, SCHEMA, PlannedRun, read_plan
from scalerl.study.spec import MOST_SEED, LearningRate, Study

LEAST_EVALUATIONS = 6
"""Fewest evaluations up to the first budget, not counting step 0: fewer do not identify a curve."""
_NEVER_CHANGED = ("seed", "budget", "evaluation")
"""Keys that no arm may change."""


@dataclass(frozen=True)
class Plan:
    """The runs of a study."""

    study: Study
    budgets: tuple[float, ...]
    """The budgets of the study; if it has none, that of the base."""
    base: Recipe
    """The recipe that the arms change."""
    arms: tuple[Arm, ...]
    """The first is the one with which the others are compared."""
    warnings: tuple[str, ...]

    @property
    def axis(self) -> str:
        """The compute axis of the budgets."""
        return self.base.budget.kind

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of every arm."""
        return self.study.seed_list

    @property
    def runs(self) -> list[PlannedRun]:
        """All runs, seed by seed, so that finished runs form whole blocks at any time."""
        return [self.run(arm, seed) for seed in self.seeds for arm in self.arms]

    def run(self, arm: Arm, seed: int) -> PlannedRun:
        """Return the run of an arm with a seed."""
        models = self.study.models
        model = models[self.seeds.index(seed) % len(models)] if models else arm.recipe.model
        return PlannedRun(arm.name, seed, model, f"runs/{folder_name(arm.name)}/seed{seed}")

    def trials(self) -> Iterator[tuple[PlannedRun, Arm]]:
        """Yield the runs that tune the learning rate, each with its arm at the tried rate."""
        tuning, models = self.study.learning_rate, self.study.models
        if tuning is None:
            return
        # Not the seeds of the study, as choosing the rate on these would bias the comparison.
        seeds = range(MOST_SEED + 1, MOST_SEED + 1 + tuning.seeds)
        for arm, value, seed in itertools.product(self.arms, tuning.values, seeds):
            model = models[seed % len(models)] if models else arm.recipe.model
            where = f"tuning/{folder_name(arm.name)}/lr={value:g}/seed{seed}"
            yield PlannedRun(f"{arm.name} lr={value:g}", seed, model, where), with_rate(arm, value)

    def recipe(self, run: PlannedRun, arm: Arm) -> Recipe:
        """Return the recipe of one run."""
        tracking = arm.recipe.tracking
        named = replace(tracking, name=f"{run.arm}-seed{run.seed}", group=tracking.group or self.study.name)
        return replace(
            arm.recipe, seed=run.seed, model=run.model, tracking=named if tracking.to else tracking
        )

    def to_json(self) -> dict[str, Any]:
        """Return the content of study.json."""
        study = self.study
        return {
            "schema": SCHEMA,
            "name": study.name,
            "kind": study.rule.kind,
            "base": self.arms[0].name,
            "axis": self.axis,
            "budgets": self.budgets,
            "target": study.target,
            "price": study.price,
            "retries": study.retries,
            "learning_rate": rate_in_words(self),
            "rules": {
                "models": study.models,
                "combine": study.combine,
                "stop": study.stop and vars(study.stop),
                "learning_rate": study.learning_rate and vars(study.learning_rate),
            },
            "warnings": self.warnings,
            "arms": [arm.to_json() for arm in self.arms],
            "runs": [vars(run) for run in self.runs],
        }


def make_plan(study: Study) -> Plan:
    """Make the plan of a study, and check that its runs can be compared.

    Raises:
        InputError: a recipe is invalid, or the runs could not be compared.
    """
    base = _base(study)
    trackers_of(base.tracking)  # raises if a tracker is not installed
    arms = expand(base, study.rule)
    budgets = study.budgets or (base.budget.amount,)
    _check_budgets(base, budgets, study.learning_rate)
    for arm in arms:
        _check_arm(arm, base)
    if study.learning_rate and (own := [a.name for a in arms if a.recipe.optimiser.lr != base.optimiser.lr]):
        raise InputError(f"arm {own[0]}: changes optimiser.lr, which [learning_rate] chooses for every arm")
    if study.combine:
        _check_combination(base, arms, study.combine)
    if study.models and (own := [arm.name for arm in arms if arm.recipe.model != base.model]):
        raise InputError(f"models: the model of arm {own[0]} is its own; give one or the other")
    by_folder: dict[str, str] = {}
    for arm in arms:
        if (other := by_folder.setdefault(folder_name(arm.name), arm.name)) != arm.name:
            raise InputError(f"arms {other!r} and {arm.name!r} would share a folder: name them apart")
    return Plan(study, budgets, base, tuple(arms), tuple(_warnings(arms, study.seed_list)))


def write_plan(plan: Plan, folder: Path) -> None:
    """Write study.json; an existing one may only grow, by arms and seeds.

    Raises:
        InputError: the folder holds another study.
        WriteError: the file cannot be written.
    """
    check_plan(plan, folder)
    with writing(folder / PLAN):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / PLAN, dumps(plain(plan.to_json()), indent=2) + "\n")


def with_rate(arm: Arm, lr: float) -> Arm:
    """Return the arm with another learning rate."""
    optimiser = replace(arm.recipe.optimiser, lr=lr)
    return replace(arm, recipe=replace(arm.recipe, optimiser=optimiser))


def _base(study: Study) -> Recipe:
    if "seed" in study.set:
        raise InputError("set.seed: the seeds of a study are those of `seeds`")
    values = changed(sparse(study.base), tables_of(study.set))
    if study.budgets:
        values = changed(values, {"budget": {"amount": study.budgets[-1]}})
    base = from_dict(values, source_of(study.base))
    if base.model == CHAIN_BASE:  # name the thinking budget that it depends on, as an arm may change that
        base = replace(base, model=f"{CHAIN_BASE}:thinking={base.context.thinking}")
    return base


def _check_budgets(base: Recipe, budgets: Sequence[float], tuning: LearningRate | None) -> None:
    count, last = base.evaluations, budgets[-1]
    if base.budget.kind == "epochs" or math.isnan(count):
        raise InputError(
            "budget.kind, evaluation.every: a study has evaluations at its budgets, on a compute axis: take "
            "evaluation.count and a budget in steps, flops, gpu_hours or tokens, or both in steps"
        )
    for budget in budgets:
        if abs(budget / last * count - round(budget / last * count)) > 1e-6:
            raise InputError(
                f"budgets: {budget:g} falls between two of the {count:g} evaluations that are spread over "
                f"{last:g}; choose evaluation.count so that one is made at every budget"
            )
    first = round(budgets[0] / last * count)
    if first < LEAST_EVALUATIONS:
        raise InputError(
            f"budgets: {first} evaluations up to {budgets[0]:g} are too few for a curve; "
            f"{LEAST_EVALUATIONS} are needed: raise evaluation.count or the first budget"
        )
    if base.budget.kind == "steps" and budgets[0] <= base.optimiser.warmup_steps:
        raise InputError(
            f"budgets: {budgets[0]:g} steps, of which {base.optimiser.warmup_steps} are warm-up; while the "
            "learning rate rises no curve shows what comes after"
        )
    if tuning and not LEAST_EVALUATIONS <= tuning.budget / last * count <= count:
        raise InputError(
            f"learning_rate.budget: {tuning.budget:g} has {int(tuning.budget / last * count)} of the "
            f"{count:g} evaluations up to {last:g}; {LEAST_EVALUATIONS} are needed, and no more than all"
        )


def _check_arm(arm: Arm, base: Recipe) -> None:
    before, now = base.to_dict(), arm.recipe.to_dict()
    different = {key for key in before if key != "name" and before[key] != now[key]}
    if astray := [key for key in _NEVER_CHANGED if key in different]:
        raise InputError(
            f"arm {arm.name}: changes {astray[0]}, and all arms are compared at one; [set] changes it for all"
        )
    if different and different <= {*UNTRAINED}:
        raise InputError(f"arm {arm.name}: changes nothing that is trained")
    if "task" in different and arm.recipe.task.heldout_hash != base.task.heldout_hash:
        raise InputError(f"arm {arm.name}: its held-out prompts are others, so that nothing compares")


def _check_combination(base: Recipe, arms: Sequence[Arm], most: int) -> None:
    if most > len(arms) - 1:
        raise InputError(
            f"combine: {most} arms are to be one, and there are {len(arms) - 1} beside the first"
        )
    for pair in itertools.combinations(arms[1:], 2):
        with suppress(InputError):
            combine(base, pair)
            return
    raise InputError("combine: any two of these arms change the same, so that none can be combined")


def _warnings(arms: Sequence[Arm], seeds: Sequence[int]) -> Iterator[str]:
    if len(seeds) == 1:
        yield "one seed an arm: the seed variance is assumed, and a small difference is not detected"
    elif len(seeds) < 3:
        yield f"{len(seeds)} seeds an arm say little of what a seed does; 3 or more do"
    on_policy = [arm for arm in arms if arm.recipe.schedule.max_staleness == 0]
    losses = {repr(replace(arm.recipe, loss=arms[0].recipe.loss, name="")) for arm in on_policy}
    if len(losses) < len(on_policy):
        names = ", ".join(arm.name for arm in on_policy)
        yield (
            f"{names} train on-policy, where importance ratios are 1 but for rounding: arms of them that "
            "differ in the loss alone have one gradient, and cannot be distinguished"
        )


def rate_in_words(plan: Plan) -> str:
    """Return a sentence on how the learning rate of every arm is chosen."""
    tuning = plan.study.learning_rate
    if tuning:
        values = ", ".join(f"{value:g}" for value in tuning.values)
        return (
            f"tuned for each arm by one rule: of {values} the one with the highest pass rate over the last "
            f"quarter of the evaluations up to {tuning.budget:g} {plan.axis}, {tuning.seeds} seed(s) apart "
            "from those of the study"
        )
    rates = sorted({arm.recipe.optimiser.lr for arm in plan.arms})
    if len(rates) == 1:
        return f"fixed, {rates[0]:g} for all arms"
    return f"as the arms say, {', '.join(f'{rate:g}' for rate in rates)}; not tuned"


_MAY_CHANGE = ("target", "price", "retries", "warnings", "name", "learning_rate")
_APART = "give this study another folder with -o"
_GONE = f"which is not in this study; it may grow, not shrink: {_APART}"


def check_plan(plan: Plan, folder: Path) -> None:
    """Raise an InputError if the folder holds another study; more arms and seeds are allowed."""
    if not (folder / PLAN).exists():
        return
    before, now = read_plan(folder), plain(plan.to_json())
    for key in now:
        if key not in ("arms", "runs", *_MAY_CHANGE) and before.get(key) != now[key]:
            raise InputError(
                f"{folder}: holds a study with {key} {before.get(key)}, and here it is {now[key]}; {_APART}"
            )
    recipes = {arm["name"]: arm["recipe"] for arm in now["arms"]}
    for arm in before["arms"]:
        if arm["name"] not in recipes:
            raise InputError(f"{folder}: holds arm {arm['name']}, {_GONE}")
        for key, value in recipes[arm["name"]].items():
            if value != arm["recipe"].get(key):
                raise InputError(
                    f"{folder}: holds arm {arm['name']} with {key} {arm['recipe'].get(key)}, and here it is "
                    f"{value}; {_APART}"
                )
    if gone := [run for run in before["runs"] if run not in now["runs"]]:
        was = f"arm {gone[0]['arm']} seed {gone[0]['seed']} of model {gone[0]['model']}"
        raise InputError(f"{folder}: holds {was}, {_GONE}")
