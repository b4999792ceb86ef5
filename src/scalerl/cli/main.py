"""The command line: `scalerl COMMAND ...`. The commands are in `scalerl.cli`, one file each.

The exit statuses are in `_EPILOG`. One line on standard error says what is wrong and what to do.
"""

import errno
import io
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TextIO, cast

from scalerl._version import __version__
from scalerl.cli import (
    audit,
    backtest,
    best,
    compare,
    completion,
    demo,
    fit,
    ingest,
    model,
    plan,
    report,
    serve,
    study,
    train,
    watch,
)
from scalerl.cli.shared.arguments import Parser
from scalerl.errors import ScalerlError
from scalerl.tty import Aside, Output, OutputError, Unfailing

_COMMANDS = (
    *(fit, compare, backtest, report, ingest, train, study),
    *(plan, watch, serve, best, demo, model, audit, completion),
)
_TRAIN = ("train", "study", "demo", "model")
"""Commands that compute with torch, or start processes that do."""
_EPILOG = """\
examples:
  scalerl fit runs/mine --at 16000                  # ceiling, efficiency and forecast of a run
  scalerl fit log.csv --x gpu_hours --y pass_rate   # the same for any table
  scalerl compare runs/a-seed0 runs/b-seed0         # which recipe is better, beyond seed noise
  scalerl help fit                                  # all options; same as scalerl fit --help

exit status:
  0    done
  1    a run failed
  2    bad usage, or input that cannot be read
  3    the input is valid, but not sufficient (such as too few evaluations)
  4    an alarm paused a run
  130  interrupted
  141  the reader of the pipe has exited
  143  terminated (watch)

environment:
  NO_COLOR, FORCE_COLOR   print no colours; print colours even to a pipe
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # names may have characters that its encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    # A stream that was closed before the start (`>&-`, some services) is None in Python.
    stdout, stderr = (one or Path(os.devnull).open("w") for one in (sys.stdout, sys.stderr))  # noqa: SIM115
    out, err = cast(TextIO, Output(stdout)), cast(TextIO, Unfailing(stderr))
    with redirect_stdout(out), redirect_stderr(err):
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if not words:  # in a script, a command from an empty variable must not look like success
            _parser().print_help(sys.stderr)
            return 2
        args = _parser().parse_args([*words[1:], "--help"] if words[0] == "help" else words)
        if words[0] not in _TRAIN or words[1:2] == ["report"]:
            # OpenBLAS reads this when numpy is imported. The matrices of a fit are small, so its other
            # threads only spin: for three quarters of the CPU time with 1,000 evaluations.
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        out = cast(TextIO, Aside(sys.stderr, sys.stdout)) if getattr(args, "json", False) else sys.stdout
        with redirect_stdout(out):
            args.run(args)
        sys.stdout.flush()
        return 0
    except ScalerlError as error:
        print(f"scalerl: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("scalerl: interrupted", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers", "pydantic", "tokenizers", "safetensors"):
            raise
        print(f"scalerl: training needs {error.name}: pip install 'scalerl[train]'", file=sys.stderr)
        return 2
    except OutputError as error:
        # Otherwise the flush at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # the reader (head, say) has exited
            return 141
        print(f"scalerl: standard output: {error.strerror}", file=sys.stderr)
        return 1


def _parser() -> Parser:
    parser = Parser(
        prog="scalerl",
        description="Forecast, train and compare RL for language models by compute-performance curves.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"scalerl {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands", required=True)
    for module in _COMMANDS:
        name, examples = module.__name__.rpartition(".")[2], f"examples:{module.EXAMPLES.rstrip()}"
        command = commands.add_parser(name, help=module.HELP, description=module.ABOUT, epilog=examples)
        module.add(command)
        command.set_defaults(run=module.run, parser=parser)
    return parser
