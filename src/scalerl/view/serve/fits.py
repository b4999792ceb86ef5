"""Fits of the listed runs, and answers made from them, kept as long as nothing has changed."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from scalerl.curve.points import Points
from scalerl.record.reader import RunRecord
from scalerl.view.facts.standing import Standing, StandingQuery, stand

_LOG = logging.getLogger("scalerl")
REFIT = 3.0
"""Seconds between two fits of a growing run."""
_KEPT = 64
"""Number of fits that are kept; each takes two megabytes."""
_K = TypeVar("_K")
_V = TypeVar("_V")


class Kept(Generic[_K, _V]):
    """The `most` last used values, by their keys."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: dict[_K, _V] = {}
        self._changing = threading.Lock()

    def once(self, key: _K, make: Callable[[], _V], holds: Callable[[_V], bool] = lambda kept: True) -> _V:
        """Return the value kept under `key` if it still `holds`, else make it."""
        with self._changing:
            if (kept := self._kept.get(key)) is not None and holds(kept):
                self._kept[key] = self._kept.pop(key)
                return kept
        made = make()  # without the lock: two threads may both make it, but neither waits for the other
        with self._changing:
            self._kept.pop(key, None)
            self._kept[key] = made
            while len(self._kept) > self._most:
                del self._kept[next(iter(self._kept))]
        return made


@dataclass(frozen=True, eq=False)
class Fitted:
    """A run with its fit."""

    standing: Standing
    error: str
    """The error of the fit; empty if there is a fit, or if the data do not allow one."""
    at: float
    """Time of the fit, unique: answers are cached under it, without keeping the fit in memory."""


class Fits:
    """Makes one fit at a time, and keeps the last requested ones."""

    def __init__(self, asked: StandingQuery) -> None:
        self._asked = asked
        self._kept = Kept[tuple[str, str], Fitted](_KEPT)
        # One fit at a time, as a request and the looker could otherwise make the same fit twice.
        self._fitting = threading.Lock()

    def of(self, name: str, record: RunRecord, axis: str) -> Fitted:
        """Return the fitted run `name` on an axis; for a growing run, as of at most `REFIT` seconds ago.

        Raises:
            InputError: the run cannot be read on this axis.
        """

        def holds(kept: Fitted) -> bool:
            # Compared by identity, as a record is read again whenever its files have changed.
            return kept.standing.record is record or time.monotonic() - kept.at < REFIT

        with self._fitting:
            return self._kept.once((name, axis), lambda: self._fit(record, axis), holds)

    def _fit(self, record: RunRecord, axis: str) -> Fitted:
        standing, error = stand(Points.from_record(record, axis), record, self._asked), ""
        try:
            standing = standing.fitted()
        except Exception as fault:  # one run's failure must not affect the others
            _LOG.exception("while fitting %s", record.path)
            error = f"its fit broke: {type(fault).__name__}: {fault}"
            standing = replace(standing, reason=error)
        return Fitted(standing, error, time.monotonic())
