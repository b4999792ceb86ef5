"""The side of the training loop: it queues rows for the worker of the trackers, and never waits."""

from __future__ import annotations

import logging
import math
import pickle
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from scalerl.errors import PausedError, ScalerlError, WorkerError
from scalerl.jsonl import plain
from scalerl.record.evaluation import EvalPoint
from scalerl.rl.tracking import metrics
from scalerl.rl.tracking.process import MOST_ROWS, End, Setup, TrackedRow, log_run
from scalerl.rl.workers.backend import Message, WorkerLostError
from scalerl.rl.workers.pool import PoolWorker, WorkerPool
from scalerl.rl.workers.processes import Processes

_LOG = logging.getLogger("scalerl")
MOST_RESTARTS = 2
"""How often the process of a run's trackers is restarted."""
_INTERVAL = 0.2  # seconds between checks for new rows


class TrackingSender:
    """Sends a run to its trackers in another process; a context whose exit waits for them a limited time.

    A thread runs the pool of that process, so that the training loop never waits.
    """

    def __init__(self, setup: Setup) -> None:
        self._queue: queue.SimpleQueue[TrackedRow | EvalPoint | End] = queue.SimpleQueue()
        self._seconds, self._ends, self._dropped = setup.end_seconds, math.inf, 0
        self._pool = None
        if setup.trackers:
            self._pool = _TrackerPool(setup)
            # A daemon thread, as a tracker that hangs must not keep the interpreter from exiting.
            self._thread = threading.Thread(target=self._run, args=[self._pool], daemon=True)
            self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._pool is None:
            return
        stopped = kind is not None and issubclass(kind, KeyboardInterrupt | PausedError)
        # Set the deadline before `End` is queued, as the thread may read both at once.
        self._ends = time.monotonic() + self._seconds
        self._queue.put(End("stopped" if stopped else "failed" if kind else "finished"))
        try:
            self._thread.join()
        finally:  # even after a second Ctrl-C
            self._pool.kill()
        # Safe without a lock, as the thread that reads the queue has ended.
        left = [self._queue.get() for _ in range(self._queue.qsize())]
        rows = [*self._pool.untaken, *left]
        if lost := self._dropped + sum(not isinstance(row, End) for row in rows):
            _LOG.warning("tracking: %d rows were not logged", lost)

    def step(self, row: Mapping[str, Any]) -> None:
        """Send a line of steps.jsonl."""
        self._put(TrackedRow(row["step"], row["time"], metrics.of_step(row)))

    def suite(self, row: Mapping[str, Any]) -> None:
        """Send a line of downstream.jsonl."""
        self._put(TrackedRow(row["step"], row["time"], metrics.of_suite(row)))

    def finding(self, row: Mapping[str, Any]) -> None:
        """Send a line of alarms.jsonl."""
        self._put(TrackedRow(row["step"], row["time"], metrics.of_finding(row)))

    def samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send lines of samples.jsonl, of one step and source."""
        if rows:
            self._put(TrackedRow(rows[0]["step"], time.time(), samples=plain(rows)))

    def evaluation(self, point: EvalPoint) -> None:
        """Send an evaluation that is on record."""
        self._put(point)

    def _put(self, item: TrackedRow | EvalPoint) -> None:
        # Rows beyond the bound are dropped, as a hanging tracker must not take memory or delay training.
        if self._pool is not None and self._queue.qsize() < MOST_ROWS:
            self._queue.put(item)
        else:
            self._dropped += 1

    def _run(self, pool: _TrackerPool) -> None:
        """Keep the worker running, and send it rows, until it has closed the trackers."""
        number = 0
        try:
            pool.start()
            while not pool.ended:
                # At most MOST_ROWS are in the pool, which bounds the rows to resend after a lost process.
                for _ in range(min(MOST_ROWS - len(pool.untaken), self._queue.qsize())):
                    pool.add(number, self._queue.get())
                    number += 1
                pool.poll(_INTERVAL)
                if time.monotonic() > self._ends:
                    _LOG.warning("tracking: its process was killed; not all may be logged")
                    break
        except ScalerlError as error:
            _LOG.warning("tracking: %s; nothing more is logged, and training goes on", error)
        pool.kill()


class _TrackerPool(WorkerPool[PoolWorker]):
    """The pool of the single worker, which takes rows in order; rows not taken by a lost one are kept."""

    noun, role = "tracking process", "track"

    def __init__(self, setup: Setup) -> None:
        processes = Processes(parents=True, outlive=setup.end_seconds)
        super().__init__([PoolWorker("the tracking process", 0)], processes, log_run, [pickle.dumps(setup)])
        self.ended = False

    @property
    def untaken(self) -> list[Any]:
        """Rows that no worker has taken."""
        return [*self._waiting.values(), *(row for w in self._workers for row in w.in_flight.values())]

    def _received(self, worker: PoolWorker, message: Message) -> None:
        if message.kind == "report":
            _LOG.warning("tracking: %s", message.value)
        elif message.kind == "taken":
            self.complete(worker, message.value)
        elif message.kind == "ended":
            self.ended = True

    def _check_losses(self, worker: PoolWorker, error: WorkerLostError) -> None:
        if len(self.lost) > MOST_RESTARTS:
            raise WorkerError(f"{error}, {len(self.lost)} times")
