"""Arguments and output of the commands: the parser, types of values, shared options, warnings, JSON."""

import argparse
import glob
import itertools
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TextIO

from scalerl.errors import InputError, nearest
from scalerl.record.amounts import GROUP, GROUPED, Amount, parse_amount, spelled
from scalerl.tty import console_for

_STYLES = {"argparse.groups": "bold", "argparse.example": "bold", "argparse.comment": "dim"}
_HIGHLIGHTS = (r"(?m)^  (?P<example>scalerl .*?)(?=  +#|$)", r"(?m)(?P<comment>  # .*)$")
"""The command of an example, and the comment after it."""


class _Plain(argparse.RawDescriptionHelpFormatter):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._action_max_length = 14  # argparse would fold the longest name of a command


class Parser(argparse.ArgumentParser):
    """An argparse parser with usage errors of one line, suggestions, and coloured help on a terminal."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"formatter_class": _Plain, **options})

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with status 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def print_help(self, file: Any = None) -> None:
        """Print the help to `file` (default: standard output)."""
        stream = sys.stdout if file is None else file
        plain = self.formatter_class
        self.formatter_class = _coloured(stream) or plain
        try:
            super().print_help(stream)
        finally:
            self.formatter_class = plain

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse like argparse, but report an unknown argument under its command, with the nearest option."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [text for text in self._option_string_actions if text.startswith("--")]
            near = [_suggested(text.partition("=")[0], options) for text in unknown if text.startswith("-")]
            self.error(f"unrecognized arguments: {' '.join(unknown)}{next(filter(None, near), '')}")
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            near = nearest(_COMMANDS.get(str(value), str(value)), choices)
            meant = f", did you mean {near!r}?" if near else ""
            raise argparse.ArgumentError(
                action, f"invalid choice: {value!r}{meant} (choose from {', '.join(choices)})"
            )


_COMMANDS = {"forecast": "fit", "predict": "fit"}
"""Names of commands in other tools, and ours."""

_MEANT = {
    "--metric": ("--y NAME",),
    "--reward": ("--y NAME",),
    "--axis": ("--x AXIS",),
    "--steps": ("--set budget.kind=steps --set budget.amount=N", "--x steps"),
    "--max-steps": ("--set budget.kind=steps --set budget.amount=N", "--max-compute '600 steps'"),
    "--lr": ("--set optimiser.lr=LR",),
    "--learning-rate": ("--set optimiser.lr=LR",),
    "--batch-size": ("--set batch.prompts=N",),
    "--model": ("--set model=MODEL",),
    "--gpu-hours": ("--x gpu_hours", "--budget C"),
    "--confidence": ("--level 0.95",),
    "--forecast": ("--at C",),
    "--goal": ("--target R",),
    "--names": ("--group NAME=RUN,RUN",),
}
"""Names of options in other tools, and the options here; the first that the command has is suggested."""


def _suggested(word: str, options: Sequence[str]) -> str:
    """Return a suggestion for an unknown option: the nearest one, of this command or of another tool."""
    meant = {
        name: next((one for one in given if one.split()[0] in options), "") for name, given in _MEANT.items()
    }
    given = {name: one for name, one in meant.items() if one} | {name: name for name in options}
    # Compare without the dashes, which would make any two options similar.
    near = nearest(word.lstrip("-"), [name.lstrip("-") for name in given])
    return f", did you mean {given[f'--{near}']!r}?" if near else ""


def _coloured(stream: TextIO) -> Any:
    """Return a formatter that colours help, or None if `stream` gets no colours."""
    console = console_for(stream)
    if console is None or console.color_system is None:
        return None
    from rich_argparse import RawDescriptionRichHelpFormatter

    class Coloured(_Plain, RawDescriptionRichHelpFormatter):
        """Prints the same text as the plain help: brackets are not markup, headings stay in lower case."""

        group_name_formatter = str
        text_markup = help_markup = False
        styles = RawDescriptionRichHelpFormatter.styles | _STYLES
        highlights = [*RawDescriptionRichHelpFormatter.highlights, *_HIGHLIGHTS]  # noqa: RUF012

    return partial(Coloured, console=console)


def _number(expected: str, holds: Callable[[float], bool]) -> Callable[[str], float]:
    """Return the type of an argument that is a finite number for which `holds` returns true."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and holds(value)):
            raise argparse.ArgumentTypeError(f"expected {expected}, found {text!r}")
        return value

    return convert


finite = _number("a number", math.isfinite)
positive = _number("a number above 0", lambda value: value > 0)
pass_rate = _number("a share in [0, 1], such as 0.7", lambda value: 0 <= value <= 1)
level = _number("a level between 0 and 1, e.g. 0.95", lambda value: 0 < value < 1)


def whole(least: int = 1, most: float = math.inf) -> Callable[[str], int]:
    """Return the type of an argument that is a whole number from `least` to `most`."""
    span = f"{least} or more" if math.isinf(most) else f"{least} to {most}"

    def convert(text: str) -> int:
        # int() alone would accept 1_0 and digits of other scripts.
        if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"expected a whole number, {span}, found {text!r}")
        return int(text)

    return convert


def output(text: str) -> Path:
    """Convert the path of a file or folder to write; `-` is refused, as it is standard output elsewhere."""
    if text == "-":
        raise argparse.ArgumentTypeError("expected a path, found '-'; write to a file and print that")
    return Path(text)


def amount(is_positive: bool = False) -> Callable[[str], Amount]:
    """Return the type of an argument that is one amount of compute: 0 or more, or above 0."""

    def convert(text: str) -> Amount:
        try:
            return parse_amount(text, is_positive)
        except InputError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def amounts(text: str) -> tuple[Amount, ...]:
    """Convert amounts of compute, separated by commas.

    A comma may also be meant to group digits: `12,000`. Such a text is rejected if a group of three digits
    starts with 0, if the amounts do not increase, or if all of it could be one grouped number that starts
    with one or two digits (`12,500`). `100,200`, `10,20,400` and `12, 500` are lists.
    """
    parts = text.split(",")
    found = tuple(map(amount(), parts))
    if numbers := GROUPED.findall(text):
        if any(",0" in number for number in numbers):
            raise argparse.ArgumentTypeError(f"{text!r} has a comma in a number: write {spelled(text)}")
        is_one = all(re.match(GROUP, part) for part in parts[1:]) and len(parts[0]) < 3
        if is_one or not all(a.value < b.value for a, b in itertools.pairwise(found)):
            raise argparse.ArgumentTypeError(
                f"{text!r} is one amount with a comma in it, or several: write {spelled(text)}, or "
                + " ".join(f"--at {shlex.quote(part.strip())}" for part in parts)
            )
    return found


def _group(text: str) -> tuple[str, list[str]]:
    name, equals, runs = text.partition("=")
    parts = [part for part in runs.split(",") if part]
    paths: list[str] = []
    exists = os.path.exists  # Path.exists raises for names that are too long
    while parts:
        # A file may have a comma in its name, or a name that looks like a pattern.
        n = next((n for n in range(len(parts), 1, -1) if exists(",".join(parts[:n]))), 1)
        path = ",".join(parts[:n])
        found = [] if exists(path) else sorted(glob.glob(path))  # noqa: PTH207
        paths += found or [path]
        del parts[:n]
    if not (name and equals and paths):
        raise argparse.ArgumentTypeError(f"expected NAME=RUN,RUN, found {text!r}")
    return name, paths


_SHARED: dict[str, dict[str, Any]] = {
    "recipe": {
        "metavar": "RECIPE",
        "help": "a TOML file, the name of a built-in recipe, or a run folder, whose recipe is used",
    },
    "--base": {"metavar": "NAME"},
    "--budget": {"type": amount(), "metavar": "C"},
    "--group": {"type": _group, "action": "append", "default": [], "metavar": "NAME=RUN,RUN"},
    "--json": {"action": "store_true", "help": "print one JSON object and nothing else"},
    "--level": {
        "type": level,
        "default": 0.95,
        "metavar": "P",
        "help": "level of the intervals (default: 0.95)",
    },
    "--max-compute": {
        "type": amount(),
        "default": math.inf,
        "metavar": "C",
        "help": "leave out evaluations above compute C",
    },
    "--price": {"type": positive, "metavar": "USD"},
    "--prior": {
        # Copied from `scalerl.curve.prior`, as its import would make every command load NumPy.
        "choices": ("default", "flat"),
        "default": "default",
        "help": "prior of the curve: from typical runs, or flat over the measured range",
    },
    "--set": {"action": "append", "default": [], "metavar": "KEY=VALUE"},
    "--target": {"type": pass_rate, "metavar": "R"},
    "--x": {"metavar": "AXIS"},
}


def option(where: argparse._ActionsContainer, usage: str, help: str | None = None, **more: Any) -> None:
    """Add an option by its usage, "-o --output FILE", or an argument, "name NAME"; a flag has no value.

    "--like RUN ..." may be given several times, and is a list. An option shared by several commands takes its
    settings from `_SHARED`, unless given here.
    """
    words = usage.split()
    names = [word for word in words if word.startswith("-")] or words[:1]
    given: dict[str, Any] = _SHARED.get(usage, {}) | ({} if help is None else {"help": help}) | more
    if words[-1] == "...":
        words.pop()
        given |= {"action": "append", "default": []}
    if len(words) > len(names):
        given["metavar"] = words[-1]
    if not given.keys() & {"metavar", "choices", "action", "nargs"}:
        given["action"] = "store_true"
    where.add_argument(*names, **given)


def print_warnings(warnings: Iterable[object]) -> None:
    """Print warnings on standard error, each once."""
    for warning in dict.fromkeys(map(str, warnings)):
        print(f"warning: {warning}", file=sys.stderr)


def print_json(answer: Mapping[str, Any], indent: int | None = 2) -> None:
    """Print one JSON object on standard output, and nothing else is printed there (`scalerl.tty.Aside`)."""
    from scalerl.jsonl import dumps

    print(dumps(answer, indent=indent), file=getattr(sys.stdout, "answer", sys.stdout), flush=True)
