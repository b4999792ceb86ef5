"""Fits of the runs that are listed, and the answers made of them, kept as long as nothing has changed."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from scalerl.record.reader import RunRecord

if TYPE_CHECKING:
    from scalerl.view.facts.standing import Standing, StandingQuery

_LOG = logging.getLogger("scalerl")
REFIT = 3.0
"""Seconds between two fits of a growing run."""
_KEPT = 64
"""Fits that are kept whole, of two megabytes each."""
_ANSWERS = 8
_K = TypeVar("_K")
_V = TypeVar("_V")


@dataclass(frozen=True, eq=False)
class Fitted:
    """A run with its fit."""

    number: int
    """Unique: what is kept of a fit is named by its number, and does not hold it in memory."""
    standing: Standing
    error: str = ""
    """The error of the fit; empty if there is a fit, or the data allow none."""


class _Latest(OrderedDict[_K, _V]):
    """A mapping that keeps the `most` entries that were used last."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def use(self, key: _K) -> _V | None:
        if key in self:
            self.move_to_end(key)
        return self.get(key)

    def put(self, key: _K, value: _V) -> None:
        self[key] = value
        self.move_to_end(key)
        while len(self) > self._most:
            self.popitem(last=False)


class Fits:
    """Makes one fit at a time, and keeps those that were requested last."""

    def __init__(self, asked: StandingQuery) -> None:
        self._asked = asked
        self._numbers = itertools.count()
        self._kept = _Latest[tuple[str, str], tuple[float, Fitted]](_KEPT)
        # One fit at a time: a request and the looker would else make the same one twice.
        self._fitting = threading.Lock()

    def of(self, name: str, record: RunRecord, axis: str) -> Fitted:
        """Return the run `name` on an axis; a growing run as it was at most `REFIT` seconds ago.

        Raises:
            InputError: the run cannot be read on this axis.
        """
        with self._fitting:
            if (found := self._kept.use((name, axis))) is not None:
                at, kept = found
                # By identity: a record is read anew whenever its files have changed.
                if kept.standing.record is record or time.monotonic() - at < REFIT:
                    return kept
            made = self._fit(record, axis)
            self._kept.put((name, axis), (time.monotonic(), made))
            return made

    def _fit(self, record: RunRecord, axis: str) -> Fitted:
        from scalerl.curve import Points
        from scalerl.view.facts.standing import stand

        standing, error = stand(Points.from_record(record, axis), record, self._asked), ""
        try:
            standing = standing.fitted()
        except Exception as fault:  # whatever one run does to its fit: the others are drawn
            _LOG.exception("while fitting %s", record.path)
            error = f"its fit broke: {type(fault).__name__}: {fault}"
            standing = replace(standing, reason=error)
        return Fitted(next(self._numbers), standing, error)


class Answers:
    """The last answers, by the fits and names that they were made of."""

    def __init__(self) -> None:
        self._kept = _Latest[Hashable, dict[str, Any]](_ANSWERS)
        self._changing = threading.Lock()

    def once(self, key: Hashable, answer: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the answer that is kept under `key`, or make it."""
        with self._changing:
            if (kept := self._kept.use(key)) is not None:
                return kept
        made = answer()  # two threads may both make it; none waits for another's
        with self._changing:
            self._kept.put(key, made)
        return made
