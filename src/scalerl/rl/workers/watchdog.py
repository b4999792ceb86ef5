"""Progress of a worker, and the deadline for it."""

import logging
import math

from scalerl.rl.workers.backend import PollClock, WorkerLostError

_LOG = logging.getLogger("scalerl")
NOTICE = 30.0
"""Seconds without progress after which that is reported."""


class Watchdog:
    """Watches one worker's progress; `what` names its work."""

    def __init__(self, what: str, timeout: float, clock: PollClock, notice: float = NOTICE) -> None:
        """Report that there was none for `notice` seconds, or half of `timeout` where that is less.

        Without a timeout, of work that may be idle, nothing is reported.
        """
        self._what, self._timeout, self._clock = what, timeout, clock
        self._notice = min(notice, timeout / 2) if max(notice, timeout) < math.inf else math.inf
        self.progress()

    def progress(self) -> None:
        """Note that progress was made."""
        self._since, self._reported = self._clock.now(), False

    def check(self) -> None:
        """Report a lack of progress, once; to be called often.

        Raises:
            WorkerLostError: the deadline has passed.
        """
        still = self._clock.now() - self._since
        if still >= self._timeout:
            raise WorkerLostError(f"{self._what} has made no progress for {self._timeout:g} s")
        if still >= self._notice and not self._reported:
            self._reported = True
            _LOG.warning(
                "%s has made no progress for %g s; its process is replaced after %g s",
                *(self._what, self._notice, self._timeout),
            )
