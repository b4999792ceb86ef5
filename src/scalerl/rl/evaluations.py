"""The evaluations of a run: asked for in order, made beside the training, and recorded in order."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import BrokenExecutor, Future
from dataclasses import dataclass, field
from typing import Any

from scalerl.errors import DivergedError, WorkerError
from scalerl.record import EvalPoint, mean_p_1mp
from scalerl.rl.counters import RunCounters
from scalerl.rl.evaluate import Evaluate, Evaluation
from scalerl.rl.types import Weights
from scalerl.run_writer import RunWriter

MAX_PENDING = 3
"""Evaluations under way before training waits for the oldest."""


@dataclass(frozen=True)
class _Pending:
    """An evaluation under way, and the counters at which it was asked for."""

    row: dict[str, Any]
    weights: Weights
    future: Future[Evaluation]


@dataclass
class Evaluations:
    """Evaluations under way, written in the order in which they were asked for."""

    evaluate: Evaluate
    writer: RunWriter
    prompt_ids: list[str]
    prompt_set: str
    n_samples: int
    counters: RunCounters
    on_point: Callable[[EvalPoint], None]
    last_step: int = -1
    """Step of the last evaluation asked for."""
    _pending: deque[_Pending] = field(default_factory=deque)

    def ask(self, step: int, weights: Weights) -> None:
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
        self._begin(now, weights)

    def write_finished(self, wait: bool = False) -> None:
        """Write what is done; with `wait`, all of it."""
        while self._pending and (wait or self._pending[0].future.done()):
            self._write_first()

    def state(self) -> dict[str, Any]:
        """What `restore` needs; those under way are begun again, with their weights."""
        return {
            "prompt_set": self.prompt_set,
            "last_step": self.last_step,
            "pending": [[asked.row, dict(asked.weights)] for asked in self._pending],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        self.last_step = state["last_step"]
        for row, weights in state["pending"]:
            self._begin(row, weights)

    def _begin(self, row: dict[str, Any], weights: Weights) -> None:
        try:
            future = self.evaluate(weights, row["step"])
        except BrokenExecutor as error:
            raise self._died() from error
        self._pending.append(_Pending(row, weights, future))

    def _write_first(self) -> None:
        asked = self._pending.popleft()
        try:
            result = asked.future.result()
        except BrokenExecutor as error:
            self._pending.clear()
            raise self._died() from error
        self._write(asked.row, result)

    def _died(self) -> WorkerError:
        what = "the evaluation process died (out of memory?)"
        return WorkerError(f"{self.writer.path}: {what}; what was written before is kept")

    def _write(self, row: dict[str, Any], result: Evaluation) -> None:
        self.counters.evaluate_seconds += result.seconds
        seconds = row["device_seconds"] | {"evaluate": self.counters.evaluate_seconds}
        if not math.isfinite(result.entropy):
            raise DivergedError(row["step"], "the model's probabilities are not finite any more")
        n = len(self.prompt_ids)
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
        self.writer.evaluation(point, self.prompt_set, self.prompt_ids, result.correct_P)
        self.on_point(point)
