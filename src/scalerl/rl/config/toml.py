"""TOML as it is written by hand: files, and keys that are changed on the command line."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from scalerl import limits
from scalerl.errors import InputError
from scalerl.files import open_input

_PART = r"""[\w"'-]+[ \t]*\.[ \t]*"""
_DEEP_KEY = re.compile(rf"""(?<![\w"'-])(?:{_PART}){{{limits.DEPTH.most}}}""")
"""A key of too many parts, for which `tomllib` takes a time that grows with their square."""


def parse_toml(path: Path | Traversable, source: str | Path) -> dict[str, Any]:
    """The tables of a TOML file, which complaints call `source`.

    Raises:
        InputError: it cannot be read, is no TOML, or holds more than the limits allow.
    """
    try:
        with open_input(path) if isinstance(path, Path) else path.open("rb") as file:
            data = file.read(limits.TOML.most + 1)
    except OSError as error:
        raise InputError(f"{source}: cannot be read ({error.strerror})") from error
    limits.TOML.check(len(data), source)
    try:
        return _loads(data.decode("utf-8").replace("\r\n", "\n"), str(source))
    except ValueError as error:  # of texts in another encoding and of endless numbers, too
        raise InputError(f"{source}: not TOML ({error})") from error


def _loads(text: str, source: str) -> dict[str, Any]:
    """The tables of a text.

    Raises:
        InputError: they are nested deeper than `DEPTH` allows.
        ValueError: it is no TOML.
    """
    deep = InputError(f"{source}: more than {limits.DEPTH.most} levels of nesting, which is the limit")
    if _DEEP_KEY.search(text):
        raise deep
    try:
        values = tomllib.loads(text)
    except RecursionError:
        raise deep from None
    level: list[Any] = [values]
    for _ in range(limits.DEPTH.most + 1):
        level = [inner for value in level for inner in _inner(value)]
    if level:
        raise deep
    return values


def _inner(value: Any) -> Iterable[Any]:
    """The values in a table or a list."""
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list) else ()


def add_override(changes: dict[str, Any], override: str, option: str = "--set") -> None:
    """Add `override`, a text like `loss.max_ratio=4` that was given to `option`, to a tree of changes.

    Raises:
        InputError: it is no key and value, or goes into what is a value.
    """
    key, equals, text = override.partition("=")
    if not equals:
        raise InputError(f"{option} {override}: expected key=value")
    try:
        value = _loads(f"v = {text}", f"{option} {key}")["v"]
    except ValueError:
        value = text  # a bare word is a string
    *parents, last = key.strip().split(".")
    limits.DEPTH.check(len(parents), f"{option} {key[:60]}...")
    for parent in parents:
        changes = changes.setdefault(parent, {})
        if not isinstance(changes, dict):
            raise InputError(f"{option} {override}: {parent!r} is a value, not a table")
    changes[last] = value
