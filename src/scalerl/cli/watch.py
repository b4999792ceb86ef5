"""`scalerl watch`: follow a run that is being written."""

from __future__ import annotations

import argparse
import math
import signal
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from scalerl.cli.shared.arguments import option, positive, print_json, print_warnings
from scalerl.cli.shared.data import add_data_arguments, axes_of, read_options
from scalerl.errors import InputError, NoEvaluationError
from scalerl.files import Changing, written
from scalerl.tty import console_for

if TYPE_CHECKING:
    from rich.console import Console

    from scalerl.view.facts.standing import Standing

_QUIET = 30.0
"""Seconds without output after which a line says what the run is doing."""
_REDRAW = 1.0
"""Seconds after which the view is redrawn, as it shows ages."""
_AFTER_READ, _AFTER_FIT = 10, 4
"""A read, or a fit, is followed by a pause of at least this many times its duration."""

HELP = "follow a run in progress"
ABOUT = "Follow a run of any trainer in progress, with its forecast."
EXAMPLES = """
  scalerl watch runs/mine --target 0.6
  scalerl watch wandb/ --x steps --budget 1000       # another trainer's log
  scalerl watch runs/mine --once --json
"""


def add(watch: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    option(
        watch,
        "run_or_file RUN|FILE",
        "a run folder, a CSV or JSONL, the log of another trainer, or a run on a tracker's server: "
        "wandb:ENTITY/PROJECT/RUN, mlflow:EXPERIMENT/RUN",
    )
    add_data_arguments(watch)
    option(watch, "--target", "pass rate to reach at the budget")
    option(watch, "--budget", "compute at which the run ends (default: its own)")
    option(watch, "--once", "print the current state, and exit")
    option(watch, "--wait", "wait for a run that does not exist yet")
    option(watch, "--interval SECONDS", "seconds between two reads (default: 2)", type=positive, default=2.0)


def run(args: argparse.Namespace) -> None:
    """Follow the run until it ends, or until Ctrl-C or SIGTERM."""
    from scalerl.ingest.load import STANDARD_INPUT, read_data
    from scalerl.view.facts.standing import StandingQuery, stand

    if args.run_or_file == STANDARD_INPUT:
        raise InputError("watch follows a file or a folder, and standard input is neither")

    path, options = Path(args.run_or_file), read_options(args)

    def read() -> Standing:
        data = read_data(path, args.x, options, args.price)
        options.check_used([path], data.foreign, is_table=data.record is None)
        if not len(data.points):
            raise InputError(f"{path}: the run has no evaluation yet")
        axis, axes = data.points.axis, axes_of(data)
        # No relative amounts, as twice the compute of a growing run would change at every read.
        budget, least = (
            given and given.on(option, axis, None, axes)
            for option, given in (("--budget", args.budget), ("--min-compute", args.min_compute))
        )
        asked = StandingQuery(args.target, budget, args.level, args.r0, least or 0.0)
        return stand(data.points, data.record, asked)

    follower = Follower(path, read)
    # Exit as at Ctrl-C, so that the terminal is restored.
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        first = _first(follower, args)
        if args.target is not None and not math.isfinite(first.budget):
            raise InputError(
                f"{args.run_or_file}: --target needs a budget on the axis {first.points.axis}, and the run "
                "has none: give --budget C"
            )
        # FORCE_COLOR gives even a pipe a console, but there is no screen to draw on.
        console = console_for(sys.stdout) if sys.stdout.isatty() else None
        if console is None or args.json:
            _follow_lines(follower, args)
        elif args.once:
            _print_view(console, first, follower.activity())
        else:
            _follow_view(follower, args, console)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


class Follower:
    """Reads a run or a log again when it has changed, but only as often as its size permits.

    `read` returns the status of the run, not fitted yet. `run` is that of the last successful read, None
    before the first; `problem` is why the last read failed, empty after a successful one.
    """

    def __init__(self, path: Path, read: Callable[[], Standing]) -> None:
        self.path, self.problem = path, ""
        self.run: Standing | None = None
        self._changing = Changing(self.path, always=_is_on_server(path))
        self._source = read
        self._read_took = self._fit_took = 0.0
        self._printed = -math.inf

    def look(self) -> bool:
        """Read the source if it has changed, or is due again after a failure; return whether `run` is new.

        If the source cannot be read, as while it is being rewritten, `run` stays as it was.
        """
        started, self._fit_took = monotonic(), 0.0
        run = None
        try:
            run = self._changing.read(self._read)
        except InputError as error:
            self.problem = str(error)
        if run is not None:
            self.run, self.problem = run, ""
        self._read_took = monotonic() - started - self._fit_took
        return run is not None

    def pause(self, interval: float) -> float:
        """Return the seconds until the next look: `interval`, or more after a slow look."""
        return max(interval, _AFTER_READ * self._read_took + _AFTER_FIT * self._fit_took)

    def is_before_first_evaluation(self) -> bool:
        """Whether this is the folder of a run without an evaluation yet."""
        from scalerl.record.folder import holds_run

        try:
            evals = self.path / "evals.jsonl"
            return holds_run(self.path) and not (evals.is_file() and evals.stat().st_size)
        except OSError:
            return False

    def activity(self) -> str:
        """Return the current activity of the run in a line; empty if not known."""
        from scalerl.record.activity import read_activity
        from scalerl.view.terminal.activity import activity_line

        found = read_activity(self.path)
        return "" if found is None else activity_line(found, time.time())

    def printed(self) -> None:
        """Record that something was printed about the run."""
        self._printed = monotonic()

    def print_activity(self) -> None:
        """Print the current activity to standard error, at first and when nothing was printed for long."""
        if monotonic() - self._printed >= _QUIET and (text := self.activity()):
            self.printed()
            _print_aside(f"{self.path.name}: {text}")

    def _read(self) -> Standing:
        run = self._source()
        if math.isnan(run.last_line):
            run = replace(run, written=written(self.path))
        # New steps, which are far more frequent than evaluations, do not need a new fit.
        if self.run is not None and _evaluations(self.run) == _evaluations(run):
            return replace(run, fit=self.run.fit, reason=self.run.reason)
        started = monotonic()
        fitted = run.fitted()
        self._fit_took = monotonic() - started
        return fitted


def _evaluations(run: Standing) -> tuple[Any, ...]:
    points = run.points
    return points.axis, points.metric, points.warnings, points.compute_N.tolist(), points.pass_rate_N.tolist()


def _first(follower: Follower, args: argparse.Namespace) -> Standing:
    """Return the state at the first successful look; raise an InputError if --wait cannot help."""
    printed = ""
    while not follower.look() or follower.run is None:
        mode = _mode(follower.path)
        if mode is not None and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise InputError(f"{follower.path}: neither a file nor a folder, so there is nothing to follow")
        early = follower.is_before_first_evaluation()
        if not args.wait and (args.once or not early):
            hint = " (--wait waits for it)" if early or mode is None else ""
            error = NoEvaluationError if early else InputError
            raise error(f"{follower.problem}{hint}")
        if follower.problem != printed:
            _print_aside(f"waiting: {follower.problem}")
            printed = follower.problem
        follower.print_activity()
        time.sleep(follower.pause(args.interval))
    follower.printed()
    return follower.run


def _is_on_server(path: str | Path) -> bool:
    """Whether this names a run on a tracker's server, which is fetched again at every look."""
    from scalerl.ingest.trackers.named import tracker_of

    return bool(tracker_of(path))


def _mode(path: Path) -> int | None:
    """Return the file mode; None if there is no such path, and that of a file if its reader will say why."""
    if _is_on_server(path):
        return stat.S_IFREG
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None
    except OSError:
        return stat.S_IFREG


def _print_view(console: Console, run: Standing, activity: str = "") -> None:
    from scalerl.view.terminal.watch import view

    console.print(view(run, time.time(), console, is_whole=True, activity=activity))


def _follow_view(follower: Follower, args: argparse.Namespace, console: Console) -> None:
    """Draw the view in place, and print the last one at the end."""
    from rich.live import Live

    from scalerl.view.terminal.watch import view

    assert follower.run is not None
    try:
        # No refresh by rich's thread: a view is drawn only here, with the current time.
        with Live(console=console, auto_refresh=False, screen=True) as live:
            due = time.monotonic() + follower.pause(args.interval)
            while not follower.run.ended:
                note, activity = _note(follower), follower.activity()
                drawn = view(follower.run, time.time(), console, note, activity=activity)
                live.update(drawn, refresh=True)
                time.sleep(max(min(_REDRAW, due - time.monotonic()), 0.05))
                if time.monotonic() >= due:
                    follower.look()
                    due = time.monotonic() + follower.pause(args.interval)
    finally:
        # Print it once more, as the alternate screen disappears.
        _print_view(console, follower.run)


def _note(follower: Follower) -> str:
    assert follower.run is not None
    if follower.problem:
        return f"as it was before: {follower.problem}"
    found = follower.run.warnings
    more = f" (and {len(found) - 1} more warnings: scalerl fit)" if len(found) > 1 else ""
    return f"warning: {found[0]}{more}" if found else ""


def _follow_lines(follower: Follower, args: argparse.Namespace) -> None:
    """Print a line for the last evaluation, and one for every new one."""
    assert follower.run is not None
    lines = _Lines(args)
    lines.update(follower.run)
    failed = printed = ""
    while not (args.once or follower.run.ended):
        time.sleep(follower.pause(args.interval))
        if follower.look():
            follower.printed()
            lines.update(follower.run)
        elif follower.problem == failed != printed:  # seen twice, as a rewrite may tear a file briefly
            _print_aside(follower.problem)
            printed = failed
        failed = follower.problem
        follower.print_activity()


def _print_aside(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _Lines:
    """Prints a line per evaluation to standard output, and warnings, alarms and the end to standard error."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._printed: list[tuple[float, float]] | None = None
        self._alarms: set[Any] = set()
        self._warnings: set[str] = set()

    def update(self, run: Standing) -> None:
        """Print the news about a run."""
        points = run.points
        now = list(zip(points.compute_N.tolist(), points.pass_rate_N.tolist(), strict=True))
        known = now[:-1] if self._printed is None else self._printed
        pairs = enumerate(zip(now, known, strict=False))
        same = next((n for n, (a, b) in pairs if a != b), min(len(now), len(known)))
        if same < len(known):  # a resume has truncated the record
            _print_aside(f"{run.name}: goes on from evaluation {same}; what came after it is gone")
            known = now[: max(same, len(now) - 1)]
        self._print_findings(run)
        if self._printed is None and not self._args.json:
            _print_aside(f"{run.name}: metric {run.points.metric}")
        for n in range(len(known) + 1, len(now) + 1):
            self._print_line(run.until(n))
        self._printed = now
        if run.ended:
            _print_aside(f"{run.name}: the run has ended")

    def _print_findings(self, run: Standing) -> None:
        found = run.warnings
        if self._printed is not None:  # the warning `beyond` has another number every time
            found = tuple(text for text in found if text != run.beyond)
        print_warnings(warning for warning in found if warning not in self._warnings)
        self._warnings |= set(found)
        for alarm in run.alarms if self._printed is not None else ():
            if alarm not in self._alarms:
                _print_aside(f"{run.name}: {alarm.level}: {alarm}")
        self._alarms |= set(run.alarms)

    def _print_line(self, run: Standing) -> None:
        from scalerl.view.terminal.watch import line

        if self._args.json:
            answer = {"run": self._args.run_or_file, **run.to_json(time.time()), "warnings": run.warnings}
            print_json(answer, indent=None)
        else:
            # Only the first line gives the age of its evaluation; later ones are printed as they come.
            since = time.time() if self._printed is None else math.nan
            print(f"{run.name}  {line(run, since)}", flush=True)
