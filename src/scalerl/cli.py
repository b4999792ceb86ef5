"""The command line: `scalerl COMMAND ...`. The commands are in `scalerl.commands`, one file each.

Exit status: 0 done; 1 a run failed; 2 bad usage or unreadable input; 3 the data cannot answer; 4 an alarm
paused a run; 130 interrupted; 141 the reader of a pipe has left. One line on standard error says what is
wrong and what would be right.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from scalerl._version import __version__
from scalerl.commands import backtest, compare, demo, fit, ingest, report, study, train
from scalerl.errors import ScalerlError


class _Parser(argparse.ArgumentParser):
    """Argparse whose usage errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with status 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    try:
        args = _parser().parse_args(argv)
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
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="scalerl",
        description="Forecast, train and compare RL for language models by compute-performance curves.",
    )
    parser.add_argument("--version", action="version", version=f"scalerl {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    fit.add(commands)
    compare.add(commands)
    backtest.add(commands)
    report.add(commands)
    ingest.add(commands)
    train.add(commands)
    study.add(commands)
    demo.add(commands)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
