"""A run or a log that is written to, read again when it has changed and never more often than it can bear."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np

from scalerl.errors import InputError
from scalerl.files import Changing, written
from scalerl.ingest.imported import ReadOptions
from scalerl.ingest.load import read_data
from scalerl.record.reader import holds_run

if TYPE_CHECKING:
    from scalerl.curve import Points
    from scalerl.view.facts.standing import Standing, StandingQuery

_AFTER_READ, _AFTER_FIT = 10, 4
"""A look is followed by at least this many times as long as it read, or fitted, without one."""


class Follower:
    """Looks at a source.

    `run` is how it stood when it could last be read, None before it could be; `problem` is why the last look
    read nothing, empty where it did, or had nothing to read.
    """

    def __init__(
        self, path: str, x: str | None, source: ReadOptions, price: float | None, asked: StandingQuery
    ) -> None:
        self.path, self.problem = Path(path), ""
        self._source = Changing(self.path)
        self.run: Standing | None = None
        self._how, self._asked = (x, source, price), asked
        self._read_took = self._fit_took = 0.0

    def look(self) -> bool:
        """Read the source if it has changed, or it is time after a failure; whether `run` is another since.

        A source that cannot be read, as one that is being rewritten, leaves `run` as it was.
        """
        started, self._fit_took = monotonic(), 0.0
        run = None
        try:
            run = self._source.read(self._read)
        except InputError as error:
            self.problem = str(error)
        if run is not None:
            self.run, self.problem = run, ""
        self._read_took = monotonic() - started - self._fit_took
        return run is not None

    def pause(self, interval: float) -> float:
        """Seconds until the next look: `interval`, or as long as the last look asks for."""
        return max(interval, _AFTER_READ * self._read_took + _AFTER_FIT * self._fit_took)

    def begun(self) -> bool:
        """Whether this is the folder of a run that has no evaluation yet."""
        try:
            evals = self.path / "evals.jsonl"
            return holds_run(self.path) and not (evals.is_file() and evals.stat().st_size)
        except OSError:
            return False

    def _read(self) -> Standing:
        from scalerl.view.facts.standing import stand

        data = read_data(self.path, *self._how)
        self._how[1].check_used([self.path], data.foreign)
        if not len(data.points):
            raise InputError(f"{self.path}: the run has no evaluation yet")
        run = stand(data.points, data.record, self._asked)
        if math.isnan(run.last_line):
            run = replace(run, written=written(self.path))
        before = self.run
        if before is not None and _same(before.points, run.points):
            return replace(run, found=before.found)  # a step has no new evaluation to fit
        started = monotonic()
        fitted = run.fitted()
        self._fit_took = monotonic() - started
        return fitted


def _same(one: Points, other: Points) -> bool:
    arrays = ((one.compute_N, other.compute_N), (one.pass_rate_N, other.pass_rate_N))
    return (one.axis, one.warnings) == (other.axis, other.warnings) and all(
        np.array_equal(a, b) for a, b in arrays
    )
