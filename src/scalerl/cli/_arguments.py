"""The arguments that several commands have: how they are read, and what they are called."""

from __future__ import annotations

import argparse
import math
from typing import Any


def number(text: str) -> float:
    """An argument that is a finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"expected a number, found {text!r}")
    return value


def positive(text: str) -> float:
    """An argument that is a number above 0."""
    value = number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text!r}")
    return value


def compute(text: str) -> float:
    """An argument that is an amount of compute, 0 or more."""
    value = number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"compute is a number of 0 or more, found {text!r}")
    return value


def computes(text: str) -> tuple[float, ...]:
    """An argument that is a list of amounts of compute, by commas."""
    return tuple(compute(part) for part in text.split(","))


def share(text: str) -> float:
    """An argument that is a pass rate or another share in [0, 1]."""
    value = number(text)
    if not 0 <= value <= 1:
        percent = ", and this looks like percent" if 1 < value <= 100 else ""
        raise argparse.ArgumentTypeError(f"expected a share in [0, 1], found {text!r}{percent}")
    return value


def level(text: str) -> float:
    """An argument that is the level of intervals, between 0 and 1."""
    value = share(text)
    if value in (0.0, 1.0):
        raise argparse.ArgumentTypeError(f"the level of the intervals is between 0 and 1, found {text!r}")
    return value


def whole(text: str) -> int:
    """An argument that is a whole number of 1 or more."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more, found {text!r}")
    return value


def group(text: str) -> tuple[str, list[str]]:
    """An argument that names the runs of a recipe."""
    name, equals, runs = text.partition("=")
    paths = [part for part in runs.split(",") if part]
    if not (name and equals and paths):
        raise argparse.ArgumentTypeError(f"expected NAME=RUN,RUN, found {text!r}")
    return name, paths


_SHARED: dict[str, dict[str, Any]] = {
    "recipe": {
        "metavar": "RECIPE",
        "help": "a TOML file, the name of a recipe of the package, or a run folder (its recipe again)",
    },
    "--base": {"metavar": "NAME"},
    "--budget": {"type": compute, "metavar": "C"},
    "--group": {"type": group, "action": "append", "default": [], "metavar": "NAME=RUN,RUN"},
    "--json": {"action": "store_true", "help": "print one JSON object and nothing else"},
    "--level": {"type": level, "default": 0.95, "metavar": "P", "help": "of the intervals (0.95)"},
    "--price": {"type": positive, "metavar": "USD"},
    "--set": {"action": "append", "default": [], "metavar": "KEY=VALUE"},
    "--target": {"type": share, "metavar": "R"},
    "--x": {"metavar": "AXIS"},
}


def add_shared(command: argparse._ActionsContainer, name: str, help: str | None = None, **more: Any) -> None:
    """Add an argument that several commands have; `more` is what is this command's own."""
    texts: dict[str, Any] = {} if help is None else {"help": help}
    command.add_argument(name, **_SHARED[name] | texts | more)
