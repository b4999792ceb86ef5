"""Evaluations beside the training, in a process of their own that is replaced where it is lost.

    EvaluatorAside     queues evaluations; its thread has them made in order, by one worker at a time
      EvaluationWorker   a process that evaluates: `EvaluationProcess` here, or an actor on a cluster
        Evaluator          the evaluation itself, in that process

A worker that exits, or makes no progress until its deadline, is replaced, and its evaluation made again from
the weights that are held: the result is a function of weights and seed, so that it is the same. An evaluation
that has lost `MOST_RESTARTS` + 1 workers fails with a `WorkerError`.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from scalerl.errors import ScalerlError, WorkerError, brief_error
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.config.settings import Timeouts
from scalerl.rl.placement.evaluate import EvaluationResult, Evaluator
from scalerl.rl.types import Prompt, Weights
from scalerl.rl.workers.child import ChildProcess
from scalerl.rl.workers.process import follow_the_parent
from scalerl.rl.workers.supervision import Watchdog, WorkerLostError, backoff

_LOG = logging.getLogger("scalerl")
MOST_RESTARTS = 2
"""Workers that are started again for one evaluation."""
_INTERVAL = 0.5  # seconds between two polls of a worker, and between two of its heartbeats


class EvaluationWorker(ABC):
    """A process that makes one evaluation at a time; it starts by itself."""

    beats = 0
    """Rises with its progress."""
    started = False
    """Whether it has loaded its model."""
    startup = 0.0
    """Seconds that its start has taken, once it has started or was killed."""

    @abstractmethod
    def submit(self, weights: Any, version: int) -> None:
        """Evaluate `weights`, once the worker has started."""

    @abstractmethod
    def poll(self, seconds: float) -> EvaluationResult | None:
        """Return the result; None where it has not come within `seconds`.

        Raises:
            WorkerLostError: the process has exited.
            ScalerlError: the evaluation has failed, as it would in any other process.
        """

    @abstractmethod
    def kill(self, why: WorkerLostError | None = None) -> None:
        """Kill the process; `why` it is lost, where it is."""


class EvaluatorAside:
    """Evaluates by a worker, in order, while training goes on.

    `start` makes a worker; `pack` makes what it is sent of the weights, held until they are evaluated.
    """

    def __init__(
        self,
        start: Callable[[], EvaluationWorker],
        timeouts: Timeouts,
        pack: Callable[[Weights], Any] = dict,
    ) -> None:
        self._start, self._timeouts, self._pack = start, timeouts, pack
        self._worker: EvaluationWorker | None = None
        self._closed, self._lock = threading.Event(), threading.Lock()
        self._startup = self._reported = 0.0
        self._queue: queue.SimpleQueue[tuple[Any, int, Future[EvaluationResult]] | None] = queue.SimpleQueue()
        # Python would end the process by SIGTERM, which it does not answer.
        self._at_exit = atexit.register(self._kill)
        # A daemon: the end of the interpreter must not wait for it.
        self._thread = threading.Thread(target=self._run, name="evaluation", daemon=True)
        self._thread.start()

    def __call__(self, weights: Weights, version: int) -> Future[EvaluationResult]:
        """Queue an evaluation of `weights`."""
        future: Future[EvaluationResult] = Future()
        self._queue.put((self._pack(weights), version, future))
        return future

    def close(self) -> None:
        """Kill the worker; what it has not done by now is done when the run is resumed."""
        with self._lock:
            self._closed.set()
        self._queue.put(None)
        self._kill()
        self._thread.join()
        atexit.unregister(self._at_exit)

    def _run(self) -> None:
        with suppress(WorkerLostError, CancelledError):  # the first evaluation raises it again
            self._running_worker()
        while (item := self._queue.get()) is not None:
            weights, version, future = item
            try:
                future.set_result(self._evaluate(weights, version))
            except BaseException as error:
                future.set_exception(error)
            del item, weights, future  # they are not to be held until the next one comes
        self._kill()

    def _evaluate(self, weights: Any, version: int) -> EvaluationResult:
        for attempt in range(MOST_RESTARTS + 1):
            try:
                return self._attempt(weights, version)
            except WorkerLostError as error:
                self._release(error)
                if self._closed.is_set():
                    break
                if attempt == MOST_RESTARTS:
                    times = f"{attempt + 1} times in a row"
                    raise WorkerError(f"evaluation at step {version}: {error}, {times}") from error
                again = f"a new process is started, and the evaluation of step {version} made again"
                _LOG.warning("%s; %s", error, again)
            except ScalerlError:
                self._release(None)
                raise
            if self._closed.wait(backoff(attempt)):
                break
        raise CancelledError

    def _attempt(self, weights: Any, version: int) -> EvaluationResult:
        worker = self._running_worker()
        worker.submit(weights, version)
        watchdog, beats = self._watchdog(worker, version), worker.beats
        while (outcome := worker.poll(_INTERVAL)) is None:
            if worker.beats != beats:
                watchdog, beats = self._watchdog(worker, version), worker.beats
            watchdog.check()
            if self._closed.is_set():
                raise CancelledError
        total = self._startup + worker.startup
        startup, self._reported = total - self._reported, total
        return replace(outcome, startup=startup)

    def _watchdog(self, worker: EvaluationWorker, version: int) -> Watchdog:
        timeout = self._timeouts.evaluation if worker.started else self._timeouts.start
        return Watchdog(f"evaluation at step {version}", timeout)

    def _running_worker(self) -> EvaluationWorker:
        with self._lock:  # which `close` takes before it kills the worker
            if self._closed.is_set():
                raise CancelledError
            if self._worker is None:
                try:
                    self._worker = self._start()
                except OSError as error:  # no memory, or too many processes
                    raise WorkerLostError(f"no process for evaluations ({error.strerror})") from error
            return self._worker

    def _release(self, why: WorkerLostError | None) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill(None if self._closed.is_set() else why)
            self._startup += worker.startup

    def _kill(self) -> None:
        if (worker := self._worker) is not None:
            worker.kill()


class EvaluationProcess(EvaluationWorker):
    """A worker on this machine."""

    def __init__(
        self, recipe: Recipe, model_folder: str, prompts: Sequence[Prompt], device: str | None = None
    ) -> None:
        self._began = time.perf_counter()  # all processes of a machine have one `perf_counter`
        self._child = ChildProcess("evaluation", serve, device=device)
        self._child.send((recipe.without_prompts(), model_folder, prompts, self._began))

    def submit(self, weights: Weights, version: int) -> None:
        """See `EvaluationWorker.submit`."""
        self._child.send((dict(weights), version))

    def poll(self, seconds: float) -> EvaluationResult | None:
        """See `EvaluationWorker.poll`."""
        ends = time.monotonic() + seconds
        try:
            while self._child.channel.poll(max(ends - time.monotonic(), 0.0)):
                what, value = self._child.channel.recv()
                self.beats += 1
                if what == "started":
                    self.started, self.startup = True, value
                elif what == "done":
                    return value
                elif what == "failed":
                    raise value
                elif what == "lost":
                    raise WorkerLostError(f"the evaluation is lost: {value}")
        except (EOFError, OSError):
            raise WorkerLostError(f"the evaluation is lost: {self._child.exit_cause()}") from None
        return None

    def kill(self, why: WorkerLostError | None = None) -> None:
        """See `EvaluationWorker.kill`."""
        self._child.kill()
        if not self.started:
            self.startup = time.perf_counter() - self._began


# -- in the process ----------------------------------------------------------------------------------------


def serve(channel: Connection) -> None:
    """Make the evaluations that come, until the channel is closed."""
    follow_the_parent()
    torch.set_num_threads(1)
    sent_at = time.monotonic()

    def beat() -> None:
        nonlocal sent_at
        if time.monotonic() - sent_at >= _INTERVAL:
            sent_at = time.monotonic()
            channel.send(("beat", None))

    with suppress(EOFError, OSError):  # the run has ended
        try:
            recipe, model_folder, prompts, began = channel.recv()
            evaluator = Evaluator(recipe, model_folder, prompts, beat)
            channel.send(("started", time.perf_counter() - began))
            while True:
                weights, version = channel.recv()
                channel.send(("done", evaluator.evaluate(weights, version)))
        except ScalerlError as error:
            channel.send(("failed", error))
        except (EOFError, BrokenPipeError):
            raise
        except Exception as error:  # out of memory, say: another process may do better
            traceback.print_exc()
            channel.send(("lost", brief_error(error)))
