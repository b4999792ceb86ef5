"""Cutting a record back to where a checkpoint was made; what is cut off is kept in lost.jsonl.

    .cut.part       the lengths to cut to, and every line beyond them; written aside, synced, renamed
    the record      cut, file by file
    lost.jsonl      what .cut.part holds, at its end; written aside, synced, renamed
    .cut.part       removed

A kill at any moment leaves a record that the next resume can cut, and puts no line into lost.jsonl twice: if
`.cut.part` exists, that cut is finished first.
"""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from scalerl.errors import InputError
from scalerl.files import sync, write_atomically
from scalerl.jsonl import dumps, number, object_of
from scalerl.record.folder import CUT, RECORDS

LOST = "lost.jsonl"
_LONGEST_ROW = 2**20


def cut_record(folder: Path, lengths: Mapping[str, int]) -> None:
    """Cut the files of a record to `lengths` in bytes; a file without a length is removed.

    Raises:
        InputError: the file of an interrupted cut is damaged.
        OSError: a file cannot be read or written.
    """
    # An interrupted cut is finished first: some files are cut, and its lines are not in lost.jsonl yet.
    end_cut(folder)
    texts = {name: _text_from(folder / name, lengths.get(name, 0)) for name in RECORDS}
    tails = {name: text.removesuffix("\n").split("\n") for name, text in texts.items() if text}
    if not tails:
        return
    kept, end = {}, lengths.get("steps.jsonl", 0)
    if end:
        with (folder / "steps.jsonl").open("rb") as file:
            file.seek(max(end - _LONGEST_ROW, 0))
            kept = _last_step(file.read(min(end, _LONGEST_ROW)).decode(errors="replace").split("\n"))
    cost = _cost(kept, tails.get("steps.jsonl", []))
    head = {"resumed": time.time(), "lost": cost, "cut": {name: lengths.get(name, 0) for name in tails}}
    lines = ({"file": name, "line": line} for name, tail in tails.items() for line in tail)
    write_atomically(folder / CUT, (dumps(row) + "\n" for row in (head, *lines)))
    sync(folder)
    end_cut(folder)


def end_cut(folder: Path) -> None:
    """Finish the cut that `cut_record` has prepared, if there is one; raises the same errors."""
    prepared = folder / CUT
    if not prepared.is_file():
        return
    # surrogateescape: lines of other programs, in any encoding, are kept byte by byte.
    text = prepared.read_text(encoding="utf-8", errors="surrogateescape")
    for name, length in _lengths_of(text, prepared).items():
        path = folder / name
        if not length:
            path.unlink(missing_ok=True)
        # Only ever shorter: a file that a kill left short must not be padded with zeros.
        elif path.exists() and path.stat().st_size > length:
            os.truncate(path, length)
            sync(path)
    lost = _text_from(folder / LOST, 0)
    if not lost.endswith(text):  # else the kill came after this write
        end = lost.rfind("\n") + 1  # after it is a whole line, which stays, or a torn one
        before = lost + "\n" if object_of(lost[end:]) else lost[:end]
        write_atomically(folder / LOST, before + text, errors="surrogateescape")
        sync(folder)
    prepared.unlink()
    sync(folder)


def _lengths_of(text: str, path: Path) -> dict[str, int]:
    cut = object_of(text.partition("\n")[0]).get("cut")
    if not isinstance(cut, dict) or not all(
        name in RECORDS and isinstance(length, int) and length >= 0 for name, length in cut.items()
    ):
        raise InputError(
            f"{path}: damaged; it holds lines of the record that were being cut: keep it elsewhere"
        )
    return cut


def ends_at(path: Path, length: int) -> bool:
    """Return whether a line of the file ends after `length` bytes, so that it can be cut there."""
    try:
        with path.open("rb") as file:
            file.seek(max(length - 1, 0))
            return length == 0 or file.read(1) == b"\n"
    except OSError:
        return False


def _text_from(path: Path, start: int) -> str:
    """Read the text of a file from a byte on, empty without a file; bytes that are not UTF-8 are kept."""
    if not os.path.lexists(path):
        return ""
    with path.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="surrogateescape")


def _cost(before: Mapping[str, Any], lost: Sequence[str]) -> dict[str, Any]:
    """Return the counters at the last of the lost steps, less those at the last step that is kept.

    Lines that are not our steps (another program's, or torn by a kill) are ignored.
    """
    after = _last_step(lost)
    if not after:
        return {"steps": 0}
    cost: dict[str, Any] = {"steps": after["step"] - before.get("step", 0)}
    for name in ("device_seconds", "flops", "tokens"):
        start = before.get(name, {})
        cost[name] = {key: value - start.get(key, 0) for key, value in after[name].items()}
    return cost


def _last_step(lines: Sequence[str]) -> dict[str, Any]:
    """Return the last line that is a step; empty if there is none."""
    return next((row for line in reversed(lines) if _is_step(row := object_of(line))), {})


def _is_step(row: Mapping[str, Any]) -> bool:
    """Return whether a row is a line of steps.jsonl with its counters."""
    values = [row.get("step")]
    for name in ("device_seconds", "flops", "tokens"):
        if not isinstance(counters := row.get(name), dict):
            return False
        values += counters.values()
    with suppress(InputError):
        for value in values:
            number(value, "a counter")
        return True
    return False
