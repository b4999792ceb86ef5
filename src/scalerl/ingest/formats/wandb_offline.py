"""The files that W&B keeps of a run (`wandb/run-*/run-ID.wandb`), of offline runs and of others alike.

Neither W&B's package nor that of protocol buffers is needed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scalerl import limits
from scalerl.errors import InputError
from scalerl.ingest.formats.format import Format, Unread, Wanted, each_run
from scalerl.ingest.formats.lines import first_bytes
from scalerl.ingest.formats.wandb_file import MAGIC
from scalerl.ingest.formats.wandb_rows import WandbRows, identify
from scalerl.ingest.logs.log import Log, LogBuilder, Room
from scalerl.ingest.logs.order import is_step
from scalerl.jsonl import flat

_NAME = "wandb"
_EXPECTED = "expected a run-ID.wandb, its folder, or the wandb or project folder that holds such folders"
_LINKS = " (symbolic links are left out)"
_FOLDERS = ("", "wandb", ".wandb", "wandb/wandb")
_PATTERNS = ("*.wandb", "run-*/*.wandb", "offline-run-*/*.wandb")

# The trainer's own count of its steps, the surest name first; names of one expression are one count.
_OWN_STEPS = (
    re.compile(r"(?:.*/)?global_steps?"),
    re.compile(r"(?:.*/)?training_step"),
    re.compile(r"(?:.*/)?train(?:er)?_step"),
    re.compile(r"train(?:er|ing)?/step"),
    re.compile(r"step"),
)
_MOST_LOST = 0.1  # of the values: what would lose more is no count of the trainer's steps


def recognises(path: Path) -> bool:
    """Whether a path is a `.wandb` file, or a folder that has some where W&B puts them."""
    if path.is_dir():
        return bool(_files(path))
    return (path.is_file() and path.suffix == ".wandb") or first_bytes(path, len(MAGIC)) == MAGIC


def read(path: Path, wanted: Wanted) -> Sequence[Log | Unread]:
    """Every run once, in the order of their starts; the files of a run that was resumed are one run.

    Raises:
        InputError: there is no such file, or none that can be read.
        OSError: a file cannot be opened.
    """
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
            runs.setdefault(run_id, []).append(_Part(file, name, start))
    if not runs:
        first = unread[0].reason if unread else f"{path}: no file of W&B there; {_EXPECTED}{_LINKS}"
        raise InputError(first)
    ordered = sorted((sorted(parts, key=_Part.order) for parts in runs.values()), key=lambda p: p[0].order())
    limits.FOUND.check(len(ordered), path)
    by_file, room = {parts[0].path: parts for parts in ordered}, Room(str(path))
    names = ((file, parts[-1].name) for file, parts in by_file.items())
    return [*each_run(path, names, lambda file, _: [_read_run(by_file[file], wanted, room)], room), *unread]


FORMAT = Format(_NAME, "files of Weights & Biases (run-ID.wandb, or a wandb folder)", recognises, read)


@dataclass(frozen=True)
class _Part:
    """One file of a run."""

    path: Path
    name: str
    """That W&B shows, or the id."""
    start: float

    def order(self) -> tuple[float, str]:
        """Those whose start is not known come last, by the names of their folders, which hold a date."""
        return (math.inf if math.isnan(self.start) else self.start, str(self.path))


def _files(path: Path) -> list[Path]:
    """The file, or those of a folder; links below it are not followed (W&B's own latest-run is one)."""
    if path.is_file():
        return [path]
    return [
        file
        for folder in _FOLDERS
        for pattern in _PATTERNS
        for file in sorted((path / folder).glob(pattern))
        if not _is_linked(file, path) and file.is_file()
    ]


def _is_linked(file: Path, folder: Path) -> bool:
    """Whether a file below a folder, or a folder between them, is a symbolic link."""
    between = file.parents[: len(file.relative_to(folder).parts) - 1]
    return any(one.is_symlink() for one in (file, *between))


def _read_run(parts: Sequence[_Part], wanted: Wanted, room: Room) -> Log:
    """One run, whose files are given in the order of time."""
    config: dict[str, Any] = {}
    names: dict[str, None] = {}
    segments, notes = [], list[str]()
    for part in parts:
        rows = WandbRows(
            lambda name: wanted(name) or _is_own_step(name), config, part.path, names, part.start
        )
        rows.read(notes)
        segments.append(_Segment(rows, wanted))
    name = next((segment.name for segment in reversed(segments) if segment.name), parts[0].name)
    source = str(parts[-1].path)
    builder = LogBuilder(source, _NAME, name, wanted, room)
    builder.config = flat({key: value for key, value in config.items() if key != "_wandb"}, where=source)
    for known in dict.fromkeys([*names, *(name for segment in segments for name in segment.columns)]):
        if not wanted(known):  # but it is named
            builder.add(0, math.nan, {known: 0.0})
    for segment, step_N in zip(segments, _own_steps(segments, notes) or _calls(segments, notes), strict=True):
        segment.give(builder, step_N)  # one process after another: one file, as far as the order goes
    if not names and not any(segment.columns for segment in segments):
        notes.append("no numbers were logged")
    builder.notes += notes
    return builder.build()


class _Segment:
    """What one file has of a run."""

    def __init__(self, rows: WandbRows, wanted: Wanted) -> None:
        self.has_own_steps, self.name = rows.has_own_steps, rows.name
        self.columns = rows.columns()
        self.step_N, self.time_N = np.array(rows.step), np.array(rows.time)
        self.wanted_names = [name for name in self.columns if wanted(name)]

    def give(self, builder: LogBuilder, step_N: np.ndarray) -> None:
        """All that is wanted, its rows at the steps given."""
        first = builder.extend(step_N, self.time_N)
        for name in self.wanted_names:
            builder.fill(name, first, self.columns[name])

    def own_step(self, names: Sequence[str]) -> np.ndarray:
        """The trainer's count in every row; NaN where a row does not have it."""
        own_N = np.full(len(self.step_N), np.nan)
        for one in (self.columns[name] for name in names if name in self.columns):
            good_V = is_step(one.value_V) & np.isnan(own_N[one.row_V])
            own_N[one.row_V[good_V]] = one.value_V[good_V]
        return own_N

    def lost(self, step_N: np.ndarray, has_own_N: np.ndarray) -> int:
        """Wanted values that would go under: at a step that comes again, or is that of another by guess."""
        lost = 0
        for name in self.wanted_names:
            row_V = self.columns[name].row_V
            step_V = step_N[row_V]
            follows_V = np.insert(np.diff(step_V) == 0, 0, values=False)
            is_first_V = np.zeros(len(step_V), dtype=bool)
            is_first_V[np.unique(step_V, return_index=True)[1]] = True
            lost += int((~is_first_V & ~(follows_V & has_own_N[row_V])).sum())
        return lost


def _is_own_step(name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in _OWN_STEPS)


def _calls(segments: Sequence[_Segment], notes: list[str]) -> list[np.ndarray]:
    """The steps as W&B has them: given by the trainer, or else the number of the call.

    That number begins anew in an offline run that was resumed, as nobody was asked for the last one.
    """
    steps: list[np.ndarray] = []
    end = 0.0
    for segment in segments:
        step_N = segment.step_N
        if len(step_N) and end and step_N[0] == 0 and not segment.has_own_steps:
            notes.append(f"the resumed run counts from 0 again: its rows were put after step {end - 1:.0f}")
            step_N = step_N + end
        end = max(end, float(step_N[-1]) + 1) if len(step_N) else end
        steps.append(step_N)
    return steps


def _own_steps(segments: Sequence[_Segment], notes: list[str]) -> list[np.ndarray] | None:
    """The trainer's count of steps in every row, where it has one that goes with the rows; else None."""
    found = {name for segment in segments for name in segment.columns}
    total = sum(len(segment.columns[name].row_V) for segment in segments for name in segment.wanted_names)
    for pattern in _OWN_STEPS:
        names = sorted(filter(pattern.fullmatch, found), key=lambda name: (len(name), name))
        counts = [segment.own_step(names) for segment in segments]
        if not names or any(len(own_N) and np.isnan(own_N).all() for own_N in counts):
            continue
        steps = list(_carried(counts))
        lost = sum(s.lost(t, ~np.isnan(own)) for s, t, own in zip(segments, steps, counts, strict=True))
        if lost > _MOST_LOST * total:
            continue
        if any((segment.step_N != step_N).any() for segment, step_N in zip(segments, steps, strict=True)):
            guessed = sum(int(np.isnan(own_N).sum()) for own_N in counts)
            more = f"; {guessed} rows without it are at the one before them" if guessed else ""
            notes.append(f"the step is '{names[0]}', and not W&B's count of calls{more}")
        return steps
    return None


def _carried(counts: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """Rows without a count at the last one before them; the very first rows one interval before the first."""
    last: float | None = None
    for own_N in counts:
        if not len(own_N):
            yield own_N
            continue
        known_M = own_N[~np.isnan(own_N)]
        if last is None:
            gap = next((step for step in (known_M - known_M[0]).tolist() if step > 0), known_M[0])
            last = max(0.0, float(known_M[0] - gap))
        at_N = np.maximum.accumulate(np.where(np.isnan(own_N), -1, np.arange(len(own_N))))
        yield np.where(at_N < 0, last, own_N[at_N])
        last = float(known_M[-1])
