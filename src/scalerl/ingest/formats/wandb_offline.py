"""The files that W&B keeps of a run (`wandb/run-*/run-ID.wandb`), of offline and online runs alike.

Neither W&B's package nor that of protocol buffers is needed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scalerl.errors import InputError
from scalerl.ingest.formats.format import Format, Unread, Wanted, each_run
from scalerl.ingest.formats.lines import first_bytes
from scalerl.ingest.formats.wandb_file import MAGIC, WandbReader, identify
from scalerl.ingest.logs.log import Log, LogBuilder, Room
from scalerl.ingest.logs.order import Cells, is_step
from scalerl.jsonl import flat

_NAME = "wandb"
_EXPECTED = "expected a run-ID.wandb, its folder, or the wandb or project folder that holds such folders"
_LINKS = " (symbolic links are left out)"
_FOLDERS = ("", "wandb", ".wandb", "wandb/wandb")
_PATTERNS = ("*.wandb", "run-*/*.wandb", "offline-run-*/*.wandb")

# The trainer's own count of its steps, the surest name first; names that match one expression are one count.
# open-instruct logs its steps as `training_step`, and completions as `global_step`.
# `training/global_step` is verl's, which sets W&B's steps: its fully asynchronous trainer counts several
# updates of the optimizer in each.
_ROLLOUTS = re.compile(r"(?:rollout|eval)/step")
"""slime's count of rollouts, beside its updates, of which a rollout may have several: the last one counts."""
_UPDATES = "train/step"
_OWN_STEPS = (
    re.compile(r"(?:.*/)?training_step"),
    re.compile(r"(?!training/)(?:.*/)?global_steps?"),
    re.compile(r"(?:.*/)?train(?:er)?_step"),
    _ROLLOUTS,
    re.compile(r"train(?:er|ing)?/step"),
    re.compile(r"step"),
)
_MOST_LOST = 0.1  # of the values: a count that would lose more is not that of the trainer's steps


def recognises(path: Path) -> bool:
    """Return whether a path is a `.wandb` file, or a folder that has some where W&B puts them."""
    if path.is_dir():
        return bool(_files(path))
    return (path.is_file() and path.suffix == ".wandb") or first_bytes(path, len(MAGIC)) == MAGIC


def read(path: Path, wanted: Wanted) -> Sequence[Log | Unread]:
    """Read every run once, in the order of their starts; the files of a resumed run make one run."""
    runs: dict[str, list[_Part]] = {}
    unread: list[Unread] = []
    for file in _files(path):
        try:
            run_id, name, start = identify(file)
        except (InputError, OSError) as error:
            if path.is_file():
                raise
            unread.append(Unread(str(path), file.stem.removeprefix("run-"), str(error)))
        else:
            known = math.inf if math.isnan(start) else start
            runs.setdefault(run_id, []).append(_Part(known, str(file), name, start))
    missing = unread[0].reason if unread else f"{path}: no file of W&B there; {_EXPECTED}{_LINKS}"
    by_file = {Path(parts[0].path): parts for parts in sorted(map(sorted, runs.values()))}
    room = Room(str(path))
    # A run that was renamed at its resume has its latest name.
    names = ((file, parts[-1].name) for file, parts in by_file.items())
    read_one = lambda file, _: [_read_run(by_file[file], wanted, room)]  # noqa: E731
    return [*each_run(path, names, read_one, missing, room), *unread]


FORMAT = Format(_NAME, "files of Weights & Biases (run-ID.wandb, or a wandb folder)", recognises, read)


class _Part(NamedTuple):
    """One file of a run, to be sorted by time."""

    known_start: float
    """Start of the run; unknown ones come last, by their paths, which contain a date."""
    path: str
    name: str
    """The display name, or the id."""
    start: float


def _files(path: Path) -> list[Path]:
    """Return the file, or those in a folder; links are not followed (W&B's latest-run is one)."""
    if path.is_file():
        return [path]
    return [
        file
        for folder in _FOLDERS
        for pattern in _PATTERNS
        for file in sorted((path / folder).glob(pattern))
        # Not through a link, be it the file or a folder on the way.
        if not any(one.is_symlink() for one in (file, *file.parents[: len(file.relative_to(path).parts) - 1]))
        and file.is_file()
    ]


def _read_run(parts: Sequence[_Part], wanted: Wanted, room: Room) -> Log:
    """Read one run from its files, which are given in the order of time."""
    source = parts[-1].path
    builder = LogBuilder(source, _NAME, parts[0].name, lambda name: wanted(name) or is_own_step(name), room)
    config: dict[str, Any] = {}
    segments: list[Segment] = []
    for part in parts:  # one process after another: their rows are in order, as in one file
        reader, first = WandbReader(Path(part.path), part.start, builder, config), builder.n_rows
        reader.read()
        builder.name = reader.name or builder.name
        segments.append(Segment(first, builder.n_rows, reader.has_own_steps))
    builder.config = flat({key: value for key, value in config.items() if key != "_wandb"}, where=source)
    return build_log(builder, segments, wanted)


def build_log(builder: LogBuilder, segments: Sequence[Segment], wanted: Wanted, tracker: str = "W&B") -> Log:
    """Return the log of all rows, at the trainer's own steps if these were logged."""
    cells = builder.cells()
    kept = {name: one.row_V for name, one in cells.items() if wanted(name)}
    own_R = _own_steps(cells, kept, segments, builder, tracker)
    if not builder.names and not cells:
        builder.notes.append("no numbers were logged")
    step_R = _calls(segments, builder) if own_R is None else own_R
    return builder.build(step_R, cells.keys() - kept.keys())


@dataclass(frozen=True)
class Segment:
    """The rows of one file of a run."""

    first: int
    stop: int
    has_own_steps: bool
    """Whether the trainer set the numbers of W&B's steps."""

    def lost(self, row_V: np.ndarray, step_R: np.ndarray, has_own_R: np.ndarray) -> int:
        """Count the values of a metric that would be lost: their step repeats, or belongs to another row."""
        row_V = row_V[slice(*np.searchsorted(row_V, [self.first, self.stop]))]
        step_V = step_R[row_V]
        follows_V = np.insert(np.diff(step_V) == 0, 0, values=False)[: len(step_V)]
        is_first_V = np.zeros(len(step_V), dtype=bool)
        is_first_V[np.unique(step_V, return_index=True)[1]] = True
        return int((~is_first_V & ~(follows_V & has_own_R[row_V])).sum())


def is_own_step(name: str) -> bool:
    """Return whether a metric of this name may be the trainer's own count of its steps."""
    return any(pattern.fullmatch(name) for pattern in _OWN_STEPS)


def _calls(segments: Sequence[Segment], builder: LogBuilder) -> np.ndarray:
    """Return the steps as W&B has them: set by the trainer, or else the number of the call.

    In a resumed offline run that number starts at 0 again, as the server was not asked for the last one.
    """
    step_R = builder.steps()
    end = 0.0
    for segment in segments:
        step_N = step_R[segment.first : segment.stop]
        if len(step_N) and end and step_N[0] == 0 and not segment.has_own_steps:
            note = f"the resumed run counts from 0 again: its rows were put after step {end - 1:.0f}"
            builder.notes.append(note)
            step_N += end
        end = max(end, float(step_N[-1]) + 1) if len(step_N) else end
    return step_R


def _own_steps(
    cells: Mapping[str, Cells],
    kept: Mapping[str, np.ndarray],
    segments: Sequence[Segment],
    builder: LogBuilder,
    tracker: str,
) -> np.ndarray | None:
    """Return the trainer's own count of steps for every row, or None if no count fits the rows."""
    call_R = builder.steps()
    for pattern in _OWN_STEPS:
        # The shortest name first, such as global_step before train/global_step, whichever was logged first.
        names = sorted(filter(pattern.fullmatch, cells), key=lambda name: (len(name), name))
        own_R = np.full(len(call_R), np.nan)
        for one in map(cells.__getitem__, names):
            good_V = is_step(one.value_V) & np.isnan(own_R[one.row_V])
            own_R[one.row_V[good_V]] = one.value_V[good_V]
        has_own_R = ~np.isnan(own_R)
        filled = [segment for segment in segments if segment.stop > segment.first]
        # A count that one process never logged would put all rows of that process at one step.
        if not names or not all(has_own_R[one.first : one.stop].any() for one in filled):
            continue
        step_R = _carried(own_R, has_own_R)
        is_known_R = has_own_R.copy()
        if pattern is _ROLLOUTS and "rollout/step" in names and _UPDATES in cells:
            is_known_R[cells[_UPDATES].row_V] = True
        lost = sum(one.lost(row_V, step_R, is_known_R) for one in filled for row_V in kept.values())
        if lost > _MOST_LOST * sum(map(len, kept.values())):
            continue
        if (call_R != step_R).any():
            guessed = int((~has_own_R).sum())
            more = f"; {guessed} rows without it are at the one before them" if guessed else ""
            builder.notes.append(f"the step is '{names[0]}', and not {tracker}'s count of calls{more}")
        return step_R
    return None


def _carried(own_R: np.ndarray, has_own_R: np.ndarray) -> np.ndarray:
    """Fill rows without a count with the one before them; the first rows get one interval less."""
    if not len(own_R):
        return own_R
    known_M = own_R[has_own_R]
    # Rows before the first count belong to the step before it: mostly an evaluation before training.
    gap = next((step for step in (known_M - known_M[0]).tolist() if step > 0), known_M[0])
    at_R = np.maximum.accumulate(np.where(has_own_R, np.arange(len(own_R)), -1))
    return np.where(at_R < 0, max(0.0, float(known_M[0] - gap)), own_R[at_R])
