"""Evaluations beside the training, in a process of their own that is started again where it is lost.

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
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from scalerl.errors import ScalerlError, WorkerError, brief_error
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.config.settings import Timeouts
from scalerl.rl.placement.evaluate import EvaluationResult, Evaluator
from scalerl.rl.types import Prompt, Weights
from scalerl.rl.workers.outbox import Outbox
from scalerl.rl.workers.process import follow_the_parent, masked_signals
from scalerl.rl.workers.supervision import Watchdog, WorkerLostError

_LOG = logging.getLogger("scalerl")
_SPAWN = get_context("spawn")
MOST_RESTARTS = 2
"""Workers that are started again for one evaluation."""
_LOOK = 0.5  # seconds between two looks at a worker
_BEAT = 0.5  # seconds between two heartbeats of a worker that makes progress
_PAUSE = 0.5  # seconds before a worker is started again; they double


class EvaluationWorker(Protocol):
    """A process that evaluates, one evaluation at a time; it starts by itself."""

    @property
    def beats(self) -> int:
        """A number that rises with its progress."""
        ...

    @property
    def started(self) -> bool:
        """Whether it has loaded its model."""
        ...

    @property
    def startup(self) -> float:
        """Seconds that its start has taken so far."""
        ...

    def begin(self, weights: Any, version: int) -> None:
        """Evaluate `weights`, once it has started."""
        ...

    def poll(self, seconds: float) -> EvaluationResult | None:
        """The outcome; None where it has not come within `seconds`.

        Raises:
            WorkerLostError: the process has exited.
            ScalerlError: the evaluation has failed, as it would in any other process.
        """
        ...

    def kill(self, why: WorkerLostError | None = None) -> None:
        """End the process now; `why` it is lost, where it is."""
        ...


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
        # Python would end the process by SIGTERM, which it ignores.
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
        """End the worker at once; what it has not done by now is done when the run is resumed."""
        with self._lock:
            self._closed.set()
        self._queue.put(None)
        self._kill()
        self._thread.join()
        atexit.unregister(self._at_exit)

    def _run(self) -> None:
        with suppress(WorkerLostError, CancelledError):  # the first evaluation tells
            self._started()
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
                self._discard(error)
                if self._closed.is_set():
                    break
                if attempt == MOST_RESTARTS:
                    times = f"{attempt + 1} times in a row"
                    raise WorkerError(f"evaluation at step {version}: {error}, {times}") from error
                again = f"a new process is started, and the evaluation of step {version} made again"
                _LOG.warning("%s; %s", error, again)
            except ScalerlError:
                self._discard(None)
                raise
            if self._closed.wait(_PAUSE * 2**attempt):
                break
        raise CancelledError

    def _attempt(self, weights: Any, version: int) -> EvaluationResult:
        worker = self._started()
        worker.begin(weights, version)
        watchdog, beats = self._watchdog(worker, version), worker.beats
        while (outcome := worker.poll(_LOOK)) is None:
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

    def _started(self) -> EvaluationWorker:
        """The worker; another one where there is none."""
        with self._lock:  # which `close` takes before it kills the worker
            if self._closed.is_set():
                raise CancelledError
            if self._worker is None:
                try:
                    self._worker = self._start()
                except OSError as error:  # no memory, or too many processes
                    raise WorkerLostError(f"no process for evaluations ({error.strerror})") from error
            return self._worker

    def _discard(self, why: WorkerLostError | None) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            self._startup += worker.startup
            worker.kill(None if self._closed.is_set() else why)

    def _kill(self) -> None:
        if (worker := self._worker) is not None:
            worker.kill()


class EvaluationProcess:
    """A worker on this machine; see `EvaluationWorker`."""

    def __init__(self, recipe: Recipe, model_folder: str, prompts: Sequence[Prompt]) -> None:
        self.beats = 0
        self._began, self._startup = time.perf_counter(), 0.0
        self._channel, theirs = _SPAWN.Pipe()
        # No other arguments: Python waits until a process has read those, even where it is dead.
        self._process = _SPAWN.Process(target=serve, name="evaluation", args=(theirs,), daemon=True)
        with masked_signals():
            self._process.start()
        theirs.close()
        self._outbox = Outbox(self._channel)
        # All processes of a machine have one `perf_counter`.
        self._outbox.put((recipe.without_prompts(), model_folder, prompts, self._began))

    @property
    def started(self) -> bool:
        """See `EvaluationWorker`."""
        return self._startup > 0

    @property
    def startup(self) -> float:
        """See `EvaluationWorker`."""
        return self._startup or time.perf_counter() - self._began

    def begin(self, weights: Weights, version: int) -> None:
        """See `EvaluationWorker`."""
        self._outbox.put((dict(weights), version))

    def poll(self, seconds: float) -> EvaluationResult | None:
        """See `EvaluationWorker`."""
        ends = time.monotonic() + seconds
        try:
            while self._channel.poll(max(ends - time.monotonic(), 0.0)):
                what, value = self._channel.recv()
                self.beats += 1
                if what == "started":
                    self._startup = value
                elif what == "done":
                    return value
                elif what == "failed":
                    raise value
                elif what == "lost":
                    raise WorkerLostError(f"the evaluation process is lost: {value}")
        except (EOFError, OSError):
            raise WorkerLostError(f"the evaluation process is lost: {self._ended()}") from None
        return None

    def kill(self, why: WorkerLostError | None = None) -> None:
        """See `EvaluationWorker`."""
        self._process.kill()
        self._process.join()
        self._outbox.close()

    def _ended(self) -> str:
        self._process.join(timeout=10)
        status = self._process.exitcode
        if status is not None and status < 0:
            name = signal.Signals(-status).name
            return f"killed by {name}" + " (out of memory?)" * (name == "SIGKILL")
        return f"it exited with status {status}"


# -- in the process ----------------------------------------------------------------------------------------


def serve(channel: Connection) -> None:
    """Make the evaluations that come, until the channel is closed."""
    follow_the_parent()
    torch.set_num_threads(1)
    beaten = time.monotonic()

    def beat() -> None:
        nonlocal beaten
        if time.monotonic() - beaten >= _BEAT:
            beaten = time.monotonic()
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
