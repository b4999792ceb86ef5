"""Importers: custom log formats, named by where their class is (`scalerl.own_code`).

A broken importer of an installed package must not keep users from their other logs: it causes one warning,
and recognises nothing. If `--format` names it, that is an error.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

from scalerl.errors import InputError, brief_error
from scalerl.ingest.formats.format import Format, Wanted
from scalerl.ingest.formats.lines import name_of
from scalerl.ingest.formats.rows import RowReader
from scalerl.ingest.logs.log import Log
from scalerl.kinds import Choice


class Importer(Protocol):
    """Reads one kind of log: a frozen dataclass whose fields all have defaults."""

    def recognises(self, path: Path) -> bool:
        """Return whether a file or folder has this format, by name and first bytes; called for any path."""
        ...

    def rows(self, path: Path) -> Iterable[Mapping[str, Any]]:
        """Return the rows in the order in which they were written: metrics by name, nested or flat.

        Each has a `step`, and a `time` in Unix seconds if the log has one, from which GPU-hours are made.
        Rows of several runs have a `run_name`. Metrics have the names of a known trainer, or `--y` names the
        one that is the pass rate.
        """
        ...


_LOG = logging.getLogger("scalerl")
_IMPORTERS = Choice("importers", Importer, None)


def named(kind: str) -> Format | None:
    """Return the format of the importer that `--format` names by module, file or entry point, else None.

    Raises:
        InputError: it cannot be loaded, or is not an importer.
    """
    importer = _IMPORTERS.make(kind)
    if importer is None:
        return None
    recognises = partial(_recognises, importer, kind)
    return Format(kind, f"logs of {type(importer).__name__}", recognises, partial(_read, importer, kind))


@cache
def announced() -> tuple[Format, ...]:
    """Return the formats of importers that installed packages announce; looked up once, in 20 ms."""
    found: list[Format] = []
    for entry in entry_points(group="scalerl.importers"):
        try:
            one = named(entry.name)
        except InputError as error:
            _warn(f"importer {entry.name} of an installed package is left out: {error}")
        else:
            found += [one] if one is not None else []
    return tuple(found)


@cache
def _warn(text: str) -> None:
    _LOG.warning("%s", text)


def _recognises(importer: Importer, kind: str, path: Path) -> bool:
    try:
        return bool(importer.recognises(path))
    except (Exception, SystemExit) as error:
        _warn(
            f"importer {kind}: recognises raised {brief_error(error)}; it is taken for not recognising logs"
        )
        return False


def _read(importer: Importer, kind: str, path: Path, wanted: Wanted) -> list[Log]:
    # Not `name_of`, which replaces the generic names of logs: `run.theirs` has the name that its user chose.
    reader = RowReader(str(path), kind, path.stem if path.is_file() else name_of(path), wanted)
    reader.begin_file()
    for row in _rows(importer, kind, path):
        reader.add(row)
    return reader.build()


def _rows(importer: Importer, kind: str, path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        for row in importer.rows(path):
            if not isinstance(row, Mapping):
                raise InputError(f"{path}: {kind} yields rows of {type(row).__name__}, expected a mapping")
            yield row
    except (InputError, OSError):
        raise
    except (Exception, SystemExit) as error:  # whatever a user's code does with a damaged file
        raise InputError(f"{path}: {kind} cannot read it ({brief_error(error)})") from error
