"""Writing a run folder: the one code that does.

Evaluations, forecasts and alarms are synced to the disk as they are written, steps are flushed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from scalerl.errors import InputError, WriteError
from scalerl.files import write_atomically
from scalerl.jsonl import dumps
from scalerl.record import SCHEMA, EvalPoint


class RunWriter:
    """Writes a run folder, one whole line at a time; no other code writes there.

    Evaluations, forecasts and alarms are synced to the disk as they are written, steps are flushed.
    """

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
            write_atomically(self.path / "config.json", dumps({"schema": SCHEMA, **config}, indent=2) + "\n")
        except OSError as error:
            raise _write_error(self.path, error) from error

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

    def step(self, row: Mapping[str, Any]) -> None:
        """Append one trainer step."""
        self._append("steps.jsonl", row)

    def alarm(self, row: Mapping[str, Any]) -> None:
        """Append what is wrong with the run's health, or is no longer."""
        self._append("alarms.jsonl", row, sync=True)

    def forecast(self, row: Mapping[str, Any]) -> None:
        """Append one forecast; it is on the disk when this returns, and is never changed."""
        self._append("forecasts.jsonl", row, sync=True)

    def _append(self, name: str, row: Mapping[str, Any], sync: bool = False) -> None:
        line = (dumps(row) + "\n").encode()
        path = self.path / name
        try:
            with path.open("ab", buffering=0) as file:
                before = file.seek(0, os.SEEK_END)
                try:
                    if file.write(line) != len(line):
                        raise OSError(28, os.strerror(28))
                    if sync:
                        os.fsync(file.fileno())
                except OSError:
                    file.truncate(before)  # no torn line stays behind a full disk
                    raise
        except OSError as error:
            raise _write_error(path, error) from error


def check_unused(folder: Path) -> None:
    """Raise InputError if `folder` cannot become a new run: it is a file, or holds something."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists already: choose another folder with -o, or remove it")


def _write_error(path: Path, error: OSError) -> WriteError:
    return WriteError(f"{path}: {error.strerror or error}; what was written before is kept")
