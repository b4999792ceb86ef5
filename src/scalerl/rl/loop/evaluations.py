"""The evaluations of a run: when they are due, how they run beside training, and their record in order."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from scalerl.errors import DivergedError, ScalerlError, WorkerError
from scalerl.record.downstream import suite_row
from scalerl.record.evaluation import EvalPoint, mean_p_1mp
from scalerl.record.writer import RunWriter
from scalerl.rl.config.recipe import HELDOUT, Recipe
from scalerl.rl.loop.counters import RunCounters
from scalerl.rl.loop.progress import Activities
from scalerl.rl.model.weights import WeightStream
from scalerl.rl.placement.evaluate import Evaluate, EvaluationResult
from scalerl.rl.sync.shared_weights import hold
from scalerl.rl.types import Weights

MAX_PENDING = 3
"""Most evaluations in progress at once; training then waits for the oldest."""
_MOMENT = 0.1
"""Seconds between two checks of the stop event."""
_MANY_CUT = 0.25
"""Share of truncated completions of the untrained model from which a warning is logged."""


@dataclass
class Agenda:
    """The shares of the budget at which evaluations and frozen forecasts are due.

    `count` evaluations are spread over the `first` budget, so a resume with another keeps their spacing.
    """

    count: int
    milestones: Sequence[float] = ()
    """Shares of the budget at which a forecast is frozen."""
    due: int = 1
    """Number of the next evaluation, from 1."""
    frozen: int = 0
    """Number of milestones whose forecast is frozen or cannot be made."""
    every: int = 0
    """Steps between two evaluations; replaces `count` if above 0."""
    budget: float = 1.0
    first: float = 1.0
    """The budget that the run started with."""

    def evaluates(self, spent: float, step: int = 0) -> bool:
        """Return whether an evaluation is due after `step`; several passed by one step count as one."""
        ends = spent >= self.budget
        if self.every:
            return step % self.every == 0 or ends
        # Capped, as a step may cost any multiple of the budget.
        before, share = self.due, min(spent, self.budget) / self.first
        # The floor skips all evaluations that have passed; rounding may leave it one short, hence the loop.
        self.due = max(self.due, math.floor(share * self.count))
        while self.due / self.count <= share:
            self.due += 1
        return self.due > before or ends

    def to_freeze(self, share: float) -> bool:
        """Return whether a milestone has passed since the last forecast was frozen."""
        return self._passed(share) > self.frozen

    def froze(self, share: float) -> None:
        """Record that the forecast at this share was frozen or cannot be made."""
        self.frozen = self._passed(share)

    def aim_at_new_end(self, share: float) -> None:
        """Make the last milestone that has passed due again: a resume has changed the budget."""
        self.frozen = max(self._passed(share) - 1, 0)

    def _passed(self, share: float) -> int:
        return sum(milestone <= share for milestone in self.milestones)

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs."""
        return {"due": self.due, "frozen": self.frozen}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self.due, self.frozen = state["due"], state["frozen"]


class EvaluationError(WorkerError):
    """An evaluation cannot be made: its process was lost too often or cannot start."""


@dataclass(frozen=True)
class _Pending:
    """An evaluation in progress, and its row with the counters at its start."""

    row: dict[str, Any]
    weights: Weights
    suites: Sequence[str]
    future: Future[EvaluationResult]


@dataclass
class Evaluations:
    """Evaluations in progress; they are written to the record in the order in which they were started."""

    evaluate: Evaluate
    writer: RunWriter
    recipe: Recipe
    counters: RunCounters
    on_point: Callable[[EvalPoint, EvaluationResult, Weights], None]
    """Called with each recorded evaluation, its result, and the evaluated weights."""
    on_suite: Callable[[Mapping[str, Any]], None] = lambda row: None
    """Called with each recorded line of downstream.jsonl."""
    activities: Activities = field(default_factory=Activities)
    last_step: int = -1
    """Step of the evaluation that was started last."""
    started: int = 0
    """Number of evaluations started."""
    _pending: deque[_Pending] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._sets: dict[str, tuple[str, list[str]]] = {}
        """Hash and ids of each evaluated set of prompts, by its name."""
        self._samples: dict[str, int] = {}
        for name, (task, samples) in self.recipe.evaluated.items():
            self._sets[name] = task.heldout_hash, [prompt.id for prompt in task.prompts("heldout")]
            self._samples[name] = samples

    def start(self, step: int, weights: Weights, last: bool = False) -> None:
        """Start the evaluation of `weights` with the current counters; the `last` one runs all suites."""
        counters = self.counters
        row = {"step": step, "time": time.time(), "samples": counters.samples, "prompts": counters.prompts}
        self.last_step = step
        suites = self.recipe.evaluation.due(self.started, last)
        self.started += 1
        self._start(row | counters.json(), weights, suites)

    def write_finished(self, stop: threading.Event | None = None, most: int = MAX_PENDING) -> bool:
        """Write finished evaluations; wait until at most `most` are in progress or `stop` is set.

        Returns:
            Whether at most `most` are in progress.

        Raises:
            EvaluationError: an evaluation cannot be made; it stays pending.
        """
        while self._pending:
            future = self._pending[0].future
            # Wait in short intervals: a signal sets `stop` but cannot wake a thread that waits for a future.
            while len(self._pending) > most and not future.done() and not (stop and stop.is_set()):
                self.activities.waits_for_evaluation()
                wait([future], timeout=_MOMENT)
            if not future.done():
                break
            try:
                result = future.result()
            except ScalerlError as error:
                raise EvaluationError(f"{self.writer.path}: {error}") from error
            # Pop it only with its result: after an error the checkpoint still has it for the resume.
            self._write(self._pending.popleft(), result)
        return len(self._pending) <= most

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs; evaluations in progress are started again, from their weights."""
        return {
            "prompt_set": self._sets[HELDOUT][0],
            "suites": {name: found for name, (found, _) in self._sets.items() if name != HELDOUT},
            "last_step": self.last_step,
            "started": self.started,
            "pending": [[one.row, dict(one.weights), list(one.suites)] for one in self._pending],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self.last_step, self.started = state["last_step"], state["started"]
        for row, weights, suites in state["pending"]:
            # A resume may have other suites.
            self._start(row, WeightStream.of(weights), [name for name in suites if name in self._samples])

    def _start(self, row: dict[str, Any], weights: Weights, suites: Sequence[str]) -> None:
        held = hold(weights)
        self._pending.append(_Pending(row, held, suites, self.evaluate(held, row["step"], suites)))

    def _write(self, pending: _Pending, result: EvaluationResult) -> None:
        self.counters.add_evaluation(result.seconds, result.startup)
        row = pending.row
        # The row has the counters at the start of this evaluation; only its own cost is added.
        seconds = row["device_seconds"] | {"evaluate": self.counters.evaluate_seconds}
        # Weights with NaN sample nonsense, and its pass rate of 0 would look like a genuine one.
        if not math.isfinite(result.entropy):
            raise DivergedError(row["step"], "the model's probabilities are not finite any more")
        row = row | {"device_seconds": seconds}
        self.writer.samples(result.samples)  # first: an evaluation on record has its completions on record
        for name, of_suite in result.downstream.items():
            line = suite_row(name, self._point(row, name, of_suite), *self._sets[name], of_suite.correct_P)
            self.writer.downstream(line)
            self.on_suite(line)
        point = self._point(row, HELDOUT, result)
        self.writer.evaluation(point, *self._sets[HELDOUT], result.correct_P)
        self.on_point(point, result, pending.weights)

    def _point(self, row: Mapping[str, Any], name: str, result: EvaluationResult) -> EvalPoint:
        n, n_samples = len(self._sets[name][1]), self._samples[name]
        spread = mean_p_1mp(result.correct_P, n_samples)
        return EvalPoint.from_json(
            {
                **row,
                "pass_rate": float(result.correct_P.sum()) / (n * n_samples),
                "version": result.version,
                "n_prompts": n,
                "n_samples": n_samples,
                "mean_p_1mp": None if math.isnan(spread) else spread,
                "failed": result.failed,
                "truncated": result.truncated,
                "interrupted": result.interrupted,
                "mean_length": result.mean_length,
                "entropy": result.entropy,
            }
        )


def before_training(point: EvalPoint) -> list[str]:
    """Return warnings about training the model as it is, from the evaluation of the untrained model."""
    lines: list[str] = []
    if point.pass_rate == 0:
        lines.append(
            f"the model solves none of {point.n_prompts:,} held-out prompts: where rewards are only right or "
            "wrong, nothing is learnt from groups that are all wrong; look at samples.jsonl, and try easier "
            "problems or another template"
        )
    if point.truncated >= _MANY_CUT:
        lines.append(
            f"{point.truncated:.0%} of the model's completions are cut, and fail: "
            "raise context.thinking or context.answer, or end them by `stop`"
        )
    return lines
