"""The records and fits of the runs in a folder, versions of their changes, and answers about several runs.

Everything here blocks, and is called from threads. A source is read again when it has changed. A fit is made
on request or when there is time, one at a time, and for a growing run every few seconds at most.
"""

from __future__ import annotations

import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scalerl.curve.points import Points
from scalerl.errors import InputError, ScalerlError, brief_error
from scalerl.forecast.recipes import by_recipe, distinct
from scalerl.ingest.formats.format import Unread
from scalerl.numbers import axis_name
from scalerl.record.devices import check_devices, common_axes
from scalerl.record.reader import RunRecord
from scalerl.view.facts.facts import imported, notes
from scalerl.view.facts.standing import Standing, StandingQuery, stand
from scalerl.view.runs.answer import sentence_of
from scalerl.view.runs.gathered import RunsView, compared
from scalerl.view.runs.groups import recipe_of
from scalerl.view.runs.overlay import overlay
from scalerl.view.runs.page import runs_document
from scalerl.view.serve.fits import REFIT, Fits, Fitted, Kept
from scalerl.view.serve.listing import Entry
from scalerl.view.serve.logs import read_log, without_columns
from scalerl.view.serve.sweep import FolderSweep

_LOG = logging.getLogger("scalerl")
MOST = 40
"""Most runs in one chart."""
_ANSWERS = 8
"""Number of cached answers."""
_OPTION = re.compile(r"(?<![\w-])--[a-z]")
_TYPED = (
    "this is typed in a terminal: scalerl ingest LOG -o FOLDER takes such options, and makes a run folder "
    "that is listed here; fit and compare take them too, and serve takes --devices"
)


class UnknownRunError(InputError):
    """No run has the requested id."""


@dataclass(eq=False)
class Run:
    """A run in the list."""

    id: str
    row: dict[str, Any]
    """The run's row of the page, without "version"."""
    record: RunRecord | None = None
    version: int = 0
    """Version at which `row` last changed."""
    stale: bool = False
    """Whether the row's fit lacks some evaluations."""
    fitted: float = -math.inf
    """Time of the last fit, by the monotonic clock."""


@dataclass(frozen=True)
class _Chosen:
    """Runs that are shown together, with distinct names, and their fits on the common axis."""

    runs: list[Run]
    names: list[str]
    axis: str
    made: list[Fitted]

    @property
    def budget(self) -> float | None:
        """The common budget of these runs; None if they have none, or different ones."""
        budgets = {one.standing.budget for one in self.made}
        budget = budgets.pop()
        return budget if not budgets and budget > 0 else None


class RunStore:
    """The runs in a folder; `version` grows with every change.

    Methods that take ids of runs raise an `UnknownRunError` for an unknown id, and an InputError if a run has
    no evaluation yet or cannot be read, or if the runs are too many, cannot be compared, or lack the axis.
    """

    def __init__(self, root: Path, asked: StandingQuery, devices: Mapping[str, float] | None = None) -> None:
        self.root = root.resolve()
        self._asked, self._devices = asked, devices or {}
        # Starts above the versions of an earlier server of this folder, which open pages may have.
        self.version = int(time.time() * 1000)
        self._sweep = FolderSweep(self.root)
        self._runs: dict[str, Run] = {}
        self._of_entry: dict[str, list[str]] = {}
        self._fits, self._answers = Fits(asked), Kept[Hashable, Any](_ANSWERS)
        self._changing, self._looking = threading.Lock(), threading.Lock()
        self.looked = threading.Event()
        """Set once the folder has been scanned since the server started, or rested."""

    def refresh(self, seconds: float = math.inf) -> bool:
        """Scan the folder, unless that was done a moment ago, and read changed sources for about `seconds`.

        Return whether sources are left for the next call. The most recently written ones come first, and are
        checked more often than the others.
        """
        # Not under `_changing`, as a request must not wait while files are read.
        with self._looking:
            started = time.monotonic()
            if (entries := self._sweep.look()) is not None:
                self._list(entries)
            while (entry := self._sweep.next()) is not None:
                self._look(entry)
                if time.monotonic() - started >= seconds:
                    break
            if not (self._sweep.waits or self.looked.is_set()):
                self.looked.set()
                self.version += 1
            return self._sweep.waits

    def _list(self, entries: dict[str, Entry]) -> None:
        """Remove the runs of entries that are gone, and list entries that are not read, with the reason."""
        for name in self._of_entry.keys() - entries.keys():
            self._replace(name, [])
            del self._of_entry[name]
        for entry in entries.values():
            if not entry.format:
                refused, before = _broken(entry, self._plain(entry.refused)), self._runs.get(entry.id)
                if before is None or before.row != refused.row:
                    self._replace(entry.id, [refused])

    def listed(self, since: int = 0) -> dict[str, Any]:
        """Return all ids, and the rows that have changed since a version; all rows for a future version.

        A future version comes from another server of this folder, if the clock was set back since then.
        """
        with self._changing:
            since = since if since <= self.version else 0
            runs = sorted(self._runs.values(), key=lambda run: run.row["path"])
            changed = [run.row for run in runs if run.version > since]
            return {
                "folder": self.root.name,
                "version": self.version,
                "looking": not self.looked.is_set(),
                "target": self._asked.target,
                "ids": [run.id for run in runs],
                "runs": changed,
            }

    def fit_next(self) -> bool:
        """Fit one of the runs that wait for a fit; return false if there is none."""
        now = time.monotonic()
        with self._changing:
            waiting = [run for run in self._runs.values() if run.stale and now - run.fitted >= REFIT]
            run = max(waiting, key=lambda run: run.row["updated"] or 0.0, default=None)
            if run is None or run.record is None:
                return False
            # Set before the fit, so that no other thread starts the same one meanwhile.
            run.fitted = now
        try:
            made = self._fits.of(run.id, run.record, self._axis(run.record))
            row = self._row(made.standing, run.row, error=made.error)
            whole = made.standing.record is run.record
        except Exception as error:  # not retried before the run changes
            _LOG.exception("while fitting %s", run.record.path)
            row, whole = run.row | {"error": self._message(error), "waits": False}, True
        with self._changing:
            run.fitted, run.stale = time.monotonic(), not whole  # a growing run may have an older fit
            if whole:
                self._change(run, row)
        return True

    def page(self, ids: Sequence[str], axis: str | None) -> str:
        """Return the page of one run or several as from `scalerl report`, with its files on this server."""
        return self._answered(
            "page", ids, axis, lambda chosen: runs_document(self._compared(chosen)).html(linked="../")
        )

    def overlay(self, ids: Sequence[str], axis: str | None) -> dict[str, Any]:
        """Return the data of a chart of these runs (`scalerl.view.runs.overlay`), and the answer."""

        def answer(chosen: _Chosen) -> dict[str, Any]:
            view = self._view(chosen)
            data = overlay(view.runs, budget=chosen.budget, target=self._asked.target, tasks=view.tasks)
            common = [{"key": key, "name": axis_name(key)} for key in self._common(chosen.runs)]
            about = {"ids": [run.id for run in chosen.runs], "sentence": sentence_of(view)}
            return data | {"common": common} | about

        return self._answered("overlay", ids, axis, answer)

    def compare(self, ids: Sequence[str], axis: str | None) -> dict[str, Any]:
        """Return the comparison of these runs, as from `scalerl compare --json`."""

        def answer(chosen: _Chosen) -> dict[str, Any]:
            for run, one in zip(chosen.runs, chosen.made, strict=True):
                if one.standing.fit is None:
                    raise InputError(f"{run.row['name']}: {self._plain(one.standing.reason)}")
            view = self._compared(chosen)
            if view.comparison is None:
                raise InputError(view.not_compared or "a comparison takes two runs")
            return {"axis": chosen.axis, "result": view.comparison.to_json()}

        return self._answered("compare", ids, axis, answer)

    def _answered(
        self, what: str, ids: Sequence[str], axis: str | None, answer: Callable[[_Chosen], Any]
    ) -> Any:
        chosen = self._chosen(ids, axis)
        # Names are part of the key, as they depend on the runs that are shown together.
        key = what, chosen.axis, *chosen.names, *(one.at for one in chosen.made)
        return self._answers.once(key, lambda: answer(chosen))

    def _compared(self, chosen: _Chosen) -> RunsView:
        """Return runs as on a page, where runs of one recipe are its seeds."""
        view = self._view(chosen)
        if len(chosen.runs) == 1:
            return view
        recipes = by_recipe(
            view.runs,
            lambda run: run.record,
            lambda run: self._plain(str(run.record.path if run.record else run.points.source)),
        )
        try:
            return compared(view, recipes, budget=chosen.budget)
        except InputError as error:  # different metrics, or a run given twice: show each by itself
            return replace(view, not_compared=f"Nothing is compared: {self._plain(str(error))}.")

    def _view(self, chosen: _Chosen) -> RunsView:
        """Return runs as on a page; with a target, the budget is the common one."""
        made = zip(chosen.names, (each.standing for each in chosen.made), strict=True)
        shown = [replace(one, name=name, reason=self._plain(one.reason)) for name, one in made]
        target = self._asked.target
        return RunsView(tuple(shown), self._asked.level, None if target is None else chosen.budget, target)

    def _chosen(self, ids: Sequence[str], axis: str | None) -> _Chosen:
        with self._changing:
            if unknown := [one for one in ids if one not in self._runs]:
                raise UnknownRunError(f"no run {unknown[0]!r}")
            # Copied here, as the fits are made outside of the lock, and a run may be replaced meanwhile.
            runs = [self._runs[one] for one in dict.fromkeys(ids)]
        if not 0 < len(runs) <= MOST:
            raise InputError(f"choose 1 to {MOST} runs, found {len(runs)}")
        for run in runs:
            if run.record is None:
                raise InputError(f"{run.row['name']}: {run.row['error']}")
            if not run.record.evals:
                raise InputError(f"{run.row['name']}: no evaluation yet")
        common = self._common(runs)
        own = [self._axis(run.record) for run in runs if run.record]
        axis = axis or next((one for one in own if one in common), common[0])
        if axis not in common:
            check_devices(_named(runs), axis)
            raise InputError(f"not all of these runs have the axis {axis!r}; they have {', '.join(common)}")
        made = [self._fits.of(run.id, run.record, axis) for run in runs if run.record]
        names = distinct([run.row["name"] for run in runs], [run.row["path"] for run in runs])
        return _Chosen(runs, names, axis, made)

    def _axis(self, record: RunRecord) -> str:
        """Return the axis on which a run is listed: the requested one if logged, else the default."""
        asked = self._asked.axis
        return asked if asked in record.logged_axes() else record.default_axis

    @staticmethod
    def _common(runs: Sequence[Run]) -> list[str]:
        """Return the axes that all of the runs have, in one unit; steps are always one."""
        return common_axes(_named(runs), [run.record.logged_axes() for run in runs if run.record is not None])

    def _look(self, entry: Entry) -> None:
        try:
            runs = self._sweep.read(entry, self._read)
            if runs is not None:
                self._replace(entry.id, runs)
        except Exception as error:  # one log's failure must not affect the other runs
            message = self._message(error)
            if before := self._of_entry.get(entry.id):  # keep its runs, as it may just be being written
                with self._changing:
                    for run in map(self._runs.__getitem__, before):
                        if run.row["error"] != message:
                            self._change(run, run.row | {"error": message})
            else:
                self._replace(entry.id, [_broken(entry, message)])

    def _read(self, entry: Entry) -> list[Run]:
        if entry.refused:
            raise InputError(entry.refused)
        if entry.format == "run":
            return [self._run(entry, RunRecord.read(entry.path), entry.id)]
        runs: list[Run] = []
        for id, one in read_log(entry, self._devices):
            if isinstance(one, Unread):  # only this run of the log is lost
                runs.append(_broken(entry, self._plain(one.reason), id, one.run))
            else:
                runs.append(self._run(entry, without_columns(entry, self._devices, id, one), id))
        return runs

    def _run(self, entry: Entry, record: RunRecord, id: str) -> Run:
        standing = stand(Points.from_record(record, self._axis(record)), record, self._asked)
        before = self._runs.get(id)
        row = self._row(standing, {"id": id, "path": entry.shown, "format": entry.format}, waits=True)
        if before is not None and before.record is not None and _goes_on(before.record, record):
            row |= {key: before.row[key] for key in ("forecast", "no_forecast", "ceiling", "target")}
        return Run(id, row, record, stale=True, fitted=-math.inf if before is None else before.fitted)

    def _row(
        self, standing: Standing, about: dict[str, Any], waits: bool = False, error: str = ""
    ) -> dict[str, Any]:
        now = time.time()
        found = standing.to_json(now)
        row = {key: about[key] for key in ("id", "path", "format")} | found
        row |= {
            "no_forecast": self._plain(found["no_forecast"]),
            "error": self._plain(error),
            "waits": waits,
            "end_shown": standing.unit.show(standing.end),
            "end_known": math.isfinite(standing.budget),
            "updated": standing.last_line if math.isfinite(standing.last_line) else None,
            "as_of": now,
        }
        if standing.record is not None:
            row |= {"key": standing.key, "recipe": recipe_of(standing.record)}
            said = map(self._plain, notes(standing.record))
            row["notes"] = list(filter(None, [*said, standing.beyond]))
            if imported(standing.record):  # a log does not say whether its run has ended
                row["ended"] = None
        return row

    def _replace(self, entry: str, runs: list[Run]) -> None:
        """Replace the runs of an entry."""
        with self._changing:
            # Under one lock, so that a page never sees a source without its runs.
            for name in set(self._of_entry.get(entry, ())) - {run.id for run in runs}:
                self._runs.pop(name, None)
                self.version += 1
            self._of_entry[entry] = [run.id for run in runs]
            for run in runs:
                self._runs[run.id] = run
                self._change(run, run.row)

    def _change(self, run: Run, row: dict[str, Any]) -> None:
        self.version += 1
        run.row, run.version = row, self.version

    def _message(self, error: Exception) -> str:
        ours = str(error) if isinstance(error, ScalerlError) else getattr(error, "strerror", None)
        return self._plain(ours or brief_error(error))

    def _plain(self, text: str) -> str:
        """Return a message without the path of the served folder, explaining options if it mentions any."""
        text = text.replace(f"{self.root}/", "")
        return f"{text} ({_TYPED})" if _OPTION.search(text) and _TYPED not in text else text


def _goes_on(before: RunRecord, record: RunRecord) -> bool:
    """Whether all earlier evaluations are still there, so that a forecast from them belongs to this run."""
    known = {(one.step, one.pass_rate) for one in record.evals}
    return all((one.step, one.pass_rate) in known for one in before.evals)


def _broken(entry: Entry, error: str, id: str = "", name: str = "") -> Run:
    """Return a listed run that is not read, with the reason."""
    name = name or os.fsencode(entry.path.name).decode(errors="replace")
    about = {"id": id or entry.id, "path": entry.shown, "format": entry.format, "name": name}
    return Run(about["id"], about | {"error": error, "waits": False, "updated": None, "pass_rate": None})


def _named(runs: Sequence[Run]) -> list[tuple[str, RunRecord | None]]:
    return [(run.row["name"], run.record) for run in runs]
