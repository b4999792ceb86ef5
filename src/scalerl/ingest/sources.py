"""Any trainer's log as runs: what kind of file it is, whose it is, and what it says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from scalerl import limits
from scalerl.errors import InputError
from scalerl.ingest.formats.format import Format, Unread, Wanted, formats, recognise, unopened
from scalerl.ingest.imported import Imported, ReadOptions, as_run
from scalerl.ingest.logs.log import Log, listed
from scalerl.ingest.vocabularies import ANY, VOCABULARIES
from scalerl.ingest.vocabularies.vocabulary import known_names, tell


@dataclass(frozen=True)
class FoundRuns:
    """The runs of a file or folder, and those that cannot be read."""

    all: tuple[Imported | Unread, ...]
    """Both kinds, in the order of the source."""

    @property
    def runs(self) -> tuple[Imported, ...]:
        """Those that can be read."""
        return tuple(one for one in self.all if isinstance(one, Imported))

    @property
    def unread(self) -> tuple[Unread, ...]:
        """Those that cannot."""
        return tuple(one for one in self.all if isinstance(one, Unread))


def read_source(
    path: str | Path,
    asked: ReadOptions | None = None,
    format: str | Format | None = None,
    trainer: str | None = None,
    run: str | None = None,
    *,
    guessed: bool = False,
) -> FoundRuns:
    """All runs in a file or folder that can be read, or the one of a name.

    Args:
        path: what a trainer or a tracker has written.
        asked: what is said of it, and not to be guessed.
        format: its format, or the name of that; by default it is recognised.
        trainer: name of the trainer whose names its metrics have; by default it is recognised.
        run: name of the run that is wanted; the others need hold nothing that could be a pass rate.
        guessed: the format was recognised, and not named: where a folder holds others too, runs say so.

    Raises:
        InputError: it is of no known format, cannot be read, has no run of that name, or has none with
            anything that could be a pass rate.
    """
    path, asked = Path(path), asked or ReadOptions()
    found = format if isinstance(format, Format) else recognise(path, format)
    if found is None:
        raise InputError(
            f"{path}: of no known format; there are {', '.join(one.name for one in formats())} (--format)"
        )
    try:
        logs = found.read(path, wanted(asked))
        notes = _others(path, found) if guessed or format is None else []
    except OSError as error:
        raise InputError(unopened(error, path)) from error
    if not logs:
        raise InputError(f"{path}: there are no runs in it ({found.what})")
    if run is not None:
        names, logs = listed(list(map(_name, logs))), [log for log in logs if _name(log) == run]
        if not logs:
            raise InputError(f"{path}: no run {run!r}; there are {names}")
    limits.RUNS.check(len(logs), path)
    made: list[Imported | Unread] = []
    evaluations, first_error = 0, ""
    for log in logs:
        if isinstance(log, Unread):
            made.append(log)
            first_error = first_error or log.reason
            continue
        try:
            run_read = run_of(replace(log, notes=(*notes, *log.notes)), asked, trainer)
            limits.EVALUATIONS.check(evaluations + len(run_read.record.evals), path)
        except InputError as error:
            which = f" (in the run {log.name!r})" if len(logs) > 1 else ""
            first_error = first_error or f"{error}{which}"
            made.append(Unread(str(path), log.name, str(error)))
        else:
            evaluations += len(run_read.record.evals)
            made.append(run_read)
    found_runs = FoundRuns(tuple(made))
    if not found_runs.runs:
        more = f"; nor can any other of the {len(logs)} runs be read" if len(logs) > 1 else ""
        raise InputError(f"{first_error}{more}")
    return found_runs


def _name(log: Log | Unread) -> str:
    return log.run if isinstance(log, Unread) else log.name


def _others(path: Path, taken: Format) -> list[str]:
    """A note where a folder holds logs of further formats, as an output folder with a tracker's in it."""
    if not path.is_dir():
        return []
    others = [one.name for one in formats() if one.name != taken.name and one.recognises(path)]
    if not others:
        return []
    return [
        f"{path}: holds logs of several formats; {taken.name} is read, and not {listed(others)} "
        f"(--format {others[0]})"
    ]


def wanted(asked: ReadOptions) -> Wanted:
    """The names of metrics that are of use: those that any trainer's logs have, and the one asked for."""
    extra = [asked.pass_rate] if asked.pass_rate else []
    known = known_names(VOCABULARIES, *extra).fullmatch
    return lambda name: known(name) is not None


def run_of(log: Log, asked: ReadOptions, trainer: str | None = None) -> Imported:
    """The run that a log is of, its trainer recognised unless it is named.

    Raises:
        InputError: there is no trainer of this name, or nothing in the log could be a pass rate.
    """
    if trainer is None:
        return as_run(log, tell(VOCABULARIES, log.names) or ANY, asked)
    for one in VOCABULARIES:
        if one.trainer == trainer:
            return as_run(log, one, asked)
    raise InputError(f"no trainer {trainer!r}; there are {', '.join(one.trainer for one in VOCABULARIES)}")
