"""Supervision of workers, wherever they run: deadlines, back-off, and time without a poll."""

import logging
import math
import time

from scalerl.errors import WorkerError

_LOG = logging.getLogger("scalerl")
NOTICE = 30.0
"""Seconds without progress after which that is reported."""
FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 60.0  # seconds before a lost worker is started again
CLOSING, STARTING = 10.0, 2.0
"""Seconds in which a worker is to exit by itself before it is killed; and one that has not started yet."""
_POLLING = 1.5  # seconds between two polls, beyond which the driver did something else


class WorkerLostError(WorkerError):
    """A worker has exited or passed a deadline; the text names it and the cause. Another can replace it."""

    def __init__(self, message: str, who: str = "", node: str = "") -> None:
        super().__init__(message)
        self.who, self.node, self.at = who, node, time.time()


def backoff(attempt: int, longest: float = _LONGEST_PAUSE) -> float:
    """Return the seconds to wait before a retry, where `attempt` retries have failed: they double."""
    # Without the bound on the exponent a day of retries ends in an OverflowError.
    return min(longest, _LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(attempt, 20))


class PollClock:
    """Measures the time in which the driver did not poll: a worker's silence counts only while it does.

    What was sent while the driver did something else may not be here at once, as a result in the store of
    another node is only fetched on request; and all processes of a suspended job are silent.
    """

    def __init__(self) -> None:
        self._at = time.monotonic()

    def unpolled(self) -> float:
        """Return the seconds since the last call that do not count; 0 where the driver polls often."""
        before, self._at = self._at, time.monotonic()
        return max(self._at - before - _POLLING, 0.0)


class Watchdog:
    """Watches one worker's progress; `what` names its work."""

    def __init__(self, what: str, timeout: float, notice: float = NOTICE) -> None:
        """Report that there was none for `notice` seconds, or half of `timeout` where that is less.

        Without a timeout, of work that may be idle, nothing is reported.
        """
        self._what, self._timeout = what, timeout
        self._notice = min(notice, timeout / 2) if max(notice, timeout) < math.inf else math.inf
        self.progress()

    def progress(self) -> None:
        """Note that progress was made."""
        self._since, self._reported = time.monotonic(), False

    def excuse(self, seconds: float) -> None:
        """Leave out a time in which the driver did not poll."""
        self._since += seconds

    def check(self) -> None:
        """Report a lack of progress, once; to be called often.

        Raises:
            WorkerLostError: the deadline has passed.
        """
        still = time.monotonic() - self._since
        if still >= self._timeout:
            raise WorkerLostError(f"{self._what} has made no progress for {self._timeout:g} s")
        if still >= self._notice and not self._reported:
            self._reported = True
            _LOG.warning(
                "%s has made no progress for %g s; its process is replaced after %g s",
                *(self._what, self._notice, self._timeout),
            )
