"""`scalerl serve`: a local web page of the runs in a folder."""

import argparse
from functools import partial
from pathlib import Path

from scalerl.cli.shared.arguments import option, positive, whole
from scalerl.errors import InputError

HELP = "serve a live page of the runs in a folder"
ABOUT = "Serve a local page of the runs in a folder: a live list, overlays and comparisons."
EXAMPLES = """
  scalerl serve runs
  scalerl serve runs --port 0 --open
  scalerl serve runs --budget '1200 steps' --target 0.6
  scalerl serve runs --devices 8 --devices '*/big-*=64'
"""


def add(serve: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    option(serve, "folder FOLDER", "folder with runs, at any depth", type=Path)
    option(
        serve,
        "--host HOST",
        "address to bind (default: 127.0.0.1, this machine only)",
        default="127.0.0.1",
    )
    option(serve, "--port N", "port; 0 for a free one (default: 8787)", type=whole(0, 65535), default=8787)
    option(serve, "--token", "require a token even from this machine's users")
    option(serve, "--open", "open the page in a browser")
    option(serve, "--target", "pass rate to reach at the budget")
    option(serve, "--x", "compute axis of the list (default: that of each run's budget)")
    option(serve, "--budget", "compute at which runs end, in the unit of --x (default: that of each run)")
    option(serve, "--level")
    option(
        serve,
        "--devices N|PATTERN=N ...",
        "number of devices of logs without one, or of those whose path matches PATTERN; repeatable",
        type=_devices,
    )


def _devices(text: str) -> tuple[str, float]:
    pattern, _, number = text.rpartition("=")
    return pattern, positive(number)


def run(args: argparse.Namespace) -> None:
    """Serve until Ctrl-C."""
    from scalerl.record.evaluation import AXES

    axes = [axis for axis in AXES if axis != "dollars"]  # dollars need a price
    axis = args.x or (args.budget and args.budget.axis)
    if args.budget is not None and axis is None:
        raise InputError(
            f"--budget needs its axis: name one with --x ({', '.join(axes)}), or with it: '1200 steps'"
        )
    if axis is not None and axis not in axes:
        raise InputError(f"--x {axis}: no compute axis of runs; choose one of {', '.join(axes)}")
    budget = args.budget and args.budget.on("--budget", axis, None, axes)
    if not args.folder.is_dir():
        raise InputError(f"{args.folder}: no such folder")
    try:
        from scalerl.view.serve.server import serve
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("starlette", "uvicorn"):
            raise
        raise InputError(f"serve needs {missing}: pip install 'scalerl[serve]'") from None
    from scalerl.view.facts.standing import StandingQuery

    asked = StandingQuery(args.target, budget, args.level, axis=axis)
    ready = partial(print, flush=True)
    try:
        serve(args.folder, asked, args.host, args.port, args.token, args.open, ready, dict(args.devices))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
