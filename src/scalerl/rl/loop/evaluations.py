"""The evaluations of a run: when they are due; started, made beside the training, and recorded in order."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import torch

from scalerl.errors import DivergedError, ScalerlError, WorkerError
from scalerl.record.reader import EvalPoint, mean_p_1mp
from scalerl.record.writer import RunWriter
from scalerl.rl.loop.activity import Activities
from scalerl.rl.loop.counters import RunCounters
from scalerl.rl.model.weights import WeightStream
from scalerl.rl.placement.evaluate import Evaluate, EvaluationResult
from scalerl.rl.sync.shared_weights import hold
from scalerl.rl.tasks.task import Task
from scalerl.rl.types import Weights

MAX_PENDING = 3
"""Evaluations under way before training waits for the oldest."""
_MOMENT = 0.1
"""Seconds between two checks whether the run is to stop."""
_MANY_CUT = 0.25
"""Share of truncated completions of the untrained model that is worth a warning."""


@dataclass
class Agenda:
    """What is due at which share of the budget: evaluations, and frozen forecasts.

    Evaluations keep their distance where a resume changes the budget: `count` is over the `first` one.
    """

    count: int
    milestones: Sequence[float] = ()
    """Shares of the budget at which a forecast is frozen."""
    due: int = 1
    """The next of `count` evaluations."""
    frozen: int = 0
    """Milestones that have passed."""
    every: int = 0
    """Steps between two evaluations; above 0 it takes the place of `count`."""
    budget: float = 1.0
    first: float = 1.0
    """The budget that the run began with."""

    def evaluates(self, spent: float, step: int = 0) -> bool:
        """Return whether an evaluation is due after `step`; several that one step passes are made once."""
        ends = spent >= self.budget
        if self.every:
            return step % self.every == 0 or ends
        # A step may cost any multiple of the budget.
        before, share = self.due, min(spent, self.budget) / self.first
        # The floor jumps over all that has passed; the loop settles the last, where it is off by one.
        self.due = max(self.due, math.floor(share * self.count))
        while self.due / self.count <= share:
            self.due += 1
        return self.due > before or ends

    def to_freeze(self, share: float) -> bool:
        """Return whether a milestone has been reached whose forecast was not frozen."""
        return self._passed(share) > self.frozen

    def froze(self, share: float) -> None:
        """Note that the forecast was frozen, or cannot be made."""
        self.frozen = self._passed(share)

    def aim_at_new_end(self, share: float) -> None:
        """Have the last milestone that has passed frozen anew: a resume has changed the budget."""
        self.frozen = max(self._passed(share) - 1, 0)

    def _passed(self, share: float) -> int:
        return sum(milestone <= share for milestone in self.milestones)

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs."""
        return {"due": self.due, "frozen": self.frozen}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        self.due, self.frozen = state["due"], state["frozen"]


class EvaluationError(WorkerError):
    """An evaluation cannot be made: its process was lost again and again, or cannot start."""


@dataclass(frozen=True)
class _Pending:
    """An evaluation under way, and the counters at its start."""

    row: dict[str, Any]
    weights: Weights
    future: Future[EvaluationResult]


@dataclass
class Evaluations:
    """Evaluations under way, written in the order in which they were started."""

    evaluate: Evaluate
    writer: RunWriter
    task: Task
    n_samples: int
    counters: RunCounters
    on_point: Callable[[EvalPoint, Sequence[Mapping[str, Any]]], None]
    """Called with an evaluation that is on record, and the completions that are kept of it."""
    activities: Activities = field(default_factory=Activities)
    last_step: int = -1
    """Step of the last evaluation that was started."""
    _pending: deque[_Pending] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._prompt_set = self.task.heldout_hash
        self._prompt_ids = [prompt.id for prompt in self.task.prompts("heldout")]

    def start(self, step: int, weights: Weights) -> None:
        """Start the evaluation of `weights`, with the counters as they stand."""
        counters = self.counters
        row = {"step": step, "time": time.time(), "samples": counters.samples, "prompts": counters.prompts}
        self.last_step = step
        self._start(row | counters.json(), weights)

    def write_finished(self, stop: threading.Event | None = None, most: int = MAX_PENDING) -> bool:
        """Write what is done; wait until `most` at most are under way, or `stop` is set.

        Returns:
            Whether `most` at most are under way.

        Raises:
            EvaluationError: one cannot be made; it is still pending.
        """
        while self._pending:
            future = self._pending[0].future
            # In short waits, as a signal sets `stop` and cannot wake a thread that waits for a future.
            while len(self._pending) > most and not future.done() and not (stop and stop.is_set()):
                self.activities.waits_for_evaluation()
                wait([future], timeout=_MOMENT)
            if not future.done():
                break
            try:
                result = future.result()
            except ScalerlError as error:
                raise EvaluationError(f"{self.writer.path}: {error}") from error
            # Popped once its result is there: after an error a checkpoint still has it, for the resume.
            self._write(self._pending.popleft().row, result)
        return len(self._pending) <= most

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs; those under way are started again, with their weights."""
        return {
            "prompt_set": self._prompt_set,
            "last_step": self.last_step,
            "pending": [[pending.row, dict(pending.weights)] for pending in self._pending],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        self.last_step = state["last_step"]
        for row, weights in state["pending"]:
            # Older checkpoints have arrays.
            self._start(row, WeightStream.of({name: torch.as_tensor(w) for name, w in weights.items()}))

    def _start(self, row: dict[str, Any], weights: Weights) -> None:
        held = hold(weights)
        self._pending.append(_Pending(row, held, self.evaluate(held, row["step"])))

    def _write(self, row: dict[str, Any], result: EvaluationResult) -> None:
        self.counters.add_evaluation(result.seconds, result.startup)
        # The row holds the counters at the start of this evaluation; only its own cost is known since.
        seconds = row["device_seconds"] | {"evaluate": self.counters.evaluate_seconds}
        # Weights with NaN sample nonsense, whose pass rate of 0 would look like any other.
        if not math.isfinite(result.entropy):
            raise DivergedError(row["step"], "the model's probabilities are not finite any more")
        n = len(self._prompt_ids)
        spread = mean_p_1mp(result.correct_P, self.n_samples)
        point = EvalPoint.from_json(
            row
            | {
                "device_seconds": seconds,
                "pass_rate": float(result.correct_P.sum()) / (n * self.n_samples),
                "version": result.version,
                "n_prompts": n,
                "n_samples": self.n_samples,
                "mean_p_1mp": None if math.isnan(spread) else spread,
                "failed": result.failed,
                "truncated": result.truncated,
                "interrupted": result.interrupted,
                "mean_length": result.mean_length,
                "entropy": result.entropy,
            }
        )
        self.writer.samples(result.samples)  # first: an evaluation on record has its completions on record
        self.writer.evaluation(point, self._prompt_set, self._prompt_ids, result.correct_P)
        self.on_point(point, result.samples)


def before_training(point: EvalPoint) -> list[str]:
    """Return what the evaluation of the untrained model says against training it as it is."""
    lines: list[str] = []
    if point.pass_rate == 0:
        asked = f"{point.n_prompts:,} held-out prompts, {point.n_samples} completions each"
        lines.append(
            f"the model solves none of the {asked}: nothing is learnt from groups that are all wrong; "
            "look at samples.jsonl, and try easier problems or another template"
        )
    if point.truncated >= _MANY_CUT:
        lines.append(
            f"{point.truncated:.0%} of the model's completions are cut, and fail: "
            "raise context.thinking or context.answer, or end them by `stop`"
        )
    return lines
