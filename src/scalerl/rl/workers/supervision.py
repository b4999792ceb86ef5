"""Supervision of worker processes: one that makes no progress is reported, and replaced at its deadline."""

from __future__ import annotations

import logging
import time

from scalerl.errors import WorkerError

_LOG = logging.getLogger("scalerl")
NOTICE = 30.0
"""Seconds without progress after which that is reported."""
_AWAY = 1.5  # seconds between two looks, beyond which the driver did something else


class WorkerLostError(WorkerError):
    """A worker has exited, or was given up; the text names it and the cause. Another can take its place."""


class Attention:
    """Tells how long the driver did not look: silence counts only while it listens.

    What was sent while it did something else may not be here at once, as an answer that lies in the store of
    another node is only fetched once it is asked for; and all processes of a suspended job are silent.
    """

    def __init__(self) -> None:
        self._at = time.monotonic()

    def away(self) -> float:
        """Seconds since the last call that do not count; 0 where the driver looks often."""
        before, self._at = self._at, time.monotonic()
        return max(self._at - before - _AWAY, 0.0)


class Watchdog:
    """Watches one worker's progress; `what` names what it does."""

    def __init__(self, what: str, timeout: float) -> None:
        self._what, self._timeout = what, timeout
        self._notice = min(NOTICE, timeout / 2)
        self._attention = Attention()
        self.moved()

    def moved(self) -> None:
        """Progress was made."""
        self._since, self._reported = time.monotonic(), False

    def check(self) -> None:
        """Report a lack of progress, once; to be called often.

        Raises:
            WorkerLostError: the deadline has passed.
        """
        self._since += self._attention.away()
        still = time.monotonic() - self._since
        if still >= self._timeout:
            raise WorkerLostError(f"{self._what} has made no progress for {self._timeout:g} s")
        if still >= self._notice and not self._reported:
            self._reported = True
            _LOG.warning(
                "%s has made no progress for %g s; its process is replaced after %g s",
                *(self._what, self._notice, self._timeout),
            )
