"""The command line: `scalerl COMMAND ...`. The commands are in `scalerl.cli`, one file each.

Exit status: 0 done; 1 a run failed; 2 bad usage or unreadable input; 3 the data cannot answer; 4 an alarm
paused a run; 130 interrupted; 141 the reader of a pipe has left; 143 terminated (watch). One line on
standard error says what is wrong and what would be right.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from typing import TextIO, cast

from scalerl._version import __version__
from scalerl.cli import (
    backtest,
    compare,
    completion,
    demo,
    fit,
    ingest,
    plan,
    report,
    serve,
    study,
    train,
    watch,
)
from scalerl.cli._parser import Parser, examples
from scalerl.errors import ScalerlError
from scalerl.tty import Unfailing

_EPILOG = (
    examples("""
  scalerl fit runs/mine --at 16000                  # ceiling and efficiency of a run, and what it will reach
  scalerl fit log.csv --x gpu_hours --y pass_rate   # the same of any table
  scalerl compare runs/a-seed0 runs/b-seed0         # which recipe is better, and what is seed
  scalerl help fit                                  # all options of a command, as scalerl fit --help
""")
    + """

exit status:
  0    done
  1    a run failed
  2    bad usage, or input that cannot be read
  3    the input is sound, but cannot answer (too few evaluations, no rise)
  4    an alarm paused a run
  130  interrupted
  141  the reader of a pipe has left
  143  terminated (watch)

environment:
  NO_COLOR, FORCE_COLOR   no colours; colours in a pipe too
"""
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    with redirect_stderr(cast(TextIO, Unfailing(sys.stderr))):
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):  # names may have letters that its encoding has not
        sys.stdout.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if not words:  # a script whose command is an empty variable has done nothing: that is bad usage
            _parser().print_help(sys.stderr)
            return 2
        args = _parser().parse_args([*words[1:], "--help"] if words[0] == "help" else words)
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
    except BrokenPipeError:
        # The reader (head, say) has left; the flush at exit must not complain of it either.
        _silence()
        return 141
    except OSError as error:
        if error.filename is not None:  # of a file: whoever reads or writes one says which
            raise
        print(f"scalerl: standard output: {error.strerror}", file=sys.stderr)
        _silence()
        return 1


def _silence() -> None:
    """The flush at exit has nowhere to go."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> Parser:
    parser = Parser(
        prog="scalerl",
        description="Forecast, train and compare RL for language models by compute-performance curves.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"scalerl {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands", required=True)
    fit.add(commands)
    compare.add(commands)
    backtest.add(commands)
    report.add(commands)
    ingest.add(commands)
    train.add(commands)
    study.add(commands)
    plan.add(commands)
    watch.add(commands)
    serve.add(commands)
    demo.add(commands)
    completion.add(commands, parser)
    return parser
