"""Verifications shared out to a pool of workers: processes beside the driver, or Ray actors.

    jobs -> shares -> idle workers -> outcomes of the first jobs of each; its others wait again

A worker that is lost is replaced, and its share is verified again: where what it verified may be the cause,
job by job, so that a completion that ends workers costs itself alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scalerl.rl.verify.forks import Outcome
from scalerl.rl.workers.backend import Backend, Message, Target
from scalerl.rl.workers.pool import PoolWorker, Watchdog, WorkerPool
from scalerl.rl.workers.timeline import Timeline

MAX_LOST = 2
"""Workers that may be lost with a job by itself before it counts as `died`."""
_LOST = {"failed": "died", "detail": "the process that supervises its verification died"}
_LOOK = 1.0  # seconds between two polls, at most


@dataclass(eq=False)
class VerifierWorker(PoolWorker):
    """A worker whose deadline is for a share: one that is idle has none."""

    def watch(self) -> Watchdog:
        """See `PoolWorker.watch`; a share may take long, and its deadline is not announced."""
        return Watchdog(self.where, self.timeout, self.clock, notice=math.inf)

    def check(self) -> None:
        """See `PoolWorker.check`."""
        if self.watchdog and self.taking_part and not self.in_flight:
            self.watchdog.progress()
        super().check()


class VerifierPool(WorkerPool[VerifierWorker]):
    """Shares jobs out: `pack` makes the message of a share, and `share` returns its size for so many jobs."""

    noun, role = "verifier", "verify"
    capacity = 1

    def __init__(
        self,
        workers: Sequence[VerifierWorker],
        backend: Backend,
        pack: Callable[[Sequence[Any]], Any],
        share: Callable[[int], int],
        target: Target,
        arguments: Sequence[Any] = (),
        none_left: float = math.inf,
        events: Timeline | None = None,
    ) -> None:
        super().__init__(workers, backend, target, arguments, none_left, events)
        self._pack, self._share = pack, share
        self.jobs = Jobs((), self, 0)

    def submit(self, payloads: Sequence[Any]) -> Jobs:
        """Verify; jobs that were submitted before are given up."""
        self._waiting.clear()
        self.jobs.given_up = True
        return self.submit_beside(payloads)

    def submit_beside(self, payloads: Sequence[Any]) -> Jobs:
        """Do jobs after those that were submitted before, or beside them."""
        self.jobs = jobs = Jobs(payloads, self, self.jobs.end)
        size = max(self._share(len(payloads)), 1)
        for first in range(0, len(payloads), size):
            self._wait_again(jobs, list(range(first, min(first + size, len(payloads)))))
        jobs.wait(0.0)  # the workers start now, not when the driver first waits
        return jobs

    def _send(self, worker: VerifierWorker, number: int, work: tuple[Jobs, list[int]]) -> None:
        assert worker.process is not None
        if worker.watchdog:
            worker.watchdog.progress()
        jobs, share = work
        worker.process.send(self._pack([jobs.payloads[job] for job in share]))

    def _received(self, worker: VerifierWorker, message: Message) -> None:
        if message.kind != "done":
            return
        (number,) = worker.in_flight
        jobs, share = self.complete(worker, number)
        jobs.outcomes.update(zip(share, message.value, strict=False))
        if rest := share[len(message.value) :]:
            self._wait_again(jobs, rest)

    def _wait_again(self, jobs: Jobs, share: list[int]) -> None:
        if share and not jobs.given_up:
            self._waiting[jobs.first + share[0]] = jobs, share

    def _reassign(self, worker: VerifierWorker, work: Mapping[int, tuple[Jobs, list[int]]]) -> None:
        for jobs, share in work.values():
            if self._backend.elsewhere:  # a machine was lost, or its memory was out
                self._wait_again(jobs, share)
                continue
            jobs.losses.update(share)
            for job in share:
                if len(share) == 1 and jobs.losses[job] >= MAX_LOST:
                    jobs.outcomes[job] = dict(_LOST)
                    worker.losses = 0
                else:
                    self._wait_again(jobs, [job])

    def _fate(self, work: Mapping[int, Any]) -> str:
        if all(jobs.given_up for jobs, _ in work.values()):
            return ""
        who = "others verify" if self.alive else "another is waited for, to verify"
        return f"; {who} what it was given"


class Jobs:
    """Verifications under way; see `scalerl.rl.types.Pending`."""

    def __init__(self, payloads: Sequence[Any], pool: VerifierPool, first: int) -> None:
        self.payloads, self._pool = payloads, pool
        self.first, self.end = first, first + len(payloads)
        """Their numbers in the pool."""
        self.given_up = False
        """Later ones took their place: nothing is done again for them."""
        self.outcomes: dict[int, Outcome] = {}
        self.losses = Counter[int]()
        """Workers that were lost with each job."""

    def wait(self, seconds: float) -> bool:
        """Return whether all are done; wait for that, and for no longer than `seconds`."""
        return self._pool.wait_for(lambda: self.done, seconds, _LOOK)

    @property
    def done(self) -> bool:
        """Whether all are done."""
        return len(self.outcomes) == len(self.payloads)

    def result(self) -> list[Outcome]:
        """Return the outcome of each job, in order."""
        return [self.outcomes[job] for job in range(len(self.payloads))]
