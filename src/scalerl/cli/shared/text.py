"""Output of the commands: warnings and JSON; tables are those of `scalerl.view.terminal.rows`."""

import sys
from collections.abc import Iterable, Mapping
from typing import Any


def print_warnings(warnings: Iterable[object]) -> None:
    """Print warnings on standard error, each once."""
    for warning in dict.fromkeys(map(str, warnings)):
        print(f"warning: {warning}", file=sys.stderr)


def print_json(answer: Mapping[str, Any], indent: int | None = 2) -> None:
    """Print one JSON object on standard output."""
    from scalerl.jsonl import dumps

    print(dumps(answer, indent=indent))
