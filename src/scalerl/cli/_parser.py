"""What the parsers of all commands have in common: help with examples, and usage errors of one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NoReturn, TextIO

from scalerl.tty import console_for

_STYLES = {"argparse.groups": "bold", "argparse.example": "bold", "argparse.comment": "dim"}
_HIGHLIGHTS = (r"(?m)^  (?P<example>scalerl .*?)(?=  +#|$)", r"(?m)(?P<comment>  # .*)$")
"""Of the examples: the command, and what is said of it."""


class _Plain(argparse.RawDescriptionHelpFormatter):
    """Examples keep their lines."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._action_max_length = 14  # argparse would fold the longest name of a command


class Parser(argparse.ArgumentParser):
    """Argparse whose usage errors are one line, and whose help is coloured where a person looks on."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"formatter_class": _Plain, **options})

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with status 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def print_help(self, file: Any = None) -> None:
        """Print the help to `file` (standard output)."""
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
        """As argparse, but what is not known is an error of the command that was asked, with what is near."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [text for text in self._option_string_actions if text.startswith("--")]
            near = [nearest(text.partition("=")[0], options) for text in unknown if text.startswith("-")]
            self.error(f"unrecognized arguments: {' '.join(unknown)}{next(filter(None, near), '')}")
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse, but the nearest choice comes first: of ten commands one was meant."""
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            near = nearest(str(value), choices)
            raise argparse.ArgumentError(
                action, f"invalid choice: {value!r}{near} (choose from {', '.join(choices)})"
            )


def examples(text: str) -> str:
    """The epilog of a command: its examples, one a line, each with a comment."""
    return f"examples:\n{text.strip(chr(10))}"


def nearest(word: str, known: Iterable[str]) -> str:
    """`, did you mean 'fit'?` where one of the words known is near; else nothing."""
    import difflib

    near = difflib.get_close_matches(word, list(known), n=1)
    return f", did you mean {near[0]!r}?" if near else ""


def _coloured(stream: TextIO) -> Any:
    """What formats help in colours; None where there are to be none."""
    console = console_for(stream)
    if console is None or console.color_system is None:
        return None
    from rich_argparse import RawDescriptionRichHelpFormatter

    class Coloured(_Plain, RawDescriptionRichHelpFormatter):
        """The words are those of the plain help: brackets are brackets, headings are in small letters."""

        group_name_formatter = str
        text_markup = help_markup = False
        styles = RawDescriptionRichHelpFormatter.styles | _STYLES
        highlights = [*RawDescriptionRichHelpFormatter.highlights, *_HIGHLIGHTS]  # noqa: RUF012

    return partial(Coloured, console=console)
