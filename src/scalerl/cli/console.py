"""Progress on standard error: a bar on a terminal, a line per evaluation everywhere else."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Self

from scalerl.numbers import duration, rate, rate_interval
from scalerl.tty import console_for
from scalerl.view.terminal.activity import activity_parts, fitted, token_speed

if TYPE_CHECKING:
    from rich.progress import ProgressColumn, TaskID

    from scalerl.record.activity import Activity

_BAR = 12
"""Characters of the bar of a run."""
_PIPE = 400
"""The most characters of a line in a pipe."""
_QUIET = 30.0
"""Seconds without a line after which a pipe gets one about the current activity."""


class _Bar:
    """A progress bar on standard error, or lines if there is no terminal for a bar."""

    def __init__(self, name: str, width: int, *columns: ProgressColumn) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        console = console_for(sys.stderr) if sys.stderr.isatty() else None
        self._name, self._live, self._printed = name, console is not None, time.monotonic()
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=width),
            TextColumn("{task.percentage:>3.0f}%"),
            *columns,
            console=console or Console(file=sys.stderr),
            disable=not self._live,
        )
        self._task = self._bar.add_task(name, total=1.0, text="starting")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def _print(self, text: str, style: str | None = None) -> None:
        """Print a line that stays, above the bar if there is one."""
        if self._live:
            self._bar.console.print(text, style=style, markup=False, highlight=False)
        else:
            print(f"{self._name}  {text}", file=sys.stderr, flush=True)

    def _is_quiet(self) -> bool:
        return time.monotonic() - self._printed >= _QUIET


class TrainingProgress(_Bar):
    """Shows a training run: a changing line on a terminal, and a line now and then in a pipe.

    A context; its methods `update` and `activity` are arguments of `train`: `progress` and `activity`.
    """

    def __init__(self, name: str) -> None:
        from rich.progress import ProgressColumn
        from rich.text import Text

        self._share, self._text = 0.0, ""
        self._activity: Activity | None = None
        self._ended = threading.Event()
        self._logs = logging.Handler()
        self._logs.emit = lambda record: self._print(record.getMessage(), "bold yellow")
        shown = self

        class Line(ProgressColumn):
            """The current activity, as far as there is room, at every refresh."""

            def render(self, task: Any) -> Text:
                return Text(shown._line(shown._bar.console.width - len(name) - _BAR - 9))

        super().__init__(name, _BAR, Line())
        self._started = self._printed

    def __enter__(self) -> Self:
        logger = logging.getLogger("scalerl")
        logger.addHandler(self._logs)
        self._level = logger.level
        logger.setLevel(logging.INFO)
        if not self._live:
            threading.Thread(target=self._print_now_and_then, daemon=True).start()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        logger = logging.getLogger("scalerl")
        logger.removeHandler(self._logs)
        logger.setLevel(self._level)
        self._ended.set()
        super().__exit__(*error)

    def update(self, progress: Any) -> None:
        """Show a `scalerl.rl.loop.progress.Progress`."""
        if progress.finding:
            self._print(progress.finding, "bold yellow")
            return
        speed = progress.tokens_per_second
        tokens = "" if math.isnan(speed) else f"  {token_speed(speed)}"
        measured = "" if math.isnan(progress.pass_rate) else f"  pass rate {rate(progress.pass_rate)}"
        text = f"step {progress.step}{measured}{tokens}{forecast_text(progress.forecast)}"
        self.show(progress.share, text, line=progress.evaluated)

    def activity(self, activity: Activity) -> None:
        """Show the current activity; other threads print it, so that training does not wait."""
        self._activity = activity
        if self._live and activity.share > self._share:  # after a resume, the share starts above 0
            self._share = activity.share
            self._bar.update(self._task, completed=activity.share)

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
        self._print(f"{self._share:4.0%}  {self._printed - self._started:5.0f} s  {text}")

    def _print_now_and_then(self) -> None:
        while not self._ended.wait(1.0):
            if self._activity is not None and self._is_quiet():
                self._print_line(self._line(_PIPE))

    def _line(self, width: int) -> str:
        """Return the current activity, the time left, and the figures of the last step."""
        if self._activity is None:
            return self._text or "starting"
        first, *more = activity_parts(self._activity, time.time())
        left = self._activity.left
        left = "" if math.isnan(left) else f"{duration(left)} left"
        # Without the step, as the activity names the step in progress.
        figures = self._text.split("  ")[1:]
        return fitted([first, *[left] * bool(left), *figures, *more], width)


class StudyProgressBar(_Bar):
    """Shows the progress of a study; a context whose `update` is the `watch` of `run_study`."""

    def __init__(self, name: str) -> None:
        from rich.progress import TextColumn, TimeRemainingColumn

        super().__init__(name, 24, TextColumn("{task.fields[text]}"), TimeRemainingColumn())
        self._runs: dict[str, TaskID] = {}

    def update(self, progress: Any) -> None:
        """Show a `scalerl.study.run.runner.StudyProgress`: a bar for all runs, and one for each."""
        count = f"{progress.done} of {progress.runs} runs"
        if progress.notice:
            self._print(progress.notice + f"  ({count})" * (not self._live))
        # Point out a run that solves nothing, as it may never learn.
        rates = {
            name: f"{rate(found)}{', no held-out prompt solved' * (found == 0)}"
            for name, _, found in progress.running
        }
        if not self._live:
            if progress.running and self._is_quiet():
                self._printed = time.monotonic()
                runs = (f"{name} {share:.0%}, {rates[name]}" for name, share, _ in progress.running)
                self._print("  ".join([count, *runs]))
            return
        under_way = sum(share for _, share, _ in progress.running)
        self._bar.update(self._task, completed=(progress.done + under_way) / progress.runs, text=count)
        for name in self._runs.keys() - rates.keys():
            self._bar.remove_task(self._runs.pop(name))
        for name, share, _ in progress.running:
            if name not in self._runs:
                self._runs[name] = self._bar.add_task(f"  {name}", total=1.0, text="")
            self._bar.update(self._runs[name], completed=share, text=f"pass rate {rates[name]}")


@contextmanager
def share_shown(name: str, done: str) -> Iterator[Callable[[float], None]]:
    """Yield a function that shows the finished share on a bar, once a second has passed.

    `done` is the text after the share: `simulated`, `fitted`.
    """
    started, bar = time.monotonic(), None
    with ExitStack() as stack:

        def watch(share: float) -> None:
            nonlocal bar
            if bar is None and share < 1 and time.monotonic() - started > 1:
                bar = stack.enter_context(TrainingProgress(name))
            if bar is not None:
                bar.show(share, done)

        yield watch


def forecast_text(forecast: Mapping[str, Any] | None) -> str:
    """Return the forecast of the end of the run for a progress line."""
    if forecast is None:
        return ""
    kind = forecast["fit_json"]["lack_of_fit"]
    doubt = f"  no curve describes the run: {kind}" if kind else ""
    return f"  end {rate(forecast['median'])} {rate_interval(forecast['prediction'])}{doubt}"
