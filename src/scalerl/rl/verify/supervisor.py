"""A trusted process between the trainer and a worker; it never runs a task's code.

    trainer --- share of completions ---> supervisor --- one completion ---> worker (worker.py)
    trainer <-- their outcomes ---------- supervisor <-- verdict ----------- worker

Completions are verified *together*, one after another by one worker, or *apart*, each by a worker of its own:

    together   fast. One completion could tamper with the worker of the next, so outcomes are held back until
               the worker has given two known answers, a right and a wrong one, the verdicts that new workers
               gave. A failure is counted only if a fresh worker fails the same way.
    apart      at first, until two answers are known; if a completion takes long compared with a fork; and
               for a while after anything odd. Outcomes held back at that time are verified again, apart.

Odd events are: an answer to another completion, a call of `sys.exit`, a process or a thread left behind, a
replaced builtin, another verdict for a known answer, a death, and a timeout. The worker is then killed, with
all descendants of this process except the template.
"""

import json
import math
import os
import select
import socket
import time
from collections import Counter

from scalerl.rl.verify import proc
from scalerl.rl.verify.forks import ForkedWorker, Forks, Job, Outcome, WorkerAnswer
from scalerl.rl.workers.processes import ChildChannel

TURN_SECONDS = 1.0
"""Seconds after which a share is returned with the outcomes so far."""
RENEW_AFTER = 1024
"""The most completions that a worker verifies."""
FIRST_SECONDS, CAUTION_SECONDS = 4.0, 1.0
"""Seconds spent on forks, about: at first, until two answers are known; and after anything odd."""
SLOW = 1.25
"""Completions are verified apart if that takes at most this many times as long as together.

Together, two known answers are verified in every turn: completions of 0.3 s would take 0.45 s each.
"""
RECONSIDER = 256
"""Completions verified apart because it takes no longer, before verifying together is timed again."""
STEADY = 3
"""How many new workers must confirm the verdict of a known answer when an older worker differs."""
MAX_UNSTEADY = 2
"""Known answers for which even new workers change the verdict, before everything is verified apart."""
MAX_GUESSES = 4
"""Texts, likely right or wrong, that are verified to find known answers."""
BEAT_SECONDS = 1.0
"""Seconds between two heartbeats."""
MARK = "SCALERL_VERIFIER"
"""The environment variable that marks every process that a supervisor has started."""
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def main(channel: ChildChannel, greeting: bytes, seconds: float, memory: int, parent: int, mark: str) -> None:
    """Verify incoming shares until the channel is closed or the process `parent` ends.

    Every process started from here has `mark` in its environment.
    """
    os.environ.update(_ONE_THREAD, **{MARK: mark})
    proc.adopt_orphans()
    trainer, forks = _Trainer(channel, parent), None
    try:
        forks = Forks(greeting, trainer.wait, seconds, memory)
        supervisor = Supervisor(forks)
        channel.send("started")
        while True:
            outcomes = supervisor.verify([tuple(json.loads(job)) for job in trainer.receive()])
            if forks.changed:
                channel.send("changed", [*forks.changed])
                forks.changed.clear()
            channel.send("done", outcomes)
    finally:
        if forks is not None:
            forks.close()
        else:
            proc.end(os.getpid(), ())


class _Trainer:
    """The connection to the trainer; each method raises an EOFError once the trainer has ended."""

    def __init__(self, channel: ChildChannel, parent: int) -> None:
        self._channel, self._parent = channel, parent
        self._beat = time.monotonic()

    def receive(self) -> list[bytes]:
        while not select.select([self._channel], [], [], BEAT_SECONDS)[0]:
            self._check()
        return self._channel.receive()

    def wait(self, channel: socket.socket, seconds: float) -> bool:
        """Return whether another channel has something to read within `seconds`, while a share is open."""
        ready = select.select([channel, self._channel], [], [], seconds)[0]
        if self._channel in ready:  # the trainer sends nothing while it waits, so it has closed the channel
            raise EOFError
        if time.monotonic() > self._beat + BEAT_SECONDS:
            self._beat = time.monotonic()
            self._check()
            self._channel.send("beat")
        return bool(ready)

    def _check(self) -> None:
        if os.getppid() != self._parent:  # forks of the trainer may hold the channel open
            raise EOFError


class Supervisor:
    """Verifies shares of completions."""

    def __init__(self, forks: Forks) -> None:
        self._forks = forks
        self._shared: ForkedWorker | None = forks.fresh()
        self._apart = self._forks_in(FIRST_SECONDS)
        """How many more completions to verify apart."""
        self._warm_seconds, self._apart_seconds = 0.0, math.inf
        """Mean seconds of a completion that is not a worker's first, and of one apart, fork included."""
        self._known: dict[bool, tuple[Job, Outcome]] = {}
        """A wrong and a right answer, and their outcomes from new workers."""
        self._guesses, self._unsteady = MAX_GUESSES, 0
        self._restarts = Counter[str]()
        """Why workers were killed since the last share."""

    def verify(self, share: list[Job]) -> list[Outcome]:
        """Return the outcomes of the first completions of a share, at least of one."""
        # Turns of an environment have a new worker each, as a tool may have changed an old one.
        if isinstance(share[0][1], dict):
            return [self._alone(share[0]).outcome]
        until = time.monotonic() + TURN_SECONDS
        outcomes: list[Outcome] = []
        if not self._is_apart():
            outcomes, share = self._together(share, until)
        for job in share:
            outcomes.append(self._verify_apart(job))
            if time.monotonic() > until or not self._is_apart():
                break
        if self._restarts:
            outcomes[0] = outcomes[0] | {"restarts": dict(self._restarts)}
            self._restarts.clear()
        return outcomes

    def _is_apart(self) -> bool:
        return self._apart > 0 or self._apart_seconds < SLOW * self._warm_seconds

    def _forks_in(self, seconds: float) -> float:
        return math.ceil(seconds / (2 * self._forks.fork_seconds))  # ending a fork takes about as long

    # -- together -----------------------------------------------------------------------------------------

    def _together(self, share: list[Job], until: float) -> tuple[list[Outcome], list[Job]]:
        """Return the outcomes of the first completions, or none and the completions to verify apart."""
        if self._shared is None:
            self._shared = self._forks.fresh()
        outcomes: list[Outcome] = []
        for job in share:
            outcome = self._next(self._shared, job)
            if outcome is None:
                return [], share[: len(outcomes) + 1]
            outcomes.append(outcome)
            if time.monotonic() > until:
                break
        done = share[: len(outcomes)]
        if not self._passes(self._shared):
            self._end_shared("check")
            return [], done
        if self._shared.verified >= RENEW_AFTER or len(self._known) < 2:
            self._end_shared("age")
        self._learn_from(done, outcomes)
        return outcomes, []

    def _next(self, worker: ForkedWorker, job: Job) -> Outcome | None:
        """Return the outcome of the next completion; None if the worker can no longer be trusted."""
        # The first completion of a worker may be slower, as it imports modules for all later ones.
        fresh = worker.verified == 0
        answer = self._forks.verify(worker, job)
        if not fresh and not answer.odd:
            self._warm_seconds = _mean(self._warm_seconds, answer.seconds)
        if answer.odd:
            self._end_shared(answer.odd)
            return None
        failed = answer.outcome.get("failed")
        if failed and not fresh and self._alone(job).outcome.get("failed") != failed:
            self._end_shared("check")
            return None
        return answer.outcome

    def _end_shared(self, why: str) -> None:
        if self._shared is not None:
            self._forks.end(self._shared)
        self._shared = None
        self._note(why)

    def _note(self, why: str) -> None:
        self._restarts[why] += 1
        if why != "age":
            self._apart = max(self._apart, self._forks_in(CAUTION_SECONDS))

    # -- apart --------------------------------------------------------------------------------------------

    def _verify_apart(self, job: Job) -> Outcome:
        """Return the outcome of a completion that has a worker to itself."""
        self._apart -= 1
        if self._apart < -RECONSIDER:
            self._apart, self._warm_seconds = 0, 0.0
        answer = self._alone(job)
        if answer.odd == "answer":
            self._note(answer.odd)
            answer = self._alone(job)
        if answer.odd:
            self._note(answer.odd)
        if not answer.odd and "failed" not in answer.outcome:
            self._learn(job, answer.outcome)
        return answer.outcome

    def _alone(self, job: Job) -> WorkerAnswer:
        began = time.monotonic()
        worker = self._forks.fresh()
        answer = self._forks.verify(worker, job)
        self._forks.end(worker)
        self._apart_seconds = _mean(self._apart_seconds, time.monotonic() - began)
        return answer

    # -- known answers ------------------------------------------------------------------------------------

    def _passes(self, worker: ForkedWorker) -> bool:
        """Return whether a worker gives the known answers the same verdicts as new workers."""
        for correct, (job, outcome) in list(self._known.items()):
            answer = self._forks.verify(worker, job, thorough=True)
            if answer.odd or answer.outcome != outcome:
                if any(self._alone(job).outcome != outcome for _ in range(STEADY)):
                    self._forget(correct)  # the verifier itself is not deterministic
                return False
        return True

    def _forget(self, correct: bool) -> None:
        del self._known[correct]
        self._unsteady += 1
        self._note("unsteady")
        self._apart = math.inf if self._unsteady >= MAX_UNSTEADY else self._forks_in(FIRST_SECONDS)

    def _learn(self, job: Job, outcome: Outcome) -> None:
        """Keep a new worker's outcome as known, and look for an answer of the other kind."""
        if len(self._known) == 2 or self._unsteady >= MAX_UNSTEADY:
            return
        self._known.setdefault(outcome["correct"], (job, outcome))
        for text in (f"</think>\\boxed{{{job[0]['answer']}}}", f"</think>{job[0]['answer']}", ""):
            if len(self._known) < 2 and self._guesses > 0:
                self._guesses -= 1
                answer = self._alone((job[0], [text]))
                if not answer.odd and "failed" not in answer.outcome:
                    self._known.setdefault(answer.outcome["correct"], ((job[0], [text]), answer.outcome))
        if len(self._known) == 2:
            self._apart = 0

    def _learn_from(self, share: list[Job], outcomes: list[Outcome]) -> None:
        """Have a new worker verify a completion again if its verdict is of a kind not known yet."""
        for job, outcome in zip(share, outcomes, strict=True):
            if len(self._known) < 2 and outcome.get("correct") in {True, False} - self._known.keys():
                again = self._alone(job)
                if again.outcome == outcome and not again.odd:
                    self._learn(job, outcome)
                return


def _mean(mean: float, value: float) -> float:
    """Return a running geometric mean, which a hiccup of the machine hardly moves."""
    return mean**0.9 * value**0.1 if 0 < mean < math.inf else value
