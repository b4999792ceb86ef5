"""A training run, from a recipe to a run folder. `train` reads from top to bottom as what happens."""

from __future__ import annotations

import math
import os
import platform
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import BrokenExecutor, Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from scalerl._version import __version__
from scalerl.errors import CannotAnswerError, DivergedError, PausedError, WorkerError, WriteError
from scalerl.record import DeviceSeconds, EvalPoint, Flops, RunRecord, Tokens, mean_p_1mp
from scalerl.rl.evaluate import Evaluation, EvaluationProcess, Evaluator
from scalerl.rl.lora import plain_state
from scalerl.rl.model import load_tokenizer
from scalerl.rl.pipeline import Step, run_pipeline
from scalerl.rl.pool import PromptPool
from scalerl.rl.probe import Probe
from scalerl.rl.recipe import Recipe
from scalerl.rl.setup import check_prompts, load_learner, load_verifier, place_generator
from scalerl.rl.types import Counters as GeneratorCounters
from scalerl.rl.watch import Finding, Watch
from scalerl.run_writer import RunWriter, check_unused

MAX_PENDING = 3
"""Evaluations under way before training waits for the oldest."""

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


@dataclass
class _Counters:
    """Cumulative over the run: what an evaluation is recorded with."""

    devices: int = 1
    generate_seconds: float = 0.0
    train_seconds: float = 0.0
    evaluate_seconds: float = 0.0
    idle_seconds: float = 0.0
    generate_flops: float = 0.0
    train_flops: float = 0.0
    generated: int = 0
    trained: int = 0
    samples: int = 0
    prompts: int = 0

    @property
    def flops(self) -> float:
        return self.generate_flops + self.train_flops

    def json(self) -> dict[str, dict[str, float]]:
        """The counters as steps.jsonl and evals.jsonl keep them."""
        seconds = DeviceSeconds(
            self.generate_seconds, self.train_seconds, self.evaluate_seconds, self.idle_seconds
        )
        return {
            "device_seconds": asdict(seconds),
            "flops": asdict(Flops(self.generate_flops, self.train_flops)),
            "tokens": asdict(Tokens(self.generated, self.trained)),
        }


@dataclass
class _Evaluations:
    """Evaluations under way, written in the order in which they were asked for."""

    evaluate: Evaluator | EvaluationProcess
    writer: RunWriter
    prompt_ids: list[str]
    prompt_set: str
    n_samples: int
    counters: _Counters
    on_point: Callable[[EvalPoint], None]
    last_step: int = -1
    """Step of the last evaluation asked for."""
    _pending: deque[tuple[dict[str, Any], Future[Evaluation]]] = field(default_factory=deque)

    def ask(self, step: int, weights: Mapping[str, np.ndarray]) -> None:
        """Evaluate `weights`, and remember the counters as they stand."""
        now = {
            "step": step,
            "time": time.time(),
            "samples": self.counters.samples,
            "prompts": self.counters.prompts,
        }
        now |= self.counters.json()
        self.last_step = step
        while len(self._pending) >= MAX_PENDING:  # each holds a copy of the weights
            self._write_first()
        try:
            future = self.evaluate(weights, step)
        except BrokenExecutor as error:
            raise self._died() from error
        self._pending.append((now, future))

    def write_finished(self, wait: bool = False) -> None:
        """Write what is done; with `wait`, all of it."""
        while self._pending and (wait or self._pending[0][1].done()):
            self._write_first()

    def _write_first(self) -> None:
        row, future = self._pending.popleft()
        if future.cancelled():
            return
        try:
            result = future.result()
        except BrokenExecutor as error:
            self._pending.clear()
            raise self._died() from error
        self._write(row, result)

    def _died(self) -> WorkerError:
        what = "the evaluation process died (out of memory?)"
        return WorkerError(f"{self.writer.path}: {what}; what was written before is kept")

    def _write(self, row: dict[str, Any], result: Evaluation) -> None:
        self.counters.evaluate_seconds += result.seconds
        row["device_seconds"]["evaluate"] = self.counters.evaluate_seconds
        n = len(self.prompt_ids)
        point = EvalPoint.from_json(
            row
            | {
                "pass_rate": float(result.correct_P.sum()) / (n * self.n_samples),
                "version": result.version,
                "n_prompts": n,
                "n_samples": self.n_samples,
                "mean_p_1mp": mean_p_1mp(result.correct_P, self.n_samples),
                "truncated": result.truncated,
                "interrupted": result.interrupted,
                "mean_length": result.mean_length,
                "entropy": result.entropy,
            }
        )
        self.writer.evaluation(point, self.prompt_set, self.prompt_ids, result.correct_P)
        self.on_point(point)


def train(
    recipe: Recipe,
    folder: str | Path,
    model_folder: str | Path,
    *,
    forecaster: Forecaster | None = None,
    watch: Callable[[Progress], None] = lambda progress: None,
    extra: Mapping[str, Any] | None = None,
    evaluate_aside: bool = True,
) -> RunRecord:
    """Train `recipe` into the run folder `folder`, and return its record.

    With the placement `inline` generator and learner share this process, so that one seed gives one result,
    bit for bit. Evaluations run in a process of their own unless `evaluate_aside` is false, with the same
    result. (A script that calls this needs the usual `if __name__ == "__main__":`, as processes are spawned.)
    `forecaster` freezes a forecast of the end at each of `MILESTONES`. `extra` goes into config.json.

    Raises:
        InputError: the folder exists, the model cannot be loaded, or does not fit the recipe's context.
        WriteError: the disk does not take the record; what was written before is kept.
        PausedError: an alarm, where `health.on_alarm` is "pause".
        DivergedError: a gradient is not finite.
        KeyboardInterrupt: after the evaluations under way have been written.
    """
    torch.set_num_threads(1)  # results must not depend on how many cores there are
    check_unused(Path(folder))
    recipe = check_prompts(recipe, model_folder)
    tokenizer, learner = load_tokenizer(model_folder), load_learner(recipe, model_folder)
    generator = place_generator(recipe, model_folder, learner)  # complains before anything is written
    verifier = load_verifier(recipe, tokenizer)
    pool = PromptPool(recipe.task.prompts("train"), recipe.curriculum, recipe.seed)
    heldout = recipe.task.prompts("heldout")

    writer = RunWriter(folder, _config(recipe, model_folder, learner.model, extra or {}))
    counters = _Counters(recipe.placement.devices)
    view = _View(watch)

    def say(finding: Finding) -> None:
        writer.alarm(finding.json())
        view.finding(finding)

    def on_point(point: EvalPoint) -> None:
        view.point(point)
        health.evaluation(point)

    health, probe = Watch(recipe.health, recipe.precision, say), Probe(learner, recipe)
    evaluate = (EvaluationProcess if evaluate_aside else Evaluator)(recipe, str(model_folder))
    evaluations = _Evaluations(
        evaluate,
        writer,
        [prompt.id for prompt in heldout],
        recipe.task.heldout_hash,
        recipe.evaluation.samples,
        counters,
        on_point,
    )
    try:
        evaluations.ask(0, learner.weights())
        due, milestones = 1, MILESTONES
        clock = time.perf_counter()
        for step in run_pipeline(recipe, pool, generator, learner, verifier.judge):
            _count(counters, step, generator.counters, time.perf_counter() - clock)
            row = _step_row(step, counters, pool.left) | _probed(probe, step, counters)
            writer.step(row)
            health.step(row)
            share = _spent(recipe, step.index, counters) / recipe.budget.amount
            if share >= due / recipe.evaluation.count:
                evaluations.ask(step.index, learner.weights())
                while due / recipe.evaluation.count <= share:
                    due += 1
                passed = [milestone for milestone in milestones if milestone <= share]
                milestones = milestones[len(passed) :]
                if forecaster and passed and share < 1:
                    evaluations.write_finished(wait=True)  # nothing is trained until the forecast is frozen
                    _freeze(writer, forecaster, recipe, view)
            evaluations.write_finished()
            view.step(step.index, share, counters)
            clock = time.perf_counter()
            if share >= 1:
                break
            if health.pause_for:
                evaluations.write_finished(wait=True)
                save_checkpoint(learner.model, tokenizer, writer.path / "checkpoints" / "paused")
                raise PausedError(f"paused at {health.pause_for}; {writer.path} keeps what was run")
        if evaluations.last_step < learner.version:  # the pool ran dry: every prompt has been retired
            evaluations.ask(learner.version, learner.weights())
        evaluations.write_finished(wait=True)
        save_checkpoint(learner.model, tokenizer, writer.path / "checkpoints" / "final")
    except DivergedError:
        health.diverged(learner.version + 1)
        raise
    except KeyboardInterrupt:
        save_checkpoint(learner.model, tokenizer, writer.path / "checkpoints" / "interrupted")
        raise
    finally:
        generator.close()
        evaluate.close()
        verifier.close()
        evaluations.write_finished()
    return RunRecord.read(writer.path)


class _View:
    """Keeps what a watcher is to see, and tells it."""

    def __init__(self, watch: Callable[[Progress], None]) -> None:
        self.forecast: Mapping[str, Any] | None = None
        self._watch = watch
        self._share = 0.0
        self._tokens_per_second = math.nan
        self._pass_rate = math.nan

    def step(self, step: int, share: float, counters: _Counters) -> None:
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


def _spent(recipe: Recipe, step: int, counters: _Counters) -> float:
    return counters.flops if recipe.budget.kind == "flops" else float(step)


def _count(counters: _Counters, step: Step, generator: GeneratorCounters, wall_seconds: float) -> None:
    busy = generator.seconds - counters.generate_seconds + step.train_seconds
    counters.generate_seconds = generator.seconds
    counters.train_seconds += step.train_seconds
    counters.idle_seconds += max(wall_seconds * counters.devices - busy, 0.0)
    counters.generate_flops = generator.flops
    counters.generated = generator.tokens
    counters.train_flops += step.stats.flops
    counters.trained += step.stats.tokens
    counters.samples += sum(len(group.rollouts) for group in step.groups)
    counters.prompts += len(step.groups)


def _probed(probe: Probe, step: Step, counters: _Counters) -> dict[str, float]:
    """The probe's fields; its time is counted as evaluating, for it trains nothing."""
    started = time.perf_counter()
    found = probe([rollout for group in step.groups for rollout in group.rollouts])
    counters.evaluate_seconds += time.perf_counter() - started
    return found


def _step_row(step: Step, counters: _Counters, pool_left: int) -> dict[str, Any]:
    """One line of steps.jsonl; docs/run-folder.md has its table of fields."""
    rollouts = [rollout for group in step.groups for rollout in group.rollouts]
    before = step.index - 1  # the trainer's version as it took the batch
    age_W = (before - step.batch.version_NT)[step.batch.sampled_NT]
    stats = asdict(step.stats)
    row = {
        "step": step.index,
        "version": step.index,
        "time": time.time(),
        "skipped": not len(step.batch),
        "reward_mean": float(np.mean([group.reward_G.mean() for group in step.groups])),
        "correct": float(np.mean([group.correct_G.mean() for group in step.groups])),
        "groups": len(step.groups),
        "groups_used": step.batch.groups_used,
        "completions": len(rollouts),
        "completions_used": len(step.batch),
        "zero_variance": step.batch.zero_variance / len(step.groups),
        "truncated": float(np.mean([r.truncated for r in rollouts])),
        "failed": dict(Counter(reason for g in step.groups for reason in g.failed.values())),
        "interrupted": float(np.mean([r.interrupted for r in rollouts])),
        "mean_length": float(np.mean([r.length for r in rollouts])),
        **{key: value for key, value in stats.items() if key not in ("flops", "tokens")},
        "multi_version": float(np.mean([r.version_T.min() != r.version_T.max() for r in rollouts])),
        "kv_age_max": max(before - r.first_version for r in rollouts),
        "pool": pool_left,
        **counters.json(),
    }
    if len(age_W):
        row |= {
            "age_mean": float(age_W.mean()),
            "age_max": int(age_W.max()),
            "age_share_over_4": float((age_W > 4).mean()),
            "age_histogram": np.bincount(age_W) / len(age_W),
        }
    return row


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


def save_checkpoint(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save a model in Hugging Face format, whole or not at all.

    Raises:
        WriteError: the disk does not take it.
    """
    aside = folder.with_name(f".{folder.name}.part")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        model.save_pretrained(aside, state_dict=plain_state(model))
        tokenizer.save_pretrained(aside)
        for file in aside.iterdir():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        aside.rename(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise WriteError(f"{folder}: the weights could not be saved ({error})") from error
