"""The process of the trackers: it takes what the training loop sends, makes the forecasts, and logs.

Every tracker has a thread and a queue, and the forecasts have, so that one that hangs holds up no other.
At the end the process waits so long and no longer; what hangs then ends with it.

Threads of the trainer would not do. Where W&B's server does not answer, its hook at the exit of Python holds
that up: by 83 s with wandb 0.31.0. MLflow and trackio print to standard output, which is the command's. And
the fits of the forecasts would compete with the training for the interpreter's lock.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from scalerl.errors import ScalerlError, brief_error
from scalerl.files import write_atomically
from scalerl.jsonl import dumps, read_object
from scalerl.record.reader import EvalPoint, RunRecord
from scalerl.rl.tracking import metrics
from scalerl.rl.tracking.tracker import Status, TrackedRun, Tracker
from scalerl.rl.workers.process import STOPPING

MOST_ROWS = 1000
"""That wait for a tracker, or for this process; what comes while there are so many is not logged."""
MOST_FAILURES = 10
"""In a row, after which a tracker is given up."""
FORECAST_SECONDS = 5.0
"""The longest that the end of a run waits for forecasts; what is not made then is left out."""
KEPT = "tracking.json"
"""In the run folder: what trackers need to go on with a run."""


@dataclass(frozen=True)
class Setup:
    """What the process is told at its start."""

    trackers: Sequence[Tracker]
    run: TrackedRun
    forecaster: Callable[[RunRecord, str, float], Mapping[str, Any]] | None
    axis: str
    end: float
    """Of the budget, on that axis."""
    close_seconds: float


@dataclass(frozen=True)
class TrackedRow:
    """Metrics at a step, at Unix seconds."""

    step: int
    time: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class End:
    """Of the run: the last that is sent."""

    status: Status


def work(parent: Connection) -> None:
    """Log what comes until the end is sent, or nobody is there to send."""
    for number in STOPPING:  # the trainer answers them, and says when it ends
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # standard output is the command's
    say = _Speaker(parent)
    try:
        setup: Setup = parent.recv()
    except EOFError:
        return
    except Exception as error:  # a tracker of a module that is not found here
        say(f"the trackers cannot be loaded ({brief_error(error)})")
        return
    kept = _Kept(setup.run, say)
    lanes = [_Lane(tracker, kept, say) for tracker in setup.trackers]
    logging = threading.Lock()  # rows come from this thread and from that of the forecasts

    def log(row: TrackedRow) -> None:
        with logging:
            for lane in lanes:
                lane.put(row)

    forecasts = _Forecasts(setup, say, log)
    status = _receive(parent, log, forecasts)
    forecasts.end(forecast_seconds(setup.close_seconds))
    _close(lanes, status, setup.close_seconds, say)
    os._exit(0)  # threads that hang, and what libraries do at an exit, are not waited for


def forecast_seconds(close_seconds: float) -> float:
    """That the end of a run waits for forecasts, before trackers have theirs."""
    return min(close_seconds, FORECAST_SECONDS)


def _receive(parent: Connection, log: Callable[[TrackedRow], None], forecasts: _Forecasts) -> Status:
    """Pass on what comes until the end of the run, whose status it returns."""
    while True:
        try:
            item = parent.recv()
        except (EOFError, OSError):  # the trainer has died
            return "failed"
        if isinstance(item, End):
            return item.status
        if isinstance(item, EvalPoint):
            forecasts.put(item)
        else:
            log(item)


def _close(lanes: Sequence[_Lane], status: Status, seconds: float, say: _Speaker) -> None:
    until = time.monotonic() + seconds
    for lane in lanes:
        lane.end(status)
    for lane in lanes:
        lane.join(max(until - time.monotonic(), 0.0))
    for lane in lanes:
        if lane.is_alive():
            say(f"{lane.tracker.name} was not done {seconds:g} s after the end: {lane.waiting} rows waited")
        if lane.lost:
            say(f"{lane.tracker.name}: {lane.lost} of {lane.rows} rows were not logged")


class _Lane(threading.Thread):
    """A tracker, its thread, and the rows that wait for it."""

    def __init__(self, tracker: Tracker, kept: _Kept, say: _Speaker) -> None:
        super().__init__(daemon=True)
        self.tracker = tracker
        self.rows = self.lost = 0
        self._kept, self._say = kept, say
        self._queue: queue.SimpleQueue[TrackedRow | End] = queue.SimpleQueue()
        self._failures = 0
        self.start()

    @property
    def waiting(self) -> int:
        """Rows that are not logged yet."""
        return self._queue.qsize()

    def put(self, row: TrackedRow) -> None:
        """Log it, when its turn comes; it is lost where too many wait."""
        self.rows += 1
        if self.waiting >= MOST_ROWS:
            self.lost += 1
        else:
            self._queue.put(row)

    def end(self, status: Status) -> None:
        """Close it after the rows that wait."""
        self._queue.put(End(status))

    def run(self) -> None:
        """Open, log, close; whatever is raised is said, and no more than that."""
        is_open = self._try(self._open, "was not opened, and is given up")
        if is_open:  # it is to be closed, whether or not what it returned can be kept
            self._try(self._keep, "begins anew on a resume, as what it needs is not kept")
        while not isinstance(item := self._queue.get(), End):
            if not is_open or self._failures >= MOST_FAILURES:
                self.lost += 1
            else:
                self._log(item)
        if is_open:
            self._try(lambda: self.tracker.close(item.status), "was not closed")

    def _open(self) -> None:
        self._opened = self.tracker.open(self._kept.of(self.tracker.name))

    def _keep(self) -> None:
        self._kept.keep(self.tracker.name, self._opened)

    def _log(self, row: TrackedRow) -> None:
        said = "loses rows" if not self.lost else ""
        if self._failures == MOST_FAILURES - 1:
            said = f"is given up after {MOST_FAILURES} rows that failed"
        if self._try(lambda: self.tracker.log(row.step, row.time, row.metrics), said):
            self._failures = 0
        else:
            self._failures, self.lost = self._failures + 1, self.lost + 1

    def _try(self, do: Callable[[], None], otherwise: str) -> bool:
        try:
            do()
        except BaseException as error:  # libraries end threads by SystemExit, too
            if otherwise:
                self._say(f"{self.tracker.name} {otherwise} ({brief_error(error)}); training goes on")
            return False
        return True


class _Forecasts(threading.Thread):
    """The forecast of the run's end after every evaluation: that of `scalerl fit` at that moment.

    They have a thread of their own, so that neither rows nor the end of the run wait for a fit.
    """

    def __init__(self, setup: Setup, say: _Speaker, log: Callable[[TrackedRow], None]) -> None:
        super().__init__(daemon=True)
        self._setup, self._say, self._log = setup, say, log
        self._forecaster = setup.forecaster
        self._waiting: deque[EvalPoint] = deque()
        self._changed = threading.Condition()
        self._over = False
        self.start()

    def put(self, point: EvalPoint) -> None:
        """Log an evaluation, with the forecast from all up to it where there is one."""
        with self._changed:
            self._waiting.append(point)
            self._changed.notify_all()

    def run(self) -> None:
        """One after another; the first of those that wait is the one under way."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                point = self._waiting[0]
            forecast = self._forecast(point)
            with self._changed:
                if self._over:
                    return
                self._waiting.popleft()
                self._log_with(point, forecast)
                self._changed.notify_all()

    def end(self, seconds: float) -> None:
        """Wait so long for forecasts, and log the evaluations that are left without them."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, seconds)
            self._over = True
            for point in self._waiting:
                self._log_with(point, {})
            if n := len(self._waiting):
                self._say(f"{n} of the last forecasts were not made in time, and are not logged")

    def _log_with(self, point: EvalPoint, forecast: dict[str, float]) -> None:
        self._log(TrackedRow(point.step, point.time, metrics.of_evaluation(point) | forecast))

    def _forecast(self, point: EvalPoint) -> dict[str, float]:
        if self._forecaster is None:
            return {}
        try:
            record = RunRecord.read(self._setup.run.folder)
            so_far = replace(record, evals=tuple(one for one in record.evals if one.step <= point.step))
            return metrics.of_forecast(self._forecaster(so_far, self._setup.axis, self._setup.end))
        except ScalerlError:  # too early to say anything
            return {}
        except BaseException as error:
            self._say(f"no more forecasts are logged ({brief_error(error)}); training goes on")
            self._forecaster = None
            return {}


class _Kept:
    """tracking.json: what each tracker needs to go on, by its name."""

    def __init__(self, run: TrackedRun, say: _Speaker) -> None:
        self._run, self._say = run, say
        self._path = run.folder / KEPT
        self._lock = threading.Lock()
        try:
            self._all: dict[str, Any] = read_object(self._path) if self._path.exists() else {}
        except ScalerlError as error:
            say(f"{error}; trackers begin anew")
            self._all = {}

    def of(self, name: str) -> TrackedRun:
        """The run as this tracker is to see it."""
        kept = self._all.get(name)
        return replace(self._run, kept=kept if isinstance(kept, dict) else {})

    def keep(self, name: str, values: Mapping[str, str]) -> None:
        """For the next resume."""
        if where := values.get("where"):
            self._say(f"{name}: {where}")
        with self._lock:
            known = self._all | {name: dict(values)}
            text = dumps(known, indent=2) + "\n"
            self._all = known  # only what JSON takes: the others are to be kept, too
            write_atomically(self._path, text)


class _Speaker:
    """Tells the trainer what the user is to hear; from any thread."""

    def __init__(self, parent: Connection) -> None:
        self._parent, self._lock = parent, threading.Lock()

    def __call__(self, text: str) -> None:
        with self._lock, suppress(OSError):  # nobody is there
            self._parent.send(f"tracking: {text}")
