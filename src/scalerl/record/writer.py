"""The writer of a run folder; no other code writes one.

Evaluations, forecasts and alarms are synced to disk as they are written; steps are only flushed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from scalerl.errors import WriteError
from scalerl.files import write_atomically, writing
from scalerl.jsonl import dumps, read_object
from scalerl.record.cut import cut_record
from scalerl.record.evaluation import EvalPoint
from scalerl.record.folder import RECORDS, RunFolder
from scalerl.record.reader import SCHEMA, RunRecord


class RunWriter:
    """Writes a run folder, one whole line at a time; no other code or process writes there.

    Lines go to the folder that was opened, even if it is moved; `folder` says where it is. Every method that
    writes raises WriteError if the disk refuses it, or if another program has written to a file.
    """

    def __init__(self, path: str | Path | RunFolder, config: Mapping[str, Any]) -> None:
        """Create the folder `path` and write config.json.

        A `RunFolder` is already claimed, and stays claimed when this is closed.

        Raises:
            InputError: the folder exists and is not empty, or another process writes there.
        """
        self._open(path, new=True)
        self.config = json.loads(dumps({"schema": SCHEMA, **config}))
        self._write_config()

    @classmethod
    def resume(cls, path: str | Path | RunFolder, lengths: Mapping[str, int]) -> RunWriter:
        """Continue the run folder `path` from where its files had these lengths, in bytes.

        What comes after is moved to lost.jsonl, under a line that states its cost.

        Raises:
            InputError: another process writes there, or config.json cannot be read.
        """
        writer = cls.__new__(cls)
        writer._open(path)
        here = writer.folder.here()
        with _writing(writer.path):
            cut_record(here, lengths)
        writer._ends |= lengths
        writer.config = read_object(here / "config.json")
        return writer

    def _open(self, path: str | Path | RunFolder, new: bool = False) -> None:
        self.folder = path if isinstance(path, RunFolder) else RunFolder.claim(path, new)
        self.path = self.folder.path
        self._is_own = not isinstance(path, RunFolder)
        self._ends = dict.fromkeys(RECORDS, 0)
        """Length of each file, in bytes, after the last write."""

    def close(self) -> None:
        """Unlock the folder; nothing can be written after this."""
        if self._is_own:
            self.folder.close()

    def change(self, **changes: Any) -> None:
        """Change values in config.json, or in its tables (such as the recipe), where they differ."""
        # Compared as they will be read: tuples are lists, and NaN is null.
        now = json.loads(dumps({**self.config, **changes}))
        for name, before in self.config.items():
            if isinstance(before, dict) and isinstance(now[name], dict):
                now[name] = {**before, **now[name]}
        if now != self.config:
            self.config = now
            self._write_config()

    def checkpointed(self) -> None:
        """Record in config.json that the run has written a checkpoint."""
        self.change(checkpointed=True)

    def _write_config(self) -> None:
        with _writing(self.path):
            write_atomically(self.folder.here() / "config.json", dumps(self.config, indent=2) + "\n")

    def lengths(self) -> dict[str, int]:
        """Sync the files, and return the length of each in bytes, as `resume` takes it."""
        lengths = {}
        for name in RECORDS:
            with _writing(self.path / name):
                try:
                    handle = self.folder.open(name, os.O_RDONLY)
                except FileNotFoundError:
                    self._check_end(name, 0)
                    continue
                try:
                    os.fsync(handle)
                    lengths[name] = os.fstat(handle).st_size
                finally:
                    os.close(handle)
            self._check_end(name, lengths[name])
        return lengths

    def evaluation(
        self, point: EvalPoint, prompt_set: str, prompt_ids: Sequence[str], correct_P: np.ndarray
    ) -> None:
        """Append one evaluation, with the successes `correct_P` of its prompts."""
        successes = {
            "step": point.step,
            "prompt_set": prompt_set,
            "n": point.n_samples,
            "id": list(prompt_ids),
            "correct": [int(c) for c in correct_P],
        }
        # The prompts first, so that every evaluation on record has its successes on record.
        self._append("eval_prompts.jsonl", successes)
        self._append("evals.jsonl", asdict(point), sync=True)

    def downstream(self, row: Mapping[str, Any]) -> None:
        """Append one evaluation of a downstream suite."""
        self._append("downstream.jsonl", row, sync=True)

    def whole(self, record: RunRecord) -> None:
        """Write all evaluations and steps of a run that was read from a log, at once."""
        steps = record.source_steps() if record.source_steps else ()
        # The file that makes the folder a run comes last.
        lines = {"steps.jsonl": steps, "evals.jsonl": (asdict(one) for one in record.evals)}
        for name, rows in lines.items():
            with _writing(self.path / name):
                write_atomically(self.folder.here() / name, (dumps(row) + "\n" for row in rows))

    def step(self, row: Mapping[str, Any], groups: Mapping[str, Any] | None = None) -> None:
        """Append one trainer step, with the outcome of each of its groups."""
        if groups is not None:
            self._append("groups.jsonl", groups)
        self._append("steps.jsonl", row)

    def samples(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append completions to be kept as text."""
        for row in rows:
            self._append("samples.jsonl", row)

    def timeline(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append lines of the timeline."""
        for row in rows:
            self._append("timeline.jsonl", row)

    def alarm(self, row: Mapping[str, Any]) -> None:
        """Append the start or the end of an alarm."""
        self._append("alarms.jsonl", row, sync=True)

    def forecast(self, row: Mapping[str, Any]) -> None:
        """Append one forecast; it is on the disk when this returns, and is never edited.

        A resume from an earlier checkpoint moves it to lost.jsonl."""
        self._append("forecasts.jsonl", row, sync=True)

    def _append(self, name: str, row: Mapping[str, Any], sync: bool = False) -> None:
        self.folder.here()  # raises if the folder was removed
        data = (dumps(row) + "\n").encode()
        with _writing(self.path / name):
            try:
                # Created once: a file that was removed would silently start again without its first half.
                handle = self.folder.open(name, _APPENDING if self._ends[name] else _APPENDING | os.O_CREAT)
            except FileNotFoundError:
                self._check_end(name, 0)
                return
            try:
                before = os.lseek(handle, 0, os.SEEK_END)
                self._check_end(name, before)
                _append(handle, data, sync)
            finally:
                os.close(handle)
        self._ends[name] = before + len(data)

    def _check_end(self, name: str, end: int) -> None:
        """Raise a WriteError if another program wrote to the file: a checkpoint's lengths would be wrong."""
        if self._ends[name] != end:
            raise WriteError(
                f"{self.path / name}: {end} bytes long, and {self._ends[name]} were written: another program "
                "has removed or changed it; the run ends; "
                f"--resume goes on from the newest checkpoint that the record holds"
            )


_APPENDING = os.O_WRONLY | os.O_APPEND
_writing = partial(writing, more="; what was written before is kept")


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append one line of JSON, whole or not at all; raise WriteError if the disk refuses it."""
    with _writing(path), path.open("ab", buffering=0) as file:
        _append(file.fileno(), (dumps(row) + "\n").encode(), synced=True)


def _append(handle: int, data: bytes, synced: bool) -> None:
    before = os.lseek(handle, 0, os.SEEK_END)
    try:
        # A short write means a full disk, which Linux reports only at the next write.
        if os.write(handle, data) != len(data):
            raise OSError(28, os.strerror(28))
        if synced:
            os.fsync(handle)
    except OSError:
        os.ftruncate(handle, before)  # a full disk leaves no torn line
        raise
