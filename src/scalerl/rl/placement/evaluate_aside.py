"""Evaluations beside training, in a process of their own that is replaced if it is lost.

    EvaluatorAside     queues evaluations; its thread runs them in order, by a pool of one worker
      evaluate           in that worker: an `Evaluator`, which sends heartbeats as it decodes and verifies

A worker that exits, or makes no progress until its deadline, is replaced, and its evaluation is repeated from
the held weights; the result is the same, because it depends only on weights and seed. An evaluation that has
lost `MOST_RESTARTS` + 1 workers fails with a `WorkerError`, and so do all later ones.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from typing import Any

import torch

from scalerl.errors import ScalerlError, WorkerError
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.config.settings import Timeouts
from scalerl.rl.placement.evaluate import EvaluationResult, Evaluator
from scalerl.rl.sync.shared_weights import hold
from scalerl.rl.types import Prompt, Weights
from scalerl.rl.workers.backend import Backend, Channel, Message, WorkerLostError
from scalerl.rl.workers.pool import PoolWorker, WorkerPool
from scalerl.rl.workers.timeline import Timeline

MOST_RESTARTS = 2
"""Most restarts of the worker for one evaluation."""
_Queued = tuple[Any, int, Sequence[str], Future[EvaluationResult]]
_INTERVAL = 0.5  # seconds between two polls of a worker, and between two of its heartbeats


@dataclass(eq=False)
class EvaluationWorker(PoolWorker):
    """The worker of evaluations; its start-up and the wait for resources have a deadline too."""

    version: int = 0
    """Version of the current evaluation."""
    startup: float = 0.0
    """Seconds spent starting its processes since the previous evaluation."""

    @property
    def deadline(self) -> tuple[str, float]:
        """See `PoolWorker.deadline`."""
        return f"evaluation at step {self.version}", self.timeout if self.started else self.start_timeout

    def check(self) -> None:
        """See `PoolWorker.check`."""
        if self.progress_at == math.inf:
            self.note_progress()
        super().check()

    def release(self) -> dict[int, Any]:
        """See `PoolWorker.release`."""
        if self.process and self.process.placed_at and not self.started:
            self.startup += time.monotonic() - self.process.placed_at
        return super().release()


class EvaluatorAside(WorkerPool[EvaluationWorker]):
    """The evaluator in a process of its own, which runs evaluations in order while training goes on.

    `arguments` are those of `evaluate`. `pack` turns weights into the form that is held and sent to the
    worker. `beat` is called by another thread with the number of sampled completions and of all.
    """

    noun, role = "evaluation", "evaluate"
    capacity = 1

    def __init__(
        self,
        backend: Backend,
        arguments: Sequence[Any],
        timeouts: Timeouts,
        pack: Callable[[Weights], Any] = hold,
        events: Timeline | None = None,
        beat: Callable[[int, int], None] = lambda done, of: None,
    ) -> None:
        worker = EvaluationWorker("the evaluation", 0, timeouts.evaluation, timeouts.start)
        super().__init__([worker], backend, evaluate, arguments, events=events)
        self._pack, self._beat = pack, beat
        self._result: EvaluationResult | None = None
        self._queue: queue.SimpleQueue[_Queued | None] = queue.SimpleQueue()
        # A daemon, so that the interpreter's exit does not wait for it.
        self._thread = threading.Thread(target=self._run, name="evaluation", daemon=True)
        self._thread.start()

    def __call__(
        self, weights: Weights, version: int, suites: Sequence[str] = ()
    ) -> Future[EvaluationResult]:
        """Queue an evaluation of `weights`."""
        future: Future[EvaluationResult] = Future()
        self._queue.put((self._pack(weights), version, suites, future))
        return future

    def close(self) -> None:
        """Kill the worker; a resumed run makes the unfinished evaluations."""
        self.kill()
        self._queue.put(None)
        self._thread.join()

    # -- in the thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        failed: BaseException | None = None
        try:
            self.start()
        except BaseException as error:  # each evaluation's future raises it
            failed = error
        while (item := self._queue.get()) is not None:
            weights, version, suites, future = item
            try:
                if failed:
                    raise failed
                future.set_result(self._evaluate(weights, version, suites))
            except BaseException as error:
                failed = error  # it ends the run: a resume makes later evaluations
                future.set_exception(error)
            del item, weights, future  # so that they are not held until the next one arrives
        self.kill()

    def _evaluate(self, weights: Any, version: int, suites: Sequence[str]) -> EvaluationResult:
        (worker,) = self._workers
        worker.version, worker.progress_at, self._result = version, math.inf, None
        self.add(version, (weights, suites))
        while self._result is None:
            if self._ended:
                raise CancelledError
            self.poll(_INTERVAL)
        startup, worker.startup = worker.startup, 0.0
        return replace(self._result, startup=startup)

    def _received(self, worker: EvaluationWorker, message: Message) -> None:
        if message.kind == "sampled":
            self._beat(*message.value)
        elif message.kind == "done":
            self._beat(0, 0)
            self._result = message.value
            self.complete(worker, message.value.version)

    def _started(self, worker: EvaluationWorker, value: float) -> None:
        worker.startup += value
        self._take_part(worker)

    def _failed(self, worker: EvaluationWorker, error: ScalerlError) -> None:
        raise error  # any other process would raise it again

    def _check_losses(self, worker: EvaluationWorker, error: WorkerLostError) -> None:
        if worker.losses > MOST_RESTARTS:
            times = f"{worker.losses} times in a row"
            raise WorkerError(f"evaluation at step {worker.version}: {error}, {times}")

    def _fate(self, work: Mapping[int, Any]) -> str:
        again = "".join(
            f", and the evaluation of step {step} made again" for step in {**work, **self._waiting}
        )
        return f"; a new process is started{again}"


# -- in the process ----------------------------------------------------------------------------------------


def evaluate(
    channel: Channel, recipe: Recipe, model_folder: str, prompts: Mapping[str, Sequence[Prompt]]
) -> None:
    """Run the evaluations that arrive until the channel closes; `prompts` are those of `prompts_of`."""
    torch.set_num_threads(recipe.cpu_threads)
    sent_at = time.monotonic()

    def beat(done: int, of: int) -> None:
        nonlocal sent_at
        if time.monotonic() - sent_at >= _INTERVAL:
            sent_at = time.monotonic()
            channel.send("sampled", (done, of))

    evaluator = Evaluator(recipe, model_folder, prompts, beat)
    channel.send("started", time.perf_counter() - channel.began)
    while True:
        version, (weights, suites) = channel.receive()
        fetch = getattr(weights, "fetch", lambda weights=weights: weights)
        channel.send("done", evaluator.evaluate(fetch(), version, suites))
        del weights, fetch  # frees memory for a whole model
