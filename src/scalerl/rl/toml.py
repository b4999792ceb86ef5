"""TOML as it is written by hand: files, and keys that are changed on the command line."""

from __future__ import annotations

import tomllib
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from scalerl.errors import InputError


def parse_toml(path: Path | Traversable, source: str | Path) -> dict[str, Any]:
    """The tables of a TOML file, which complaints call `source`.

    Raises:
        InputError: it cannot be read, or is no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{source}: cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{source}: not TOML ({error})") from error


def add_override(changes: dict[str, Any], override: str, option: str = "--set") -> None:
    """Add `override`, a text like `loss.max_ratio=4` that was given to `option`, to a tree of changes.

    Raises:
        InputError: it is no key and value, or goes into what is a value.
    """
    key, equals, text = override.partition("=")
    if not equals:
        raise InputError(f"{option} {override}: expected key=value")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    *parents, last = key.strip().split(".")
    for parent in parents:
        changes = changes.setdefault(parent, {})
        if not isinstance(changes, dict):
            raise InputError(f"{option} {override}: {parent!r} is a value, not a table")
    changes[last] = value
