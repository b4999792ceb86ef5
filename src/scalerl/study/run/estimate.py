"""The cost of a study before it is run: compute as planned, time as measured in similar runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from scalerl.errors import InputError
from scalerl.record.reader import RunRecord
from scalerl.rl.config.memory import memory_of
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.model.causal_lm import FlopCount
from scalerl.rl.model.named import model_shape
from scalerl.rl.model.shape import shape_of
from scalerl.rl.tasks.task import prompts_of
from scalerl.study.arms import Arm
from scalerl.study.plan import LEAST_EVALUATIONS, Plan


@dataclass(frozen=True)
class ArmCost:
    """The cost of all seeds of an arm, including its trials of the learning rate."""

    arm: str
    runs: int
    compute: float
    """Compute in the unit of the study's budgets."""
    gpu_hours: float
    """Device-hours of training; NaN if no run has been measured."""
    evaluation_hours: float
    """Device-hours of evaluation, not part of those of training."""
    memory_bytes: int | None
    """Memory of one run: weights, gradients, optimiser, KV caches, no activations; None without its model."""


@dataclass(frozen=True)
class StudyCost:
    """The cost of a study; hours and dollars are NaN unless known for all arms."""

    arms: tuple[ArmCost, ...]
    runs: int
    compute: float
    gpu_hours: float
    evaluation_hours: float
    wall_hours: float
    """Hours with as many runs at once as the cores allow, evaluations included."""
    dollars: float
    """Dollars, evaluations included; NaN without a price."""


@dataclass(frozen=True)
class _HoursPerUnit:
    """A run's hours per unit of compute and per evaluated completion, and its number of held-out prompts."""

    hours_per_unit: float
    hours_per_completion: float
    n_prompts: int

    @classmethod
    def of(cls, record: RunRecord, axis: str) -> _HoursPerUnit:
        hours, compute = record.compute("gpu_hours")[-1], record.compute(axis)[-1]
        if not (hours > 0 and compute > 0):
            raise InputError(f"{record.path}: nothing was trained yet, so it shows no time")
        evaluated = sum(point.n_prompts * point.n_samples for point in record.evals)
        seconds = record.evals[-1].device_seconds.evaluate
        each = seconds / 3600 / evaluated if evaluated and seconds > 0 else 0.0
        return cls(float(hours / compute), each, record.evals[-1].n_prompts)

    def evaluation_hours(self, recipe: Recipe, share: float) -> float:
        """Return the hours of the evaluations up to a share of the budget."""
        # Including the one before training.
        made = round(recipe.evaluations * share) + 1
        return made * self.n_prompts * recipe.evaluation.samples * self.hours_per_completion


def estimate(plan: Plan, folder: Path, like: Sequence[Path], cores: int) -> StudyCost:
    """Estimate the cost of the whole study, including what is done already.

    Args:
        plan: the study.
        folder: the folder of the study; its runs so far show, arm by arm, how long the others take.
        like: other runs, assumed to take as long per unit of compute as those of the study.
        cores: cores or GPUs to use at once.

    Raises:
        InputError: a run of `like` cannot be read, or has another axis.
    """
    shown = [_HoursPerUnit.of(RunRecord.read(path), plan.axis) for path in like]
    own = {arm.name: _measured(plan, folder, arm.name) for arm in plan.arms}
    general = shown or [one for measured in own.values() for one in measured]
    arms = [_of_arm(plan, arm, own[arm.name] or general) for arm in plan.arms]
    if plan.study.combine:
        arms.append(_of_combination(plan, arms))
    runs = sum(arm.runs for arm in arms)
    training, evaluation = sum(arm.gpu_hours for arm in arms), sum(arm.evaluation_hours for arm in arms)
    hours = training + evaluation
    devices = plan.arms[0].recipe.devices
    # Assumes that all arms need as many devices as the first.
    at_once = min(max(cores // devices, 1), runs)
    return StudyCost(
        arms=tuple(arms),
        runs=runs,
        compute=sum(arm.compute for arm in arms),
        gpu_hours=training,
        evaluation_hours=evaluation,
        # Runs come in waves: with 4 at once, 5 runs take as long as 8.
        wall_hours=math.ceil(runs / at_once) * hours / runs / devices,
        dollars=hours * (plan.study.price or math.nan),
    )


def _of_arm(plan: Plan, arm: Arm, measured: Sequence[_HoursPerUnit]) -> ArmCost:
    last, seeds = plan.budgets[-1], len(plan.seeds)
    tried = sum(of.name == arm.name for _, of in plan.trials())
    tuning = plan.study.learning_rate.budget if plan.study.learning_rate else 0.0
    compute = seeds * last + tried * tuning
    hours = evaluation = math.nan
    if measured:
        # The median, so that one run on a busy machine does not double the estimate.
        hours = compute * median(one.hours_per_unit for one in measured)
        each = arm.recipe
        evaluation = median(
            seeds * one.evaluation_hours(each, 1.0) + tried * one.evaluation_hours(each, tuning / last)
            for one in measured
        )
    return ArmCost(arm.name, seeds + tried, compute, hours, evaluation, _memory(_first_recipe(plan, arm)))


def _first_recipe(plan: Plan, arm: Arm) -> Recipe:
    return plan.recipe(plan.run(arm, plan.seeds[0]), arm)


def _of_combination(plan: Plan, arms: Sequence[ArmCost]) -> ArmCost:
    """Estimate the combination of the best arms by the mean of all arms, as the best are not known yet."""
    memory = [arm.memory_bytes for arm in arms if arm.memory_bytes is not None]
    return ArmCost(
        f"the best {plan.study.combine} combined",
        arms[0].runs,
        arms[0].compute,
        fmean(arm.gpu_hours for arm in arms),
        fmean(arm.evaluation_hours for arm in arms),
        max(memory) if len(memory) == len(arms) else None,
    )


def check_models(plan: Plan) -> None:
    """Read the configuration of every base model, so that no compute is spent if a later run cannot start.

    Raises:
        InputError: a model cannot be found.
    """
    arms = {arm.name: arm for arm in plan.arms}
    for run in {run.model: run for run in reversed(plan.runs)}.values():
        model_shape(plan.recipe(run, arms[run.arm]))


def short_of_steps(plan: Plan) -> Iterator[str]:
    """Yield a warning for every arm that reaches its first budget in too few steps for a curve."""
    if plan.axis != "flops":
        return
    for arm in plan.arms:
        steps = plan.budgets[0] / _flops_of_step(_first_recipe(plan, arm))
        if steps < LEAST_EVALUATIONS:
            yield (
                f"{arm.name}: about {max(steps, 0.1):.2g} steps up to {plan.budgets[0]:g} flops; evaluations "
                f"are made between steps, and a curve needs {LEAST_EVALUATIONS} at the least"
            )


def _flops_of_step(recipe: Recipe) -> float:
    """Return the FLOPs of a step whose completions use half of their budget; NaN without a model."""
    try:
        cost = FlopCount.of(model_shape(recipe))
    except InputError:
        return math.nan
    prompt, completion = recipe.context.prompt, recipe.context.sampled / 2
    # Completions of a group share the pass over their prompt. A token attends to all tokens before it.
    tokens = prompt + recipe.batch.samples * completion
    positions = prompt**2 / 2 + recipe.batch.samples * completion * (prompt + completion / 2)
    # 4 = sampling + forward pass + backward pass, which costs two forward passes.
    return 4 * recipe.batch.prompts * cost.forward(tokens, positions)


def _measured(plan: Plan, folder: Path, arm: str) -> list[_HoursPerUnit]:
    """Return measurements of the arm's runs in the folder."""
    paths = [folder / run.folder for run in plan.runs if run.arm == arm]
    records = [RunRecord.read(path) for path in paths if (path / "evals.jsonl").is_file()]
    return [_HoursPerUnit.of(record, plan.axis) for record in records if len(record.evals) > 1]


def _memory(recipe: Recipe) -> int | None:
    try:
        shape = shape_of(recipe)
    except InputError:
        return None  # the model has yet to be downloaded, say, or its memory cannot be computed
    return sum(
        device.total for device in memory_of(recipe, shape, (), len(prompts_of(recipe.task, "heldout")))
    )
