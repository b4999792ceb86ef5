"""The side of the training loop: it sends rows to the process of the trackers, and never waits."""

from __future__ import annotations

import logging
import pickle
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import get_context
from types import TracebackType
from typing import Any

from scalerl.errors import InputError, PausedError, brief_error
from scalerl.jsonl import plain
from scalerl.record.reader import EvalPoint
from scalerl.rl.tracking import metrics
from scalerl.rl.tracking.process import (
    MOST_ROWS,
    End,
    Setup,
    TrackedRow,
    TrackedSamples,
    forecast_seconds,
    log_run,
)
from scalerl.rl.tracking.tracker import Status, Tracker
from scalerl.rl.workers.process import masked_signals

_LOG = logging.getLogger("scalerl")
_GRACE = 5.0
"""Seconds beyond those that the process has for closing, after which it is killed."""


def check_picklable(trackers: Sequence[Tracker], forecaster: Callable[..., Any] | None) -> None:
    """Raise an InputError that names the tracker or forecaster that cannot be sent to another process."""
    for what in (*trackers, forecaster) if trackers else ():
        try:
            pickle.dumps(what)
        except Exception as error:
            raise InputError(
                f"tracking: {what!r} cannot go to another process ({brief_error(error)})"
            ) from None


class TrackingSender:
    """Sends a run to its trackers in another process; a context, whose exit waits for them a limited time.

    Two threads keep the training loop from waiting: `_send` empties a queue into the pipe, and `_receive`
    logs what the process reports.
    """

    def __init__(self, setup: Setup) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._seconds = forecast_seconds(setup.close_seconds) + setup.close_seconds + _GRACE
        self._dropped = self._unsent = 0  # each is counted by one thread
        self._ending = False
        self._process: Any = None
        if not setup.trackers:
            return
        context = get_context("spawn")
        self._ours, theirs = context.Pipe()
        # Only the pipe is an argument: `start` waits until arguments are read, and the setup may be large.
        self._process = context.Process(target=log_run, args=(theirs,), name="trackers")
        try:
            with masked_signals():
                self._process.start()
        except OSError as error:
            self._process = None
            _LOG.warning("tracking: no process for it (%s); training goes on", error.strerror)
            return
        finally:
            theirs.close()
        self._queue.put(setup)
        self._threads = [threading.Thread(target=do, daemon=True) for do in (self._send, self._receive)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> TrackingSender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        stopped = kind is not None and issubclass(kind, KeyboardInterrupt | PausedError)
        status: Status = "stopped" if stopped else "failed" if kind else "finished"
        self._ending = True
        self._queue.put(End(status))
        try:
            self._process.join(self._seconds)
        finally:  # a second Ctrl-C, too
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
                _LOG.warning("tracking: its process was killed; not all may be logged")
        for thread in self._threads:
            thread.join(_GRACE)
        self._ours.close()
        if lost := self._dropped + self._unsent:
            _LOG.warning("tracking: %d rows were not logged", lost)

    def step(self, row: Mapping[str, Any]) -> None:
        """Send a line of steps.jsonl."""
        self._put(TrackedRow(row["step"], row["time"], metrics.of_step(row)))

    def evaluation(self, point: EvalPoint) -> None:
        """Send an evaluation that is on record."""
        self._put(point)

    def finding(self, row: Mapping[str, Any]) -> None:
        """Send a line of alarms.jsonl."""
        self._put(TrackedRow(row["step"], row["time"], metrics.of_finding(row)))

    def samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send lines of samples.jsonl, of one step and source."""
        if rows:
            self._put(TrackedSamples(rows[0]["step"], time.time(), plain(rows)))

    def _put(self, item: TrackedRow | TrackedSamples | EvalPoint) -> None:
        if self._process is None:
            return
        if self._queue.qsize() >= MOST_ROWS:
            self._dropped += 1
        else:
            self._queue.put(item)

    def _send(self) -> None:
        item = None
        while not isinstance(item, End):
            item = self._queue.get()
            try:
                self._ours.send(item)
            except OSError:  # the process has exited, which `_receive` reports
                self._unsent += not isinstance(item, Setup | End)

    def _receive(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                _LOG.warning("%s", self._ours.recv())
        if not self._ending:
            _LOG.warning("tracking: its process exited; nothing more is logged, and training goes on")
