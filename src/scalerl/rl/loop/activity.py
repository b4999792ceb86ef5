"""What a run is doing, from its parts to the person who looks: a few times a second, and every two seconds
to progress.json. What is reported in between is dropped, so that a decode step pays for a look at the clock.
"""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from scalerl.record.activity import WRITE_SECONDS, Activity, Count

EVALUATING, TRAINING = "evaluating", "training"
_REPORT_SECONDS = 0.25
"""Seconds between two reports of one activity; another one is reported at once."""


class Activities:
    """Keeps the latest activity; its methods may be called by any thread."""

    def __init__(
        self,
        report: Callable[[Activity], None] = lambda activity: None,
        write: Callable[[Activity], None] = lambda activity: None,
    ) -> None:
        """`report` is called with every one that is due, `write` with those for the run folder."""
        self._report, self._write = report, write
        self._now = Activity()
        self._due = self._write_due = 0.0
        self._tokens = 0
        """Tokens that the generator had sampled when the activity began."""
        self._trained_since, self._share_at_start = math.nan, 0.0
        self._lock = threading.Lock()

    def due(self, doing: str) -> bool:
        """Return whether a report of this is due: it is what the run has just begun, or its time is up."""
        return doing != self._now.doing or time.monotonic() >= self._due

    def doing(self, doing: str, count: Count | None = None, tokens: int = 0) -> None:
        """Report what is being done, and the tokens that the generator has sampled so far."""
        with self._lock:
            if not self.due(doing):
                return
            now = time.time()
            if doing != self._now.doing:
                self._tokens = tokens
                self._now = replace(self._now, since=now)
            since, sampled = self._now.since, max(tokens - self._tokens, 0)
            if count is None or math.isnan(count.since):  # one of another process has its own
                count = replace(count, since=since) if count else Count()
            self._now = replace(
                self._now, doing=doing, count=count, tokens=sampled, time=now, left=self._left()
            )
            self._due = time.monotonic() + _REPORT_SECONDS
            self._report(self._now)
            if time.monotonic() >= self._write_due:
                self._write_due = time.monotonic() + WRITE_SECONDS
                self._write(self._now)

    def waits_for_evaluation(self) -> None:
        """Report that nothing is done but an evaluation, in another process."""
        self.doing(EVALUATING, self._now.evaluating)

    def evaluating(self, done: int, of: int) -> None:
        """Note how far an evaluation in another process is, for the next report."""
        with self._lock:
            before, count = self._now.evaluating, Count()
            if done < of:
                goes_on = before.of and before.done <= done
                count = Count(done, of, "completions", before.since if goes_on else time.time())
            self._now = replace(self._now, evaluating=count)

    def starts(self, step: int, share: float) -> None:
        """Note the step that is made next, and the share of the budget that is spent before it."""
        with self._lock:
            if math.isnan(self._trained_since):
                self._trained_since, self._share_at_start = time.monotonic(), share
            self._now = replace(self._now, step=step, share=min(share, 1.0), left=self._left())

    def _left(self) -> float:
        """Return the seconds until the budget is spent, at the speed since this start."""
        spent, seconds = self._now.share - self._share_at_start, time.monotonic() - self._trained_since
        return seconds * (1 - self._now.share) / spent if spent > 0 and self._now.share < 1 else math.nan
