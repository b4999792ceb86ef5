"""Writing a run folder: the one code that does.

Evaluations, forecasts and alarms are synced to the disk as they are written, steps are flushed.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from scalerl.errors import InputError, WriteError
from scalerl.files import is_aside, lock, sync, write_atomically
from scalerl.jsonl import dumps
from scalerl.record import SCHEMA, EvalPoint

RECORDS = (
    *("evals.jsonl", "eval_prompts.jsonl", "steps.jsonl", "groups.jsonl"),
    *("forecasts.jsonl", "alarms.jsonl", "timeline.jsonl"),
)
"""The files that are appended to."""
_SERVER_LOG = re.compile(r"vllm-\d+\.log")


class RunWriter:
    """Writes a run folder, one whole line at a time; no other code writes there, and no other process."""

    def __init__(self, path: str | Path, config: Mapping[str, Any]) -> None:
        """Create the folder `path` and write config.json.

        Raises:
            InputError: the folder exists already and is not empty.
            WriteError: the disk does not take it.
        """
        self.path = Path(path)
        check_unused(self.path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock()
            write_atomically(self.path / "config.json", dumps({"schema": SCHEMA, **config}, indent=2) + "\n")
        except OSError as error:
            raise _write_error(self.path, error) from error

    @classmethod
    def resume(cls, path: str | Path, lengths: Mapping[str, int]) -> RunWriter:
        """Go on writing the run folder `path` from where its files had these lengths, in bytes.

        What comes after is moved to lost.jsonl, under a line that says what it had cost.

        Raises:
            InputError: another process writes there.
            WriteError: the disk does not take it.
        """
        writer = cls.__new__(cls)
        writer.path = Path(path)
        try:
            writer._lock()
            writer._cut(lengths)
        except OSError as error:
            raise _write_error(writer.path, error) from error
        return writer

    def change(self, **changes: Mapping[str, Any]) -> None:
        """Put parts of its tables (the recipe, say) into config.json, where they are others there.

        Raises:
            WriteError: the disk does not take it.
        """
        path = self.path / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        changed = config | {name: {**config.get(name, {}), **parts} for name, parts in changes.items()}
        if changed != config:
            try:
                write_atomically(path, dumps(changed, indent=2) + "\n")
            except OSError as error:
                raise _write_error(self.path, error) from error

    def lengths(self) -> dict[str, int]:
        """The length of each file in bytes, as `resume` takes it; what they hold is on the disk."""
        lengths = {}
        for path in (self.path / name for name in RECORDS):
            if path.exists():
                sync(path)
                lengths[path.name] = path.stat().st_size
        return lengths

    def _cut(self, lengths: Mapping[str, int]) -> None:
        tails = {}
        for path in (self.path / name for name in RECORDS):
            if path.exists() and (tail := path.read_bytes()[lengths.get(path.name, 0) :]):
                tails[path.name] = tail.decode(errors="replace").splitlines()
        if not tails:
            return
        lines = [{"file": name, "line": line} for name, tail in tails.items() for line in tail]
        head = {"resumed": time.time(), "lost": self._cost(lengths, tails.get("steps.jsonl", []))}
        text = "".join(dumps(row) + "\n" for row in (head, *lines))
        _append(self.path / "lost.jsonl", text.encode(), synced=True)
        for name in tails:
            if name in lengths:
                os.truncate(self.path / name, lengths[name])
            else:
                (self.path / name).unlink()

    def _cost(self, lengths: Mapping[str, int], lost: Sequence[str]) -> dict[str, Any]:
        """The counters at the last of the lost steps, less those at the last that is kept."""
        kept = (self.path / "steps.jsonl").read_bytes()[: lengths.get("steps.jsonl", 0)] if lost else b""
        before, after = (_last_row(lines) for lines in (kept.decode().splitlines(), lost))
        cost: dict[str, Any] = {"steps": after.get("step", 0) - before.get("step", 0) if after else 0}
        for name in ("device_seconds", "flops", "tokens") if after else ():
            start = before.get(name, {})
            cost[name] = {key: value - start.get(key, 0) for key, value in after[name].items()}
        return cost

    def _lock(self) -> None:
        """Held until this process ends, however it does."""
        handle = lock(self.path, "another process is writing this run")
        self.close = weakref.finalize(self, os.close, handle)

    def evaluation(
        self, point: EvalPoint, prompt_set: str, prompt_ids: Sequence[str], correct_P: np.ndarray
    ) -> None:
        """Append one evaluation, and the successes `correct_P` of each of its prompts."""
        successes = {
            "step": point.step,
            "prompt_set": prompt_set,
            "n": point.n_samples,
            "id": list(prompt_ids),
            "correct": [int(c) for c in correct_P],
        }
        # The prompts first: an evaluation that is on record has its successes on record.
        self._append("eval_prompts.jsonl", successes)
        self._append("evals.jsonl", asdict(point), sync=True)

    def whole(self, evals: Iterable[EvalPoint], steps: Iterable[Mapping[str, Any]]) -> None:
        """Write all evaluations and steps of a run that has them already, at once.

        Raises:
            WriteError: the disk does not take it.
        """
        # What makes it a run comes last.
        lines = {"steps.jsonl": steps, "evals.jsonl": (asdict(one) for one in evals)}
        for name, rows in lines.items():
            try:
                write_atomically(self.path / name, (dumps(row) + "\n" for row in rows))
            except OSError as error:
                raise _write_error(self.path / name, error) from error

    def step(self, row: Mapping[str, Any], groups: Mapping[str, Any] | None = None) -> None:
        """Append one trainer step, and what became of each of its groups."""
        if groups is not None:
            self._append("groups.jsonl", groups)
        self._append("steps.jsonl", row)

    def timeline(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append who did what when."""
        for row in rows:
            self._append("timeline.jsonl", row)

    def alarm(self, row: Mapping[str, Any]) -> None:
        """Append what is wrong with the run's health, or is no longer."""
        self._append("alarms.jsonl", row, sync=True)

    def forecast(self, row: Mapping[str, Any]) -> None:
        """Append one forecast; it is on the disk when this returns, and is never changed."""
        self._append("forecasts.jsonl", row, sync=True)

    def _append(self, name: str, row: Mapping[str, Any], sync: bool = False) -> None:
        path = self.path / name
        append_row(path, row, sync)


def append_row(path: Path, row: Mapping[str, Any], sync: bool = True) -> None:
    """Append one line of JSON, whole or not at all.

    Raises:
        WriteError: the disk does not take it.
    """
    try:
        _append(path, (dumps(row) + "\n").encode(), sync)
    except OSError as error:
        raise _write_error(path, error) from error


def _append(path: Path, data: bytes, synced: bool) -> None:
    with path.open("ab", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        try:
            if file.write(data) != len(data):
                raise OSError(28, os.strerror(28))
            if synced:
                os.fsync(file.fileno())
        except OSError:
            file.truncate(before)  # no torn line stays behind a full disk
            raise


def _last_row(lines: Sequence[str]) -> dict[str, Any]:
    """The last line that is whole; a kill may have cut the very last."""
    for line in reversed(lines[-2:]):
        with suppress(ValueError):
            return json.loads(line)
    return {}


def check_unused(folder: Path) -> None:
    """Raise InputError if `folder` cannot become a new run: a file, not empty, out of reach, or closed."""
    try:
        is_used = folder.exists() and (not folder.is_dir() or not all(map(_is_of_a_start, folder.iterdir())))
    except OSError as error:  # a name too long, a folder on the way that may not be entered
        raise InputError(f"{folder}: {error.strerror or error}") from error
    if is_used:
        raise InputError(f"{folder} exists already: choose another folder with -o, or remove it")
    check_writable(folder)


def check_writable(folder: Path) -> None:
    """Raise InputError if no file can be made in `folder`, or the folder itself cannot be; nothing stays."""
    made: list[Path] = []
    try:
        for place in reversed([folder, *folder.parents]):
            if not place.exists():
                place.mkdir()
                made.append(place)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"{folder}: nothing can be written there ({error.strerror or error})") from error
    finally:
        for place in reversed(made):
            with suppress(OSError):  # another run has begun there
                place.rmdir()


def _is_of_a_start(path: Path) -> bool:
    """What a run leaves that was killed as it began, and the logs of servers, which begin before it."""
    return is_aside(path) or _SERVER_LOG.fullmatch(path.name) is not None


def _write_error(path: Path, error: OSError) -> WriteError:
    return WriteError(f"{path}: {error.strerror or error}; what was written before is kept")
