"""The evaluations of a run: when they are due; started, made beside the training, and recorded in order."""

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
    suites: Sequence[str]
    future: Future[EvaluationResult]


@dataclass
class Evaluations:
    """Evaluations under way, written in the order in which they were started."""

    evaluate: Evaluate
    writer: RunWriter
    recipe: Recipe
    counters: RunCounters
    on_point: Callable[[EvalPoint, EvaluationResult, Weights], None]
    """Called with an evaluation that is on record, its outcome, and the weights that it is of."""
    on_suite: Callable[[Mapping[str, Any]], None] = lambda row: None
    """Called with a line of downstream.jsonl that is on record."""
    activities: Activities = field(default_factory=Activities)
    last_step: int = -1
    """Step of the last evaluation that was started."""
    started: int = 0
    """Evaluations that were started."""
    _pending: deque[_Pending] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._sets: dict[str, tuple[str, list[str]]] = {}
        """Hash and ids of the prompts that are evaluated, by name."""
        self._samples: dict[str, int] = {}
        for name, (task, samples) in self.recipe.evaluated.items():
            self._sets[name] = task.heldout_hash, [prompt.id for prompt in task.prompts("heldout")]
            self._samples[name] = samples

    def start(self, step: int, weights: Weights, last: bool = False) -> None:
        """Start the evaluation of `weights`, with the counters as they stand; the `last` has all suites."""
        counters = self.counters
        row = {"step": step, "time": time.time(), "samples": counters.samples, "prompts": counters.prompts}
        self.last_step = step
        suites = self.recipe.evaluation.due(self.started, last)
        self.started += 1
        self._start(row | counters.json(), weights, suites)

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
            self._write(self._pending.popleft(), result)
        return len(self._pending) <= most

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs; those under way are started again, with their weights."""
        return {
            "prompt_set": self._sets[HELDOUT][0],
            "suites": {name: found for name, (found, _) in self._sets.items() if name != HELDOUT},
            "last_step": self.last_step,
            "started": self.started,
            "pending": [[one.row, dict(one.weights), list(one.suites)] for one in self._pending],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
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
        # The row holds the counters at the start of this evaluation; only its own cost is known since.
        seconds = row["device_seconds"] | {"evaluate": self.counters.evaluate_seconds}
        # Weights with NaN sample nonsense, whose pass rate of 0 would look like any other.
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
    """Return what the evaluation of the untrained model says against training it as it is."""
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
