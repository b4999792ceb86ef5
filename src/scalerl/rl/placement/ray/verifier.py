"""Verification in actors: the driver sends tokens, and goes on while they judge.

    a collection -> shares of completions -> whoever is free -> outcomes, in order

Every actor has a `Verifier` of its own, with the worker processes of `task.limits`. One that is lost is
replaced, and its share is judged anew by whoever is free: the outcomes do not depend on who judges.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import ray
import torch

from scalerl.errors import ScalerlError, WorkerError
from scalerl.rl.config.cluster import Patience
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.model.causal_lm import load_tokenizer
from scalerl.rl.pending import Pending
from scalerl.rl.types import Prompt
from scalerl.rl.verify.pool import Outcome
from scalerl.rl.verify.verifier import Asked, Verification
from scalerl.rl.workers.ray.members import Calls, LostError, Member, gather, pause_after, remote
from scalerl.rl.workers.ray.session import Session, here
from scalerl.rl.workers.ray.timeline import Timeline
from scalerl.rl.workers.supervision import Attention

_LOG = logging.getLogger("scalerl")
MOST_DEATHS = 5
"""Verifiers that may be lost for each there is, with no share judged in between, before the run ends."""
SHARES = 4
"""Of a collection, for each verifier: who is quick takes more of them."""
_LOOK = 1.0  # seconds between two looks at who may be replaced

Share = tuple[list[dict[str, Any]], np.ndarray, np.ndarray]
"""Prompts of some completions, where the tokens of each end, and the tokens of all."""


class VerifierActor:
    """What `scalerl.rl.verify.verifier.Verifier` does, elsewhere."""

    @ray.method(concurrency_group="life")
    def where(self) -> tuple[str, int]:
        """Node and process."""
        return here()

    def start(self, recipe: Recipe, model_folder: str) -> None:
        """Load the tokenizer, and start the processes."""
        from scalerl.rl.verify.verifier import load_verifier

        torch.set_num_threads(1)
        self._verifier = load_verifier(recipe, load_tokenizer(model_folder))

    @ray.method(concurrency_group="life")
    def ping(self) -> None:
        """A sign of life."""

    def judge(self, share: Share) -> list[Outcome]:
        """The outcome of every completion of a share."""
        begun = self._verifier.ask(_unpacked(share))
        begun.wait(math.inf)
        return begun.result()


class RayVerifier(Verification):
    """Verification by `[cluster] verifiers` actors.

    Raises:
        InputError: what the task needs for judging cannot be loaded.
        WorkerError: the verifiers do not start; or (by what `ask` begins) are lost again and again.
    """

    def __init__(self, recipe: Recipe, model_folder: str, session: Session, timeline: Timeline) -> None:
        super().__init__()
        cluster = recipe.on_cluster
        self._patience: Patience = cluster.patience
        self._timeline = timeline
        self._least = recipe.task.limits.workers
        self._deaths = 0
        self._alone_since, self._attention = math.inf, Attention()
        self.lost: list[str] = []
        """What was said of each verifier that was lost."""
        ask = remote(VerifierActor, {"life": 1}, cluster.verifier, session.room["verifiers"])
        arguments = recipe.without_prompts(), model_folder

        def start(i: int) -> tuple[Any, Any]:
            handle = ask(i)
            return handle, handle.start.remote(*arguments)

        self._seats = [
            _Seat(f"verifier {i}", self._patience, lambda i=i: start(i)) for i in range(cluster.verifiers)
        ]
        self._begin()

    def _begin(self) -> None:
        ends = time.monotonic() + self._patience.start
        try:
            for seat in self._seats:
                seat.fill()
            for seat in self._seats:
                seat.start_within(ends - time.monotonic())
                self._arrived(seat)
        except ScalerlError:
            self.close()
            raise

    def ask(self, completions: Sequence[Asked]) -> Pending[list[Outcome]]:
        """Share completions out; what was begun before is given up."""
        for seat in self._seats:
            seat.drop()
        size = max(math.ceil(len(completions) / (SHARES * len(self._seats))), self._least)
        judging = _RemoteVerdicts(self, [completions[i : i + size] for i in range(0, len(completions), size)])
        judging.wait(0.0)
        return judging

    def close(self) -> None:
        """End the actors."""
        for seat in self._seats:
            if seat.member is not None:
                seat.member.kill()

    def advance(
        self, waiting: deque[int], shares: Sequence[Sequence[Asked]], seconds: float
    ) -> dict[int, list[Outcome]]:
        """Give shares to whoever is free, wait `seconds` for outcomes, and replace whoever is lost."""
        for seat in self._seats:
            if seat.member is None and time.monotonic() >= seat.fill_at:
                seat.fill()
            elif seat.free and waiting:
                number = waiting.popleft()
                seat.give(number, _packed(shares[number]))
        if under_way := [seat.ref for seat in self._seats if seat.ref is not None]:
            ray.wait(under_way, timeout=seconds)
        else:
            time.sleep(seconds)  # until a place may be filled again
        found: dict[int, list[Outcome]] = {}
        for seat in self._seats:
            try:
                before = seat.there
                found |= seat.outcomes()
                if seat.there and not before:
                    self._arrived(seat)
            except ScalerlError as error:  # what it cannot load here, another node may have
                self._lose(seat, error, waiting)
        self._deaths = 0 if found else self._deaths
        self._give_up_alone()
        return found

    def _arrived(self, seat: _Seat) -> None:
        assert seat.member is not None
        name, node = seat.name, seat.member.node
        self._timeline.event("arrived", "verify", name, node, f"{name} on {node} takes part")

    def _lose(self, seat: _Seat, error: ScalerlError, waiting: deque[int]) -> None:
        assert seat.member is not None
        why = error if isinstance(error, LostError) else seat.member.lost(str(error))
        self.lost.append(str(why))
        self._deaths += 1
        self._timeline.event("lost", "verify", why.who, why.node, str(why), why.at)
        shares = seat.vacate()
        others = any(other.there for other in self._seats)
        who = "others judge" if others else "another is waited for, to judge"
        _LOG.warning("%s%s", why, f"; {who} what it was given" if shares else "")
        waiting.extendleft(shares)
        if self._deaths > MOST_DEATHS * len(self._seats):
            raise WorkerError(f"{self._deaths} verifiers were lost with nothing judged in between: {why}")

    def _give_up_alone(self) -> None:
        """Not to wait for ever where nobody is left."""
        self._alone_since += self._attention.away()
        if any(seat.there for seat in self._seats):
            self._alone_since = math.inf
            return
        self._alone_since = min(self._alone_since, time.monotonic())
        if time.monotonic() - self._alone_since > self._patience.start:
            why = self.lost[-1] if self.lost else "none has started"
            raise WorkerError(f"no verifier is left, and none came within {self._patience.start:g} s: {why}")


class _RemoteVerdicts:
    """Shares that are being judged; see `scalerl.rl.pending.Pending`. Who is lost is replaced while somebody
    waits."""

    def __init__(self, verifier: RayVerifier, shares: Sequence[Sequence[Asked]]) -> None:
        self._verifier, self._shares = verifier, shares
        self._waiting = deque(range(len(shares)))
        self._outcomes: dict[int, list[Outcome]] = {}

    def wait(self, seconds: float) -> bool:
        """Whether all are judged."""
        until = time.monotonic() + seconds
        while len(self._outcomes) < len(self._shares):
            left = until - time.monotonic()
            moment = min(max(left, 0.0), _LOOK)
            self._outcomes |= self._verifier.advance(self._waiting, self._shares, moment)
            if left <= 0:
                break
        return len(self._outcomes) == len(self._shares)

    def result(self) -> list[Outcome]:
        """The outcome of each completion, in order."""
        return [outcome for share in range(len(self._shares)) for outcome in self._outcomes[share]]


@dataclass
class _Seat:
    """Room for a verifier, and who has it."""

    name: str
    patience: Patience
    start: Callable[[], tuple[Any, Any]]
    member: Member | None = None
    there: bool = False
    """Whether it has started."""
    ref: Any = None
    """What it was asked for: where it is, to start, or to judge a share."""
    starting: Any = None
    """Its start, for as long as it waits for room."""
    share: int | None = None
    deaths: int = 0
    fill_at: float = 0.0
    _call: Calls | None = None

    @property
    def free(self) -> bool:
        """Whether it can be given a share."""
        return self.there and self._call is None

    def fill(self) -> None:
        """Ask for an actor; it comes when there is room."""
        handle, self.starting = self.start()
        self.member = Member(self.name, handle, self.patience.silence)
        self.ref = handle.where.remote()
        self._call = Calls({self.ref: self.member}, math.inf, "come")

    def start_within(self, seconds: float) -> None:
        """Wait until it has started."""
        assert self.member is not None
        ends = time.monotonic() + seconds
        for what in ("come", "started"):
            gather({self.ref: self.member}, max(ends - time.monotonic(), 0.0), what)
            self.outcomes()

    def give(self, number: int, share: Share) -> None:
        """Have it judge a share."""
        assert self.member is not None
        self.ref, self.share = self.member.handle.judge.remote(share), number
        self._call = Calls({self.ref: self.member}, self.patience.step, "judged its share")

    def outcomes(self) -> dict[int, list[Outcome]]:
        """Those of its share, by the share's number, if it has judged it; waits for nothing.

        Raises:
            LostError: it does not live.
            ScalerlError: it cannot load what it needs.
        """
        if self.member is None or self._call is None or not self._call.wait(0.0):
            return {}
        (found,) = self._call.result()
        if self.starting is not None:
            self.member.settled(found)
            self.ref, self.starting = self.starting, None
            self._call = Calls({self.ref: self.member}, self.patience.start, "started")
            return {}
        number, self._call, self.ref, self.share = self.share, None, None, None
        if number is None:
            self.there = True
            return {}
        self.deaths = 0
        return {number: found}

    def drop(self) -> None:
        """Nobody waits for its share any more."""
        self.share = None

    def vacate(self) -> list[int]:
        """End whoever has it, and keep it free for a while; the share that it judged."""
        assert self.member is not None
        self.member.kill()
        shares = [] if self.share is None else [self.share]
        self.member = self.ref = self.starting = self.share = self._call = None
        self.there = False
        self.fill_at = time.monotonic() + pause_after(self.deaths)
        self.deaths += 1
        return shares


def _packed(completions: Sequence[Asked]) -> Share:
    tokens = [token_T for _, token_T in completions]
    ends = np.cumsum([len(token_T) for token_T in tokens], dtype=np.int64)
    return [asdict(prompt) for prompt, _ in completions], ends, np.concatenate(tokens)


def _unpacked(share: Share) -> list[Asked]:
    prompts, ends, token_S = share
    parts = np.split(token_S, ends[:-1])
    return [(Prompt.from_json(prompt), part) for prompt, part in zip(prompts, parts, strict=True)]
