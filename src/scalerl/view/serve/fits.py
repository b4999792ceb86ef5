"""Fits of the runs that are listed, and the answers made of them, kept as long as nothing has changed."""

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
"""Fits that are kept whole, of two megabytes each."""
_K = TypeVar("_K")
_V = TypeVar("_V")


class Kept(Generic[_K, _V]):
    """The `most` values that were used last, by their keys."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: dict[_K, _V] = {}
        self._changing = threading.Lock()

    def once(self, key: _K, make: Callable[[], _V], holds: Callable[[_V], bool] = lambda kept: True) -> _V:
        """Return the value that is kept under `key`, if it still `holds`; or make it."""
        with self._changing:
            if (kept := self._kept.get(key)) is not None and holds(kept):
                self._kept[key] = self._kept.pop(key)
                return kept
        made = make()  # two threads may both make it; none waits for another's
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
    """The error of the fit; empty if there is a fit, or the data allow none."""
    at: float
    """Time of the fit, unique: what is kept of a fit is named by this, and does not hold it in memory."""


class Fits:
    """Makes one fit at a time, and keeps those that were requested last."""

    def __init__(self, asked: StandingQuery) -> None:
        self._asked = asked
        self._kept = Kept[tuple[str, str], Fitted](_KEPT)
        # One fit at a time: a request and the looker would else make the same one twice.
        self._fitting = threading.Lock()

    def of(self, name: str, record: RunRecord, axis: str) -> Fitted:
        """Return the run `name` on an axis; a growing run as it was at most `REFIT` seconds ago.

        Raises:
            InputError: the run cannot be read on this axis.
        """

        def holds(kept: Fitted) -> bool:
            # By identity: a record is read anew whenever its files have changed.
            return kept.standing.record is record or time.monotonic() - kept.at < REFIT

        with self._fitting:
            return self._kept.once((name, axis), lambda: self._fit(record, axis), holds)

    def _fit(self, record: RunRecord, axis: str) -> Fitted:
        standing, error = stand(Points.from_record(record, axis), record, self._asked), ""
        try:
            standing = standing.fitted()
        except Exception as fault:  # whatever one run does to its fit: the others are drawn
            _LOG.exception("while fitting %s", record.path)
            error = f"its fit broke: {type(fault).__name__}: {fault}"
            standing = replace(standing, reason=error)
        return Fitted(standing, error, time.monotonic())
