"""A training run, from a recipe to a run folder. `train` reads from top to bottom as what happens."""

from __future__ import annotations

import math
import platform
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scalerl._version import __version__
from scalerl.errors import CannotAnswerError, DivergedError, PausedError
from scalerl.record import EvalPoint, RunRecord
from scalerl.rl.checkpoint import Checkpoints, copied_state, final_folder, save_model, write_whole
from scalerl.rl.counters import RunCounters, groups_row, step_row
from scalerl.rl.evaluate import EvaluationProcess, Evaluator
from scalerl.rl.evaluations import Evaluations
from scalerl.rl.model import load_tokenizer
from scalerl.rl.pipeline import Pipeline
from scalerl.rl.pool import PromptPool
from scalerl.rl.probe import Probe
from scalerl.rl.recipe import Recipe
from scalerl.rl.resume import find_checkpoint, is_finished
from scalerl.rl.setup import check_prompts, load_learner, load_verifier, place_generator
from scalerl.rl.watch import Finding, Watch
from scalerl.run_writer import RunWriter, check_unused

MILESTONES = (0.25, 0.5, 0.75)
"""Shares of the budget at which a forecast of the end is frozen, before training goes on."""

Forecaster = Callable[[RunRecord, str, float], Mapping[str, Any]]
"""From the run so far, the compute axis and the budget: the row of forecasts.jsonl."""


@dataclass(frozen=True)
class Progress:
    """What a watcher sees after every step and every evaluation."""

    step: int
    share: float
    """Of the budget."""
    tokens_per_second: float
    """Sampled tokens per second of generating and training."""
    pass_rate: float
    """Of the last evaluation."""
    forecast: Mapping[str, Any] | None
    """The last row of forecasts.jsonl."""
    evaluated: bool = False
    """Whether this is an evaluation (its step is then `step`) and not a step."""
    finding: str = ""
    """What there is to say of the run's health, if this is about that alone."""


def train(
    recipe: Recipe,
    folder: str | Path,
    model_folder: str | Path,
    *,
    resume: bool = False,
    forecaster: Forecaster | None = None,
    watch: Callable[[Progress], None] = lambda progress: None,
    extra: Mapping[str, Any] | None = None,
    evaluate_aside: bool = True,
    stop: threading.Event | None = None,
) -> RunRecord:
    """Train `recipe` into the run folder `folder`, and return its record.

    With the placement `inline` generator and learner share this process, so that one seed gives one result,
    bit for bit. Evaluations run in a process of their own unless `evaluate_aside` is false, with the same
    result. (A script that calls this needs the usual `if __name__ == "__main__":`, as processes are spawned.)
    `forecaster` freezes a forecast of the end at each of `MILESTONES`. `extra` goes into config.json.

    `resume` goes on from the newest checkpoint in `folder`, or from the beginning where there is none; with
    the placement `inline` the record is then that of a run that was never cut, times apart. Once `stop` is
    set, the run makes a checkpoint after the step under way, and ends as by Ctrl-C.

    Raises:
        InputError: the folder exists (or, with `resume`, holds another recipe, or is being written), the
            model cannot be loaded, or does not fit the recipe's context.
        WriteError: the disk does not take the record; what was written before is kept.
        PausedError: an alarm, where `health.on_alarm` is "pause"; there is a checkpoint of the step.
        DivergedError: gradients or probabilities are not finite any more; what was written before is kept.
        KeyboardInterrupt: it was stopped.
    """
    folder = Path(folder)
    if resume and is_finished(folder):
        return RunRecord.read(folder)
    if not resume:
        check_unused(folder)
    torch.set_num_threads(1)  # results must not depend on how many cores there are
    recipe = check_prompts(recipe, model_folder)
    tokenizer, learner = load_tokenizer(model_folder), load_learner(recipe, model_folder)
    verifier = load_verifier(recipe, tokenizer)
    pool = PromptPool(recipe.task.prompts("train"), recipe.curriculum, recipe.seed)
    heldout = [prompt.id for prompt in recipe.task.prompts("heldout")]

    saved = find_checkpoint(folder, recipe) if resume else None
    if saved:
        learner.restore(saved["learner"])
    version = saved["generator"]["version"] if saved else 0
    generator = place_generator(recipe, model_folder, learner, version)  # complains before all is written
    if resume and (folder / "config.json").exists():
        writer = RunWriter.resume(folder, saved["lengths"] if saved else {})
    else:
        writer = RunWriter(folder, _config(recipe, model_folder, learner.model, extra or {}))
    counters = RunCounters(recipe.placement.processes, recipe.placement.devices)
    view, agenda = _View(watch), _Agenda(recipe.evaluation.count)

    def say(finding: Finding) -> None:
        writer.alarm(finding.json())
        view.finding(finding)

    def on_point(point: EvalPoint) -> None:
        view.point(point)
        health.evaluation(point)

    health, probe = Watch(recipe.health, recipe.precision, say), Probe(learner, recipe)
    evaluate = (EvaluationProcess if evaluate_aside else Evaluator)(recipe, str(model_folder))
    evaluations = Evaluations(
        evaluate, writer, heldout, recipe.task.heldout_hash, recipe.evaluation.samples, counters, on_point
    )
    pipeline = Pipeline(recipe, pool, generator, learner, verifier.judge)
    checkpoints = Checkpoints(folder / "checkpoints", recipe.checkpoint, learner.model, tokenizer)
    parts = {
        "learner": learner,
        "generator": generator,
        "pool": pool,
        "pipeline": pipeline,
        "counters": counters,
        "evaluations": evaluations,
        "agenda": agenda,
        "health": health,
        "probe": probe,
    }
    try:
        if saved:
            for name in parts.keys() - {"learner"}:
                parts[name].restore(saved[name])
        else:
            evaluations.ask(0, learner.weights())
        clock = time.perf_counter()
        for step in pipeline.steps():
            counters.add(step, generator.counters, time.perf_counter() - clock)
            probing = time.perf_counter()
            probed = probe([rollout for group in step.groups for rollout in group.rollouts])
            clock = time.perf_counter()
            counters.evaluate_seconds += clock - probing
            row = step_row(step, counters, pipeline) | probed
            writer.step(row, groups_row(step))
            health.step(row)
            for failure in verifier.new_failures():
                print(f"scalerl: {failure}", file=sys.stderr, flush=True)
            share = _spent(recipe, step.index, counters) / recipe.budget.amount

            evaluating = time.perf_counter()
            if agenda.evaluates(share):
                evaluations.ask(step.index, learner.weights())
            if agenda.freezes(share) and forecaster and share < 1:
                evaluations.write_finished(wait=True)  # nothing is trained until the forecast is frozen
                _freeze(writer, forecaster, recipe, view)
            evaluations.write_finished()
            clock += time.perf_counter() - evaluating  # it is no part of training

            view.step(step.index, share, counters)
            if share >= 1:
                break
            stopping = health.pause_for is not None or (stop is not None and stop.is_set())
            if stopping:
                evaluations.write_finished(wait=True)
            if stopping or checkpoints.due(step.index):
                checkpoints.make(step.index, state_of(parts) | {"lengths": writer.lengths()})
            if health.pause_for:
                raise PausedError(f"paused at {health.pause_for}; scalerl train {folder} --resume goes on")
            if stopping:
                raise KeyboardInterrupt
        if evaluations.last_step < learner.version:  # the pool ran dry: every prompt has been retired
            evaluations.ask(learner.version, learner.weights())
        evaluations.write_finished(wait=True)
        checkpoints.wait()
        weights = copied_state(learner.model)
        write_whole(final_folder(folder), lambda aside: save_model(learner.model, tokenizer, aside, weights))
    except DivergedError:
        health.diverged(learner.version + 1)
        raise
    finally:
        generator.close()
        evaluate.close()
        verifier.close()
        checkpoints.close()
        writer.close()
    return RunRecord.read(folder)


def state_of(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of everything that the parts of a run need to go on."""
    return {name: part.state() for name, part in parts.items()}


@dataclass
class _Agenda:
    """What is due at which share of the budget: evaluations, and frozen forecasts."""

    count: int
    due: int = 1
    """Of `count` evaluations, the next."""
    frozen: int = 0
    """Milestones that have passed."""

    def evaluates(self, share: float) -> bool:
        """Whether an evaluation is due; those that one step passes together are made once."""
        before = self.due
        self.due = max(self.due, math.floor(share * self.count))
        while self.due / self.count <= share:
            self.due += 1
        return self.due > before

    def freezes(self, share: float) -> bool:
        """Whether a milestone has been reached."""
        before = self.frozen
        self.frozen = sum(milestone <= share for milestone in MILESTONES)
        return self.frozen > before

    def state(self) -> dict[str, Any]:
        """What `restore` needs."""
        return {"due": self.due, "frozen": self.frozen}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        self.due, self.frozen = state["due"], state["frozen"]


class _View:
    """Keeps what a watcher is to see, and tells it."""

    def __init__(self, watch: Callable[[Progress], None]) -> None:
        self.forecast: Mapping[str, Any] | None = None
        self._watch = watch
        self._share = 0.0
        self._tokens_per_second = math.nan
        self._pass_rate = math.nan

    def step(self, step: int, share: float, counters: RunCounters) -> None:
        """A trainer step is done."""
        self._share = min(share, 1.0)
        self._tokens_per_second = counters.generated / (counters.generate_seconds + counters.train_seconds)
        self._tell(step, evaluated=False)

    def point(self, point: EvalPoint) -> None:
        """An evaluation is on record."""
        self._pass_rate = point.pass_rate
        self._tell(point.step, evaluated=True)

    def finding(self, finding: Finding) -> None:
        """There is something to say of the run's health."""
        self._tell(finding.step, evaluated=False, finding=str(finding))

    def _tell(self, step: int, evaluated: bool, finding: str = "") -> None:
        speed, rate = self._tokens_per_second, self._pass_rate
        self._watch(Progress(step, self._share, speed, rate, self.forecast, evaluated, finding))


def _freeze(writer: RunWriter, forecaster: Forecaster, recipe: Recipe, view: _View) -> None:
    try:
        row = forecaster(RunRecord.read(writer.path), recipe.budget.kind, recipe.budget.amount)
    except CannotAnswerError:
        return  # too early to say anything; the next milestone may
    writer.forecast(row)
    view.forecast = row


def _spent(recipe: Recipe, step: int, counters: RunCounters) -> float:
    return counters.flops if recipe.budget.kind == "flops" else float(step)


def _config(recipe: Recipe, model_folder: str | Path, model: Any, extra: Mapping[str, Any]) -> dict[str, Any]:
    import transformers

    return {
        "name": recipe.name,
        "seed": recipe.seed,
        "recipe": recipe.to_dict(),
        "model": {"path": recipe.model, "parameters": sum(p.numel() for p in model.parameters())},
        "budget": asdict(recipe.budget),
        "placement": recipe.placement.kind,
        "versions": {
            "scalerl": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        },
        "devices": {
            "generate and train": str(next(model.parameters()).device),
            "machine": platform.machine(),
        },
        **extra,
    }
