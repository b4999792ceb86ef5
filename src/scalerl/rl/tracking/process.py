"""The worker of the trackers: it receives rows from the training loop, makes the forecasts, and logs.

    trainer --> this thread --> queue of each tracker --> thread of the tracker: open, log ..., close
                this thread --> thread of the forecasts --> queue of each tracker

Each tracker has a thread and a queue, and so have the forecasts, so that a slow one does not delay another.
At the end the process waits for a limited time; threads that hang then end with it.

Threads in the trainer would not be enough. If W&B's server does not answer, its exit hook delays the exit of
Python (by 83 s with wandb 0.31.0). MLflow and trackio print to standard output, which belongs to the command.
And the fits of the forecasts would compete with training for the interpreter's lock.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from scalerl.errors import ScalerlError, brief_error, in_one_line
from scalerl.files import write_atomically
from scalerl.jsonl import dumps, read_object
from scalerl.record.evaluation import EvalPoint
from scalerl.record.reader import RunRecord
from scalerl.rl.tracking import metrics
from scalerl.rl.tracking.tracker import SampleTracker, Status, TrackedRun, Tracker
from scalerl.rl.workers.backend import Channel
from scalerl.rl.workers.signals import STOPPING

MOST_ROWS = 1000
"""The most rows that wait for a tracker, or for this process; further ones are dropped, and counted."""
MOST_FAILURES = 10
"""Failures in a row after which nothing more is logged to a tracker."""
FORECAST_SECONDS = 5.0
"""The longest that the end of a run waits for forecasts; those not made by then are left out."""
GRACE = 5.0
"""Seconds beyond those for forecasts and for closing, after which the process is killed."""
KEPT = "tracking.json"
"""File in the run folder with what trackers need to resume a run."""


@dataclass(frozen=True)
class Setup:
    """The arguments with which the process is started."""

    trackers: Sequence[Tracker]
    run: TrackedRun
    forecaster: Callable[[RunRecord, str, float], Mapping[str, Any]] | None
    axis: str
    end: float
    """The budget, on that axis."""
    close_seconds: float

    @property
    def forecast_seconds(self) -> float:
        """How long the end of a run waits for forecasts, before the trackers have `close_seconds`."""
        return min(self.close_seconds, FORECAST_SECONDS)

    @property
    def end_seconds(self) -> float:
        """How long the process has for the end of a run."""
        return self.forecast_seconds + self.close_seconds + GRACE


@dataclass(frozen=True)
class TrackedRow:
    """Metrics, or completions of one source, to log at a step and a time in Unix seconds."""

    step: int
    time: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    samples: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class End:
    """The last message: the end of the run."""

    status: Status


Report = Callable[[str], None]
"""Sends a line to the trainer, which logs it as a warning."""


def log_run(channel: Channel, pickled: bytes) -> None:
    """Log received rows until the run ends or the trainer exits; `pickled` is a `Setup`.

    Raises:
        InputError: the trackers cannot be loaded.
    """
    for number in STOPPING:  # for processes of trackers too: the trainer handles signals, and sends `End`
        signal.signal(number, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # standard output belongs to the command

    def report(text: str) -> None:
        channel.send("report", text)

    with in_one_line("the trackers cannot be loaded"):  # the module of one may not be found here
        setup: Setup = pickle.loads(pickled)
    kept = _Kept(setup.run.folder / KEPT, report)
    trackers = [_TrackerThread(tracker, setup.run, kept, report) for tracker in setup.trackers]
    logging = threading.Lock()  # rows come from this thread and from the forecasts' thread

    def log(row: TrackedRow) -> None:
        with logging:
            for tracker in trackers:
                tracker.put(row)

    forecasts = _ForecastThread(setup, report, log)
    status: Status = "failed"
    channel.send("started")
    with suppress(EOFError):  # the trainer has exited
        while not isinstance((message := channel.receive())[1], End):
            number, item = message
            if isinstance(item, EvalPoint):
                forecasts.put(item)
            else:
                log(item)
            channel.send("taken", number)
        status = message[1].status
    forecasts.stop(setup.forecast_seconds)
    deadline = time.monotonic() + setup.close_seconds
    for thread in trackers:
        thread.waiting.put(End(status))
    for thread in trackers:
        thread.join(max(deadline - time.monotonic(), 0.0))
    for thread in trackers:
        thread.report_losses(setup.close_seconds)
    channel.send("ended")
    with suppress(EOFError):
        channel.receive()  # the trainer kills this process after receiving "ended"
    os._exit(0)  # without waiting for threads that hang, or for the exit hooks of libraries


class _TrackerThread(threading.Thread):
    """Opens a tracker, logs waiting rows, and closes it; failures are reported, and do not stop anything."""

    def __init__(self, tracker: Tracker, run: TrackedRun, kept: _Kept, report: Report) -> None:
        super().__init__(daemon=True)
        self.waiting: queue.SimpleQueue[TrackedRow | End] = queue.SimpleQueue()
        self._tracker, self._run, self._kept, self._report = tracker, run, kept, report
        self._rows = self._lost = self._failures = 0
        self.start()

    def put(self, row: TrackedRow) -> None:
        """Log a row in its turn, or drop it if too many wait."""
        if row.samples and not isinstance(self._tracker, SampleTracker):
            return
        self._rows += 1
        if self.waiting.qsize() >= MOST_ROWS:
            self._lost += 1
        else:
            self.waiting.put(row)

    def report_losses(self, seconds: float) -> None:
        """Report rows that were not logged by `seconds` after the end."""
        if self.is_alive():
            late = f"was not done {seconds:g} s after the end: {self.waiting.qsize()} rows waited"
            self._report(f"{self._tracker.name} {late}")
        if self._lost:
            self._report(f"{self._tracker.name}: {self._lost} of {self._rows} rows were not logged")

    def run(self) -> None:
        name, opened = self._tracker.name, list[Mapping[str, str]]()
        run = replace(self._run, kept=self._kept.all.get(name, {}))
        is_open = self._try(lambda: opened.append(self._tracker.open(run)), "was not opened, and is given up")
        if is_open:  # it must be closed even if its data cannot be kept
            why = "starts anew on a resume, as its data cannot be kept"
            self._try(lambda: self._kept.keep(name, opened[0]), why)
        while not isinstance(item := self.waiting.get(), End):
            if not is_open or self._failures >= MOST_FAILURES:
                self._lost += 1
            else:
                self._log(item)
        if is_open:
            self._try(lambda: self._tracker.close(item.status), "was not closed")

    def _log(self, row: TrackedRow) -> None:
        text = "loses rows" if not self._lost else ""
        if self._failures == MOST_FAILURES - 1:
            text = f"is given up after {MOST_FAILURES} rows that failed"
        tracker = self._tracker
        if row.samples and isinstance(tracker, SampleTracker):
            logged = self._try(lambda: tracker.log_samples(row.step, row.time, row.samples), text)
        else:
            logged = self._try(lambda: tracker.log(row.step, row.time, row.metrics), text)
        self._failures, self._lost = (0, self._lost) if logged else (self._failures + 1, self._lost + 1)

    def _try(self, do: Callable[[], None], text: str) -> bool:
        try:
            do()
        except BaseException as error:  # libraries may even raise SystemExit to end a thread
            if text:
                self._report(f"{self._tracker.name} {text} ({brief_error(error)}); training goes on")
            return False
        return True


class _ForecastThread(threading.Thread):
    """Logs evaluations, each with the forecast of the run's end that `scalerl fit` makes at that moment."""

    def __init__(self, setup: Setup, report: Report, log: Callable[[TrackedRow], None]) -> None:
        super().__init__(daemon=True)
        self._setup, self._report, self._log = setup, report, log
        self._forecaster = setup.forecaster
        self._waiting: list[EvalPoint] = []
        self._changed = threading.Condition()
        self._stopped = False
        self.start()

    def put(self, point: EvalPoint) -> None:
        with self._changed:
            self._waiting.append(point)
            self._changed.notify_all()

    def run(self) -> None:
        """Make forecasts one after another; an evaluation is logged once its forecast is made."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                point = self._waiting[0]
            forecast = self._forecast(point)  # without the lock, as it takes seconds
            with self._changed:
                if self._stopped:
                    return
                del self._waiting[0]
                self._log_with(point, forecast)
                self._changed.notify_all()

    def stop(self, seconds: float) -> None:
        """Wait at most `seconds` for forecasts, and log the remaining evaluations without them."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, seconds)
            self._stopped = True
            for point in self._waiting:
                self._log_with(point, {})
            if n := len(self._waiting):
                self._report(f"{n} of the last forecasts were not made in time, and are not logged")

    def _log_with(self, point: EvalPoint, forecast: dict[str, float]) -> None:
        self._log(TrackedRow(point.step, point.time, metrics.of_evaluation(point) | forecast))

    def _forecast(self, point: EvalPoint) -> dict[str, float]:
        if self._forecaster is None:
            return {}
        try:
            record = RunRecord.read(self._setup.run.folder)
            so_far = replace(record, evals=tuple(one for one in record.evals if one.step <= point.step))
            return metrics.of_forecast(self._forecaster(so_far, self._setup.axis, self._setup.end))
        except ScalerlError:  # too early for a fit
            return {}
        except BaseException as error:
            self._report(f"no more forecasts are logged ({brief_error(error)}); training goes on")
            self._forecaster = None
            return {}


class _Kept:
    """The content of tracking.json: what each tracker needs for a resume, by its name."""

    def __init__(self, path: Path, report: Report) -> None:
        self._path, self._report, self._lock = path, report, threading.Lock()
        self.all: dict[str, Any] = {}
        try:
            if path.exists():
                self.all = read_object(path)
        except ScalerlError as error:
            report(f"{error}; trackers start anew")

    def keep(self, name: str, values: Mapping[str, str]) -> None:
        if where := values.get("where"):
            self._report(f"{name}: {where}")
        with self._lock:
            known = self.all | {name: dict(values)}
            text = dumps(known, indent=2) + "\n"
            self.all = known  # only after `dumps`: values that JSON cannot hold must not block the others
            write_atomically(self._path, text)
