"""Progress on standard error: a bar on a terminal, a line per evaluation everywhere else."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from scalerl.tty import console_for

if TYPE_CHECKING:
    from rich.progress import TaskID


class _Bar:
    """A progress bar on standard error, shown only on a terminal that can draw it."""

    def __init__(self, name: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        console = console_for(sys.stderr) if sys.stderr.isatty() else None
        columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
        )
        self._name, self._live = name, console is not None
        self._bar = Progress(*columns, console=console or Console(file=sys.stderr), disable=not self._live)
        self._task = self._bar.add_task(name, total=1.0, text="starting")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


class TrainingProgress(_Bar):
    """Shows the progress of a training run; a context whose `update` is the `progress` of `train`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._started = time.monotonic()
        self._logs = _LogLines(self._print)

    def __enter__(self) -> Self:
        logging.getLogger("scalerl").addHandler(self._logs)
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        logging.getLogger("scalerl").removeHandler(self._logs)
        super().__exit__(kind, error, trace)

    def update(self, progress: Any) -> None:
        """Show a `scalerl.rl.loop.progress.Progress`."""
        if progress.finding:
            self._print(progress.finding)
            return
        speed = progress.tokens_per_second
        tokens = "-" if math.isnan(speed) else f"{speed / 1000:.1f}k tokens/s"
        text = f"step {progress.step}  pass rate {_rate(progress.pass_rate)}  {tokens}"
        text += forecast_text(progress.forecast)
        self.show(progress.share, text, line=progress.evaluated)

    def _print(self, text: str) -> None:
        """Print a line that stays, above the bar if there is one."""
        if self._live:
            self._bar.console.print(text, style="bold yellow", markup=False, highlight=False)
        else:
            print(f"{self._name}  {text}", file=sys.stderr, flush=True)

    def base_model(self, progress: Any) -> None:
        """Show a `scalerl.rl.model.build.BuildProgress`."""
        self.show(progress.share, progress.text, line=progress.milestone)

    def show(self, share: float, text: str, line: bool = False) -> None:
        """Move the bar to `share` of the whole; off a terminal, print the text if `line` is set."""
        if self._live:
            self._bar.update(self._task, completed=share, text=text)
        elif line:
            elapsed = time.monotonic() - self._started
            print(f"{self._name}  {share:4.0%}  {elapsed:5.0f} s  {text}", file=sys.stderr, flush=True)


class StudyProgressBar(_Bar):
    """Shows the progress of a study; a context whose `update` is the `watch` of `run_study`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._runs: dict[str, TaskID] = {}

    def update(self, progress: Any) -> None:
        """Show a `scalerl.study.run.runner.StudyProgress`: a bar for all runs, and one for each."""
        count = f"{progress.done} of {progress.runs} runs"
        if progress.notice and self._live:
            self._bar.console.print(progress.notice, markup=False, highlight=False)
        elif progress.notice:
            print(f"{self._name}  {progress.notice}  ({count})", file=sys.stderr, flush=True)
        if not self._live:
            return
        under_way = sum(share for _, share, _ in progress.running)
        self._bar.update(self._task, completed=(progress.done + under_way) / progress.runs, text=count)
        names = {name for name, _, _ in progress.running}
        for name in self._runs.keys() - names:
            self._bar.remove_task(self._runs.pop(name))
        for name, share, pass_rate in progress.running:
            if name not in self._runs:
                self._runs[name] = self._bar.add_task(f"  {name}", total=1.0, text="")
            self._bar.update(self._runs[name], completed=share, text=f"pass rate {_rate(pass_rate)}")


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
    low, high = forecast["prediction"]
    kind = forecast["fit_json"]["lack_of_fit"]
    doubt = f"  no curve describes the run: {kind}" if kind else ""
    return f"  end {forecast['median']:.3f} [{low:.3f}, {high:.3f}]{doubt}"


def _rate(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"
