"""Progress on standard error: a bar on a terminal, a line per evaluation everywhere else."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from scalerl.tty import console_for
from scalerl.view.numbers import duration, rate, rate_interval
from scalerl.view.terminal.activity import activity_parts, fitted, token_speed

if TYPE_CHECKING:
    from rich.progress import ProgressColumn, TaskID

    from scalerl.record.activity import Activity

_BAR = 12
"""Characters of the bar of a run."""
_PIPE = 400
"""Characters of a line in a pipe, at most."""

_QUIET = 30.0
"""Seconds after which a pipe gets a line on what is being done, where it got none."""


class _Bar:
    """A progress bar on standard error, shown only on a terminal that can draw it."""

    def __init__(self, name: str) -> None:
        from rich.console import Console
        from rich.progress import Progress

        console = console_for(sys.stderr) if sys.stderr.isatty() else None
        self._name, self._live = name, console is not None
        console = console or Console(file=sys.stderr)
        self._bar = Progress(*self._columns(), console=console, disable=not self._live)
        self._task = self._bar.add_task(name, total=1.0, text="starting")

    def _columns(self) -> Sequence[ProgressColumn]:
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

        return (
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


class TrainingProgress(_Bar):
    """Shows a training run: one line that changes on a terminal, and a line now and then in a pipe.

    A context; its `update` is the `progress` of `train`, and its `activity` the `activity`.
    """

    def __init__(self, name: str) -> None:
        self._started = self._printed = time.monotonic()
        self._share, self._text = 0.0, ""
        self._activity: Activity | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._print_now_and_then, daemon=True)
        self._logs = _LogLines(self._print)
        super().__init__(name)

    def _columns(self) -> Sequence[ProgressColumn]:
        from rich.progress import BarColumn, ProgressColumn, TextColumn
        from rich.text import Text

        def line() -> str:
            return self._line(self._bar.console.width - len(self._name) - _BAR - 9)

        class Line(ProgressColumn):
            """What is being done, as far as there is room, at every refresh."""

            def render(self, task: Any) -> Text:
                return Text(line())

        return (
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=_BAR),
            TextColumn("{task.percentage:>3.0f}%"),
            Line(),
        )

    def __enter__(self) -> Self:
        logger = logging.getLogger("scalerl")
        logger.addHandler(self._logs)
        self._level = logger.level
        logger.setLevel(logging.INFO)
        if not self._live:
            self._thread.start()
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        logger = logging.getLogger("scalerl")
        logger.removeHandler(self._logs)
        logger.setLevel(self._level)
        self._ended.set()
        super().__exit__(kind, error, trace)

    def update(self, progress: Any) -> None:
        """Show a `scalerl.rl.loop.progress.Progress`."""
        if progress.finding:
            self._print(progress.finding)
            return
        speed = progress.tokens_per_second
        tokens = "" if math.isnan(speed) else f"  {token_speed(speed)}"
        measured = "" if math.isnan(progress.pass_rate) else f"  pass rate {rate(progress.pass_rate)}"
        text = f"step {progress.step}{measured}{tokens}{forecast_text(progress.forecast)}"
        self.show(progress.share, text, line=progress.evaluated)

    def activity(self, activity: Activity) -> None:
        """Show what is being done; it is printed by other threads, so that the training does not wait."""
        self._activity = activity
        if self._live and activity.share > self._share:  # a resume goes on from there
            self._share = activity.share
            self._bar.update(self._task, completed=activity.share)

    def _print(self, text: str) -> None:
        """Print a line that stays, above the bar if there is one."""
        if self._live:
            self._bar.console.print(text, style="bold yellow", markup=False, highlight=False)
        else:
            print(f"{self._name}  {text}", file=sys.stderr, flush=True)

    def building(self, progress: Any) -> None:
        """Show a `scalerl.rl.model.demo_base.BuildProgress`."""
        self.show(progress.share, progress.text, line=progress.milestone)

    def show(self, share: float, text: str, line: bool = False) -> None:
        """Move the bar to `share` of the whole; off a terminal, print the text if `line` is set."""
        self._share, self._text = share, text
        if self._live:
            self._bar.update(self._task, completed=share)
        elif line:
            self._print_line(text)

    def _print_line(self, text: str) -> None:
        self._printed = time.monotonic()
        elapsed = self._printed - self._started
        print(f"{self._name}  {self._share:4.0%}  {elapsed:5.0f} s  {text}", file=sys.stderr, flush=True)

    def _print_now_and_then(self) -> None:
        while not self._ended.wait(1.0):
            if self._activity is not None and time.monotonic() - self._printed >= _QUIET:
                self._print_line(self._line(_PIPE))

    def _line(self, width: int) -> str:
        """Return what is being done, then the figures of the last step, then the time left."""
        if self._activity is None:
            return self._text or "starting"
        first, *more = activity_parts(self._activity, time.time())
        left = self._activity.left
        left = "" if math.isnan(left) else f"{duration(left)} left"
        # The step of the activity is the one that is being made.
        figures = self._text.split("  ")[1:]
        return fitted([first, *[left] * bool(left), *figures, *more], width)


class StudyProgressBar(_Bar):
    """Shows the progress of a study; a context whose `update` is the `watch` of `run_study`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._runs: dict[str, TaskID] = {}
        self._printed = time.monotonic()

    def update(self, progress: Any) -> None:
        """Show a `scalerl.study.run.runner.StudyProgress`: a bar for all runs, and one for each."""
        count = f"{progress.done} of {progress.runs} runs"
        if progress.notice and self._live:
            self._bar.console.print(progress.notice, markup=False, highlight=False)
        elif progress.notice:
            print(f"{self._name}  {progress.notice}  ({count})", file=sys.stderr, flush=True)
        if not self._live:
            if progress.running and time.monotonic() - self._printed >= _QUIET:
                self._printed = time.monotonic()
                runs = (f"{name} {share:.0%}, {_solved(found)}" for name, share, found in progress.running)
                print("  ".join([self._name, count, *runs]), file=sys.stderr, flush=True)
            return
        under_way = sum(share for _, share, _ in progress.running)
        self._bar.update(self._task, completed=(progress.done + under_way) / progress.runs, text=count)
        names = {name for name, _, _ in progress.running}
        for name in self._runs.keys() - names:
            self._bar.remove_task(self._runs.pop(name))
        for name, share, pass_rate in progress.running:
            if name not in self._runs:
                self._runs[name] = self._bar.add_task(f"  {name}", total=1.0, text="")
            self._bar.update(self._runs[name], completed=share, text=f"pass rate {_solved(pass_rate)}")


def _solved(pass_rate: float) -> str:
    """The pass rate of a run under way, and in words that it is 0: such a run may never learn."""
    return f"{rate(pass_rate)}{', no held-out prompt solved' if pass_rate == 0 else ''}"


@contextmanager
def share_shown(name: str, done: str) -> Iterator[Callable[[float], None]]:
    """Yield a function that shows the share that is done on a bar, once a second has passed.

    `done` stands behind the share: `simulated`, `fitted`.
    """
    started, bar = time.monotonic(), None
    with ExitStack() as stack:

        def watch(share: float) -> None:
            nonlocal bar
            if bar is None and time.monotonic() - started > 1:
                bar = stack.enter_context(TrainingProgress(name))
            if bar is not None:
                bar.show(share, done)

        yield watch


class _LogLines(logging.Handler):
    """Prints what the package logs by a function."""

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message."""
        self._write(record.getMessage())


def forecast_text(forecast: Mapping[str, Any] | None) -> str:
    """Return the forecast of the end of the run for a progress line."""
    if forecast is None:
        return ""
    kind = forecast["fit_json"]["lack_of_fit"]
    doubt = f"  no curve describes the run: {kind}" if kind else ""
    return f"  end {rate(forecast['median'])} {rate_interval(forecast['prediction'])}{doubt}"
