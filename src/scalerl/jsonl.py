"""JSON and JSON Lines, and the content of any file that a user names.

A file that cannot be read, or a line that is not a JSON object, raises an InputError that names it.
"""

import codecs
import io
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from scalerl import limits
from scalerl.errors import InputError, brief
from scalerl.files import open_input, reading

_COMPRESSED = {
    b"\x1f\x8b": ("gzip", "gunzip -c FILE > LOG"),
    b"PK\x03\x04": ("zip", "unzip FILE"),
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -dc FILE > LOG"),
    b"\xfd7zXZ\0": ("xz", "xz -dc FILE > LOG"),
}
"""The first bytes of compressed files; the commands accept files of any name."""


def read_bytes(path: Path) -> bytes:
    """Return the content of a file (or of a pipe, which can be read only once).

    Raises:
        InputError: there is no such file, it cannot be read, exceeds `limits.WHOLE`, or is a device or a
            kernel file, which may be endless.
    """
    with reading(path), open_input(path) as file:
        about = os.fstat(file.fileno())
        limits.WHOLE.check(about.st_size, path)
        # `stat` reports a size of 0 for a pipe.
        return file.read() if stat.S_ISREG(about.st_mode) else whole_of(file, str(path))


def whole_of(file: BinaryIO, source: str) -> bytes:
    """Return the rest of a pipe, or of an open file of unknown size.

    Raises:
        InputError: it exceeds `limits.WHOLE`.
        OSError: it cannot be read.
    """
    data = file.read(limits.WHOLE.most + 1)
    limits.WHOLE.check(len(data), source)
    return data


def parse_json(data: bytes, where: str) -> Any:
    """Return the value of a JSON text in UTF-8.

    Raises:
        InputError: it would take too much memory, or is nested too deeply; `where` starts the message.
        ValueError: it is not JSON.
    """
    limits.check_json(data, where)
    try:
        return json.loads(data.decode())
    except RecursionError as error:  # Python's limit, which exceeds ours
        raise InputError(
            f"{where}: more than {limits.DEPTH.most} {limits.DEPTH.what}: {limits.DEPTH.advice}"
        ) from error


def why_not_json(error: ValueError) -> str:
    """Return why `parse_json` raised a `ValueError`; it names the line only if the text has several."""
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    line = f"line {error.lineno}, " if "\n" in error.doc.rstrip() else ""
    return f"{error.msg.lower().removesuffix(' at')} at {line}column {error.colno}"


def read_object(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file."""
    data = read_bytes(path)
    check_not_utf16(data, str(path))
    check_not_compressed(data, str(path))
    try:
        found = parse_json(data.removeprefix(codecs.BOM_UTF8), str(path))
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({why_not_json(error)})") from error
    if not isinstance(found, dict):
        raise InputError(f"{path}: expected one JSON object")
    return found


def read_jsonl(path: Path, warnings: list[str]) -> list[tuple[int, dict[str, Any]]]:
    """Apply `parse_jsonl` to a file."""
    return parse_jsonl(read_bytes(path), str(path), warnings)


def read_rows(path: Path, warnings: list[str]) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file; none if there is no such file."""
    return [row for _, row in read_jsonl(path, warnings)] if path.is_file() else []


def read_last(path: Path) -> dict[str, Any]:
    """Return the last complete object of a JSONL file that may be written to; empty if there is none.

    Only the last 256 KiB are read, as the file of a long run is large.
    """
    with reading(path):
        if not path.exists():
            return {}
        if not path.is_file():  # opening a pipe may block for ever
            raise InputError(f"{path}: expected a file")
        with path.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - 2**18, 0))
            lines = file.read().split(b"\n")
    return next(filter(None, map(object_of, reversed(lines))), {})


def object_of(line: str | bytes) -> dict[str, Any]:
    """Return the JSON object of a line; empty if it is not one, as when the line is still being written."""
    with suppress(ValueError, RecursionError):
        found = json.loads(line)
        return found if isinstance(found, dict) else {}
    return {}


def parse_jsonl(data: bytes, source: str, warnings: list[str]) -> list[tuple[int, dict[str, Any]]]:
    """Return the objects of a JSONL text with their line numbers; an unfinished last line goes to `warnings`.

    Raises:
        InputError: the text is in UTF-16, or a line other than the last is not a JSON object.
    """
    limits.check_json(data, source)  # all rows are held at once
    return list(iter_jsonl(data, source, warnings))


def iter_jsonl(data: bytes, source: str, warnings: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield what `parse_jsonl` returns, one object at a time."""
    check_not_utf16(data, source)
    lines = enumerate(io.BytesIO(data.removeprefix(codecs.BOM_UTF8)), start=1)
    return parse_lines(((number, line, line.endswith(b"\n")) for number, line in lines), source, warnings)


def parse_lines(
    lines: Iterable[tuple[int, bytes, bool]], source: str, warnings: list[str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line numbers and objects, from lines given as (number, text, ends with a line break).

    An unfinished last line goes to `warnings`.
    """
    for number, line, ended in lines:
        if not line.strip():
            continue
        where = f"{source}, line {number}"
        limits.ROW.check(len(line), where)
        try:
            row = parse_json(line, where)
        except (ValueError, InputError) as error:  # not UTF-8, not JSON, or nested too deeply
            if not ended:  # the writer was cut off
                warnings.append(f"{source}: the last line is unfinished (a crash while writing); left out")
                return
            if isinstance(error, InputError):
                raise
            raise InputError(f"{where}: not JSON ({why_not_json(error)})") from error
        if not isinstance(row, dict):
            raise InputError(f"{where}: expected one JSON object")
        yield number, row


def number(value: Any, name: str) -> float:
    """Return the finite number of a field; Python writes NaN, Infinity and integers of any size to JSON.

    Raises:
        InputError: the value is anything else; the message names the field.
    """
    try:
        found = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise InputError(f"'{name}' must be a finite number, or null where not known, found {brief(value)}")
    return found


def whole(value: Any, name: str, least: int = 0) -> int:
    """Return the whole number of a field, from `least` to 2**53, beyond which float64 skips integers.

    Raises:
        InputError: the value is anything else; the message names the field.
    """
    found = number(value, name)
    if not (found.is_integer() and least <= found <= 2**53):
        raise InputError(f"'{name}' must be a whole number of {least} or more, found {brief(value)}")
    return int(found)


def check_not_utf16(data: bytes, source: str) -> None:
    """Raise an InputError if the bytes start like UTF-16, which Windows tools write."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise InputError(f"{source}: a text in UTF-16; expected UTF-8 (iconv -f UTF-16 -t UTF-8)")


def check_not_compressed(data: bytes, source: str) -> None:
    """Raise an InputError if the bytes start like a compressed file."""
    for start, (kind, command) in _COMPRESSED.items():
        if data.startswith(start):
            raise InputError(f"{source}: compressed ({kind}): decompress it first ({command})")


def dumps(value: Any, indent: int | None = None) -> str:
    """Return JSON text, with null for NaN and infinities, which RFC 8259 does not allow."""
    return json.dumps(plain(value), indent=indent, allow_nan=False)


def plain(value: Any) -> Any:
    """Convert to JSON's types: lists for tuples and arrays, None for NaN and infinities."""
    if value is None or isinstance(value, str | int):  # most values are leaves
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    return plain(value.item()) if isinstance(value, np.generic) else value


def flat(
    values: Mapping[str, Any], prefix: str = "", separator: str = ".", where: str = "a row"
) -> dict[str, Any]:
    """Flatten nested objects in their order; keys are joined by `separator`, after `prefix`.

    Raises:
        InputError: they exceed the limits of values, levels or characters in names. A name is repeated for
            everything below it: a name of 100 kB above 40,000 keys takes 4 GB.
    """
    found: dict[str, Any] = {}
    waiting: list[tuple[str, Any, int]] = [(f"{prefix}{key}", values[key], 1) for key in reversed([*values])]
    characters = 0
    while waiting:
        name, value, depth = waiting.pop()
        if not isinstance(value, Mapping):
            found[name] = value
            continue
        limits.DEPTH.check(depth, where)
        limits.KEYS.check(len(found) + len(waiting) + len(value), where)
        characters += len(value) * (len(name) + 1) + sum(map(len, map(str, value)))
        limits.NAMES.check(characters, where)
        waiting += [(f"{name}{separator}{key}", value[key], depth + 1) for key in reversed([*value])]
    limits.KEYS.check(len(found), where)
    return found
