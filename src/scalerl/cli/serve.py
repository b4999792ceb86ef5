"""`scalerl serve`: a local page of the runs in a folder."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from scalerl.cli._arguments import add_shared
from scalerl.cli._parser import examples
from scalerl.errors import InputError


def add(commands: argparse._SubParsersAction) -> None:
    """The arguments of `scalerl serve`."""
    serve = commands.add_parser(
        "serve",
        help="a page of the runs in a folder, followed live",
        description="A local page of the runs in a folder: listed, followed live, overlaid and compared.",
        epilog=examples("""
  scalerl serve runs
  scalerl serve runs --port 0 --open
  scalerl serve runs --x steps --budget 1200 --target 0.6
"""),
    )
    serve.add_argument("folder", metavar="FOLDER", type=Path, help="runs are found in it and below")
    serve.add_argument("--host", default="127.0.0.1", help="address to answer on (127.0.0.1: this machine)")
    serve.add_argument("--port", type=_port, default=8787, metavar="N", help="0 takes a free one (8787)")
    serve.add_argument(
        "--token", action="store_true", help="ask for a token on this machine too, where it has other users"
    )
    serve.add_argument("--open", action="store_true", help="open the page in a browser")
    add_shared(serve, "--target", "pass rate to reach at the budget")
    add_shared(serve, "--x", "compute axis of the list (that of each run's budget)")
    add_shared(serve, "--budget", "compute at which runs end, in the unit of --x (their own budgets)")
    add_shared(serve, "--level")
    serve.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Serve until Ctrl-C."""
    _check_axis(args)
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

    asked = StandingQuery(args.target, args.budget, args.level, axis=args.x)
    ready = partial(print, flush=True)
    try:
        serve(args.folder, asked, args.host, args.port, args.token, args.open, ready)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _check_axis(args: argparse.Namespace) -> None:
    from scalerl.record.reader import AXES

    known = [axis for axis in AXES if axis != "dollars"]  # those need a price
    if args.budget is not None and args.x is None:
        raise InputError(f"--budget needs its axis: name one with --x ({', '.join(known)})")
    if args.x is not None and args.x not in known:
        raise InputError(f"--x {args.x}: no compute axis of runs; choose one of {', '.join(known)}")


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 65536):
        raise argparse.ArgumentTypeError(f"expected a port, a whole number from 0 to 65535, found {text!r}")
    return int(text)
