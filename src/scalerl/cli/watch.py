"""`scalerl watch`: how a run stands, again and again while it grows."""

from __future__ import annotations

import argparse
import math
import signal
import stat
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from scalerl.cli._arguments import add_shared, positive
from scalerl.cli._data import add_data_arguments, asked_of
from scalerl.cli._parser import examples
from scalerl.cli._text import print_warnings
from scalerl.errors import InputError
from scalerl.ingest.load import STANDARD_INPUT

if TYPE_CHECKING:
    from rich.console import Console

    from scalerl.cli._follow import Follower
    from scalerl.view.facts.standing import Standing

_BLINK = 1.0
"""Seconds after which a view is drawn again, as times go by."""


def add(commands: argparse._SubParsersAction) -> None:
    """The arguments of `scalerl watch`."""
    watch = commands.add_parser(
        "watch",
        help="follow a run that is under way",
        description="How a run stands, ours or another trainer's, again and again while it grows.",
        epilog=examples("""
  scalerl watch runs/mine --target 0.6
  scalerl watch wandb/ --x steps --budget 1000       # another trainer's log
  scalerl watch runs/mine --once --json
"""),
    )
    watch.add_argument(
        "run_or_file", metavar="RUN|FILE", help="a run folder, a CSV or JSONL, or the log of another trainer"
    )
    add_data_arguments(watch)
    add_shared(watch, "--target", "pass rate to reach at the budget")
    add_shared(watch, "--budget", "compute at which the run ends (its own budget)")
    watch.add_argument("--once", action="store_true", help="print how it stands, and exit")
    watch.add_argument("--wait", action="store_true", help="wait for a run that is not there yet")
    watch.add_argument(
        "--interval", type=positive, default=2.0, metavar="SECONDS", help="between two looks (2)"
    )
    watch.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Follow the run until it ends, or until Ctrl-C or SIGTERM."""
    from scalerl.cli._follow import Follower
    from scalerl.view.facts.standing import StandingQuery

    if args.run_or_file == STANDARD_INPUT:
        raise InputError("watch follows a file or a folder, and standard input is neither")
    asked = StandingQuery(args.target, args.budget, args.level, args.r0, args.min_compute or 0.0)
    follower = Follower(args.run_or_file, args.x, asked_of(args), args.price, asked)
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        first = _first(follower, args)
        if args.target is not None and not math.isfinite(first.budget):
            raise InputError(
                f"{args.run_or_file}: says no budget on the axis {first.points.axis}, at which --target "
                "could be asked; name one with --budget"
            )
        console = _console()
        if console is None or args.json:
            _follow_lines(follower, args)
        elif args.once:
            _print_view(console, first)
        else:
            _follow_view(follower, args, console)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM ends as Ctrl-C does, so that the terminal is given back as it was."""
    raise SystemExit(128 + number)


def _first(follower: Follower, args: argparse.Namespace) -> Standing:
    """The run as it stands at the first look, waited for where that is wanted.

    Raises:
        InputError: there is none, or it cannot be read, and nobody waits for it.
    """
    told = ""
    while not follower.look() or follower.run is None:
        mode = _mode(follower.path)
        if mode is not None and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise InputError(f"{follower.path}: neither a file nor a folder, so there is nothing to follow")
        begun = follower.begun()
        if not args.wait and (args.once or not begun):
            hint = " (--wait waits for it)" if begun or mode is None else ""
            raise InputError(f"{follower.problem}{hint}")
        if follower.problem != told:
            print(f"waiting: {follower.problem}", file=sys.stderr, flush=True)
            told = follower.problem
        time.sleep(follower.pause(args.interval))
    return follower.run


def _mode(path: Path) -> int | None:
    """What is there; None where nothing is. What may not be looked at is for its reader to complain of."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None
    except OSError:
        return stat.S_IFREG


def _console() -> Console | None:
    """The console of standard output; None where no person looks on."""
    from scalerl.tty import console_for

    return console_for(sys.stdout) if sys.stdout.isatty() else None


def _print_view(console: Console, run: Standing) -> None:
    from scalerl.view.terminal.watch import view

    console.print(view(run, time.time(), console, is_whole=True))


def _follow_view(follower: Follower, args: argparse.Namespace, console: Console) -> None:
    """The view, drawn in its place; what it showed last stays when it ends."""
    from rich.live import Live

    from scalerl.view.terminal.watch import view

    assert follower.run is not None
    try:
        with Live(console=console, auto_refresh=False, screen=True) as live:
            due = time.monotonic() + follower.pause(args.interval)
            while not follower.run.ended:
                live.update(view(follower.run, time.time(), console, _note(follower)), refresh=True)
                time.sleep(max(min(_BLINK, due - time.monotonic()), 0.05))
                if time.monotonic() >= due:
                    follower.look()
                    due = time.monotonic() + follower.pause(args.interval)
    finally:
        _print_view(console, follower.run)


def _note(follower: Follower) -> str:
    assert follower.run is not None
    if follower.problem:
        return f"as it was before: {follower.problem}"
    found = follower.run.fit.warnings if follower.run.fit else follower.run.points.warnings
    more = f" (and {len(found) - 1} more warnings: scalerl fit)" if len(found) > 1 else ""
    return f"warning: {found[0]}{more}" if found else ""


def _follow_lines(follower: Follower, args: argparse.Namespace) -> None:
    """A line for the last evaluation, and one for every evaluation that comes."""
    assert follower.run is not None
    lines = _Lines(args)
    lines.tell(follower.run)
    failed = told = ""
    while not (args.once or follower.run.ended):
        time.sleep(follower.pause(args.interval))
        if follower.look():
            lines.tell(follower.run)
        elif follower.problem == failed != told:  # for a moment a file that is rewritten is torn
            lines.aside(follower.problem)
            told = failed
        failed = follower.problem


class _Lines:
    """Prints a line per evaluation to standard output, and what else there is to say to standard error."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._told: list[tuple[float, float]] | None = None
        self._alarms: set[Any] = set()
        self._warnings: set[str] = set()

    def tell(self, run: Standing) -> None:
        """What is new of a run."""
        points = run.points
        now = list(zip(points.compute_N.tolist(), points.pass_rate_N.tolist(), strict=True))
        told = now[:-1] if self._told is None else self._told
        same = next((n for n, (a, b) in enumerate(zip(now, told, strict=False)) if a != b), None)
        if same is not None or len(now) < len(told):
            same = min(len(now), len(told)) if same is None else same
            self.aside(f"{run.name}: goes on from evaluation {same}; what came after it is gone")
            told = now[: max(same, len(now) - 1)]
        self._aside(run)
        for n in range(len(told) + 1, len(now) + 1):
            self._line(run.until(n), is_first=self._told is None)
        self._told = now
        if run.ended:
            self.aside(f"{run.name}: the run has ended")

    def _aside(self, run: Standing) -> None:
        found = run.fit.warnings if run.fit is not None else run.points.warnings
        print_warnings(warning for warning in found if warning not in self._warnings)
        self._warnings |= set(found)
        if self._told is not None:
            from scalerl.view.terminal.watch import alarm_line

            for alarm in run.alarms:
                if alarm not in self._alarms:
                    self.aside(f"{run.name}: {alarm_line(alarm)}")
        self._alarms |= set(run.alarms)

    def _line(self, run: Standing, is_first: bool) -> None:
        from scalerl.jsonl import dumps
        from scalerl.view.terminal.watch import line

        if self._args.json:
            text = dumps({"run": self._args.run_or_file, **run.to_json(time.time())})
        else:
            text = f"{run.name}  {line(run, time.time() if is_first else math.nan)}"
        print(text, flush=True)

    @staticmethod
    def aside(text: str) -> None:
        """A line to standard error."""
        print(text, file=sys.stderr, flush=True)
