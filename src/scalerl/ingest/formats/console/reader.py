"""The format `console`: the rows of all forms that trainers print."""

import codecs
import math
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from scalerl.errors import InputError, counted, listed
from scalerl.ingest.formats.console.blocks import NemoRLRows, OpenInstructRows, PrimeRLRows, VerlRows
from scalerl.ingest.formats.console.dicts import DictRows, SkyRLRows
from scalerl.ingest.formats.console.lines import ConsoleLine, ConsoleRow, read_lines
from scalerl.ingest.formats.format import Format, Wanted
from scalerl.ingest.formats.lines import first_bytes, name_of
from scalerl.ingest.logs.log import Log, LogBuilder, Room, finite, finite_cell
from scalerl.ingest.vocabularies import BY_TRAINER, CONSOLES, console_of
from scalerl.jsonl import check_not_compressed

_HEAD = 2**24
"""Bytes in which the first row is searched: models and engines print a lot before it."""
_TABLES = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
"""Suffixes of files that are not consoles, whatever text is in their cells."""
CONSOLE_SUFFIXES = (".log", ".out", ".err", ".txt")
_MOST_BARS = 16
"""Most bars that are followed, by their totals: those of training, of an evaluation, and a few more."""
_LEAST_TOLD = 0.8
"""Share of the rows after which a bar must be drawn, as a console may be damaged."""
_MOST_ASTRAY = 0.02
"""Largest share of the rows of training whose step is not above the one before."""
_ROUNDED = 1.1e-3
"""Relative error that the ratio of two epochs of four digits may have."""
_ASTRAY = 0.02
"""Rows of training by which an evaluation may be off its place."""


def _rows(lines: Iterable[ConsoleLine]) -> Iterator[ConsoleRow]:
    """Yield all rows of a console, in whatever form."""
    forms = [VerlRows(), DictRows(), SkyRLRows(), NemoRLRows(), PrimeRLRows(), OpenInstructRows()]
    for line in lines:
        for form in forms:
            yield from form.take(line)
    for form in forms:
        yield from form.end()


def recognises(path: Path) -> bool:
    """Return whether a file is a console: by a row or a trainer's signs in its first 16 MiB, or suffix."""
    if path.suffix.lower() in _TABLES or not path.is_file():
        return False
    start = first_bytes(path, 2**16)
    if not start.strip() or start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return False
    try:
        check_not_compressed(start, str(path))
    except InputError:  # an importer may read it
        return False
    if has_rows(path, _HEAD):
        return True
    is_console = path.suffix.lower() in CONSOLE_SUFFIXES or console_of(first_bytes(path, _HEAD)) is not None
    return is_console and not _is_table(start)


def has_rows(path: Path, most: int) -> bool:
    """Return whether the first bytes of a text contain a row of a console, with values."""
    try:
        return any(row.values for row in _rows(read_lines(path, most)))
    except InputError:  # a row beyond the limits, which the reader names
        return True


def _is_table(start: bytes) -> bool:
    """Return whether the first line is JSON, or two lines have as many cells and the second one a number."""
    found = [line for line in start.lstrip(codecs.BOM_UTF8).splitlines() if line.strip()][:2]
    if re.match(rb"\s*(?:\{|\[\s*(?:[{\[\]]|$))", found[0]):  # a message may begin with [INFO]
        return True
    cells = [re.split(rb"[,;\t]", line) for line in found]
    has_number = any(not math.isnan(finite_cell(cell.decode(errors="replace"))) for cell in cells[-1])
    return len(found) > 1 and len(cells[0]) == len(cells[1]) > 1 and has_number


class _DrawnBar:
    """The first state of a bar after each row."""

    def __init__(self) -> None:
        self.row, self.state = array("q"), array("q")
        self.restarted = array("q")
        """Rows after which the bar stood at 0."""

    def draw(self, row: int, state: int) -> None:
        if not self.row or self.row[-1] != row:
            self.row.append(row)
            self.state.append(state)
        if not state and (not self.restarted or self.restarted[-1] != row):
            self.restarted.append(row)


class _ProgressBars:
    """Follows rows and bars of the Hugging Face Trainer, and finds the steps of the rows, which have none.

    tqdm draws its bars again after every text that it prints, and the bar of the training is then at the
    step of that text. If the text was buffered and the bars were not, or no bars were printed, rows of
    training are counted instead, provided that their epochs grow in proportion.
    """

    _bar = re.compile(r"\d{1,3}%\|[^|]{0,400}\|\s{0,9}(\d{1,15})/(\d{1,15})\s\[")

    def __init__(self) -> None:
        self._bars: dict[int, _DrawnBar] = {}
        self._is_evaluation, self._epoch = array("b"), array("d")

    def __len__(self) -> int:
        return len(self._is_evaluation)

    def look(self, line: ConsoleLine) -> None:
        """Take the state of a bar, if there is one in the line."""
        if not self._is_evaluation or "%|" not in line.text:
            return
        if found := self._bar.search(line.text):
            state, total = int(found[1]), int(found[2])
            if total in self._bars or len(self._bars) < _MOST_BARS:
                self._bars.setdefault(total, _DrawnBar()).draw(len(self._is_evaluation) - 1, state)

    def add(self, is_evaluation: bool, epoch: float) -> None:
        """Add a row."""
        self._is_evaluation.append(is_evaluation)
        self._epoch.append(epoch)

    def steps(self) -> np.ndarray | None:
        """Return the step of every row, (R,), by a bar, NaN if unknown; None if no bar covers most rows."""
        is_training_R = self._is_training()
        for _, bar in sorted(self._bars.items(), reverse=True):
            if len(bar.row) < _LEAST_TOLD * len(is_training_R):
                continue
            row_B = np.frombuffer(bar.row, dtype=np.int64)
            step_R = np.full(len(is_training_R), np.nan)
            step_R[row_B] = np.frombuffer(bar.state, dtype=np.int64)
            # A resumed run draws its bar at 0 first, and logs steps again.
            restarts_R = np.zeros(len(step_R) + 1, dtype=int)
            restarts_R[np.frombuffer(bar.restarted, dtype=np.int64) + 1] = 1
            restarts_R = np.cumsum(restarts_R)[:-1]
            is_told_R = is_training_R & ~np.isnan(step_R)
            is_astray_T = (np.diff(step_R[is_told_R]) <= 0) & (np.diff(restarts_R[is_told_R]) == 0)
            if np.sum(is_astray_T) <= _MOST_ASTRAY * len(is_astray_T):
                return step_R
        return None

    def counts(self) -> np.ndarray | None:
        """Return the rows of training up to every row, (R,); None if these are not in proportion to steps.

        The proportion is checked by the epochs, which have four digits.
        """
        is_training_R = self._is_training()
        count_R = np.cumsum(is_training_R).astype(float)
        epoch_R = np.frombuffer(self._epoch)
        if not is_training_R.any():
            return count_R if len(count_R) == 1 else None
        last = int(np.flatnonzero(is_training_R)[-1])
        a_row = epoch_R[last] / count_R[last]
        off_R = np.abs(epoch_R - a_row * count_R)
        is_in_order = (off_R <= np.maximum(_ROUNDED * epoch_R, _ASTRAY * a_row)).all()
        return count_R if is_in_order else None

    def _is_training(self) -> np.ndarray:
        return np.frombuffer(self._is_evaluation, dtype=np.int8) == 0


class _Gathered:
    """The rows of a console with steps, and those without, which are used only if there are no others."""

    def __init__(self, path: Path, wanted: Wanted) -> None:
        self._path = path
        room = Room(str(path))
        self._with, self._bare = (
            LogBuilder(str(path), "console", name_of(path), wanted, room) for _ in range(2)
        )
        self._bars = _ProgressBars()
        self.trainers: Counter[str] = Counter()
        self._damaged: list[int] = []
        self._is_unfinished = False

    def look(self, line: ConsoleLine) -> ConsoleLine:
        """Take the state of a bar, if there is one in the line; return the line."""
        self._bars.look(line)
        return line

    def add(self, row: ConsoleRow) -> None:
        """Add a row; one that is damaged is only counted."""
        self.trainers[row.trainer] += 1
        if row.values is None or not (row.is_closed or row.line.whole):
            if row.is_closed:
                self._damaged.append(row.line.number)
            else:
                self._is_unfinished = True
        elif not math.isnan(row.step):
            self._with.add(row.step, row.line.time(), row.values, line=row.line.number)
        elif row.trainer == "trl":
            is_evaluation = any(name.startswith("eval_") for name in row.values)
            self._bars.add(is_evaluation, finite(row.values["epoch"]))
            self._bare.add(len(self._bars) - 1, row.line.time(), row.values, line=row.line.number)

    def log(self) -> Log:
        """Return the log of all rows.

        Raises:
            InputError: their steps cannot be determined.
        """
        is_bare = not self._with.n_rows and len(self._bars) > 0
        trainer = next((one for one, _ in self.trainers.most_common() if is_bare or one != "trl"), "")
        builder = self._bare if is_bare else self._with
        builder.notes += self._notes(trainer)
        log = builder.build(self._steps_of_bare() if is_bare else None)
        vocabulary, hint = BY_TRAINER.get(trainer), ""
        if vocabulary and not vocabulary.held_out([*log.metrics, *log.omitted]):
            console = CONSOLES[trainer]
            hint = f"the console of {console.name}, without validation: set {console.validation}"
        return replace(log, trainer=trainer, hint=hint)

    def _steps_of_bare(self) -> np.ndarray:
        step_R = self._bars.steps()
        if step_R is None:
            rows = counted(len(self._bars), "row")
            what = f"{self._path}: its {rows} have no step, and no progress bar tells one"
            step_R = self._bars.counts()
            if step_R is None:
                raise InputError(
                    f"{what}; rows of training cannot be counted instead, as evaluations stand between them: "
                    "read trainer_state.json of a checkpoint, or a tracker's log"
                )
            self._bare.notes.append(
                f"{what}: rows of training are counted; a step here is `logging_steps` of the trainer's"
            )
        return step_R[self._bare.steps().astype(int)]

    def _notes(self, trainer: str) -> Iterator[str]:
        if self._is_unfinished:
            yield f"{self._path}: the last row is unfinished (a crash while writing); left out"
        if self._damaged:
            what = f"{counted(len(self._damaged), 'row')} of metrics cannot be parsed"
            yield f"{self._path}: {what}, and left out; the first is in line {self._damaged[0]}"
        if len(self.trainers) > 1:
            found = [f"{n} of {CONSOLES[one].name}" for one, n in self.trainers.most_common()]
            what = f"holds rows of several trainers: {listed(found)}"
            yield f"{self._path}: {what}; those of one are read (--trainer)"
        if trainer in CONSOLES and (note := CONSOLES[trainer].note):
            yield f"{self._path}: {note}"


def read(path: Path, wanted: Wanted) -> list[Log]:
    """Read one run.

    Raises:
        InputError: no line is a row of metrics; the message names the setting that prints them, if known.
    """
    gathered = _Gathered(path, wanted)
    for row in _rows(map(gathered.look, read_lines(path))):
        gathered.add(row)
    if not gathered.trainers:
        raise InputError(f"{path}: {_without_rows(path)}")
    return [gathered.log()]


def _without_rows(path: Path) -> str:
    """Describe a console without any row."""
    trainer = console_of(first_bytes(path, _HEAD))
    if trainer is None:
        return (
            "no row of metrics in it, such as 'step:1 - actor/entropy:0.3 - ...' (verl), 'Global step 1: "
            "{...}' (OpenRLHF) or {'reward': 0.3, 'epoch': 0.1} (TRL)"
        )
    console = CONSOLES[trainer]
    what = f"the console of {console.name}, without rows of metrics"
    return f"{what}: set {console.rows}" if console.rows else f"{what}: no step has ended in it"


FORMAT = Format("console", "what a trainer prints", recognises, read)
