"""Groups in flight: admitted in order, complete in any order, taken in order, wherever they are sampled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from scalerl.errors import InputError
from scalerl.rl.engine.sampling import GroupRequest
from scalerl.rl.engine.saved_rollouts import pack_samples, unpack_samples
from scalerl.rl.types import Counters, Prompt, Rollout


class OrderedGroups(ABC):
    """The half of `scalerl.rl.types.Generator` that is the same wherever completions are sampled."""

    def __init__(self, version: int) -> None:
        self.version = version
        """The version of the weights that were published last: a resume starts with them."""
        self._admitted = self._taken = 0
        self._incomplete: dict[int, GroupRequest] = {}
        self._partial: dict[int, dict[int, Rollout]] = {}
        """The completions that are there of incomplete groups, by sequence number and sample."""
        self._complete: dict[int, tuple[Rollout, ...]] = {}
        self._before = Counters()
        """What was spent before the run was resumed."""

    @abstractmethod
    def _assign(self, seq_no: int, group: GroupRequest) -> None:
        """Have a group sampled; its completions come by `_add`, or the whole group by `_keep`."""

    @property
    @abstractmethod
    def counters(self) -> Counters:
        """What has been spent so far, the work before a resume included."""

    def submit(self, prompt: Prompt, epoch: int, n_samples: int) -> int:
        """Admit a group; see `scalerl.rl.types.Generator`."""
        seq_no = self._admitted
        self._admitted += 1
        self.admit(seq_no, (prompt, epoch, n_samples))
        return seq_no

    def admit(self, seq_no: int, group: GroupRequest) -> None:
        """Have a group sampled under the sequence number that it has elsewhere."""
        self._incomplete[seq_no] = group
        self._assign(seq_no, group)

    @property
    def ready(self) -> int:
        """Groups that can be taken."""
        n = self._taken
        while n in self._complete:
            n += 1
        return n - self._taken

    def take(self, n_groups: int) -> list[tuple[Rollout, ...]]:
        """Return the next `n_groups` groups in order of admission, which are complete."""
        seq_nos = range(self._taken, self._taken + n_groups)
        self._taken = seq_nos.stop
        return [self._complete.pop(seq_no) for seq_no in seq_nos]

    def take_complete(self) -> dict[int, tuple[Rollout, ...]]:
        """Return all complete groups by sequence number, whatever their order."""
        complete, self._complete = self._complete, {}
        return complete

    @property
    def in_flight(self) -> int:
        """Groups that are admitted and not taken."""
        return self._admitted - self._taken

    def state(self) -> dict[str, Any]:
        """Return which groups are in flight, and those that are complete, for `restore`."""
        counters = asdict(self.counters)  # first: reading them may complete groups
        return {
            "version": self.version,
            "admitted": self._admitted,
            "taken": self._taken,
            "counters": counters,
            "in_flight": [
                [seq_no, dict(vars(prompt)), epoch, n_samples]
                for seq_no, (prompt, epoch, n_samples) in sorted(self._incomplete.items())
            ],
            "complete": pack_samples(self._complete),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`; completions that were in flight are sampled anew, and counted.

        Raises:
            InputError: it is the state of a generator in the trainer's process.
        """
        if "slots" in state:
            raise InputError("the run generates in the trainer's process (placement inline): it stays there")
        self._restore_groups(state)
        for seq_no, group in self._incomplete.items():
            self._assign(seq_no, group)
        self._before = Counters(**state["counters"])
        self._before.restarted += len(self._incomplete)

    def _restore_groups(self, state: dict[str, Any]) -> None:
        self._admitted, self._taken = state["admitted"], state["taken"]
        self._incomplete = {
            seq_no: (Prompt.from_json(prompt), epoch, n_samples)
            for seq_no, prompt, epoch, n_samples in state["in_flight"]
        }
        self._keep(state["complete"])

    def _add(self, seq_no: int, rollout: Rollout) -> None:
        """Keep a completion; the last one completes its group."""
        samples = self._partial.setdefault(seq_no, {})
        samples[rollout.sample] = rollout
        if len(samples) == self._incomplete[seq_no][2]:
            del self._partial[seq_no], self._incomplete[seq_no]
            self._complete[seq_no] = tuple(samples[sample] for sample in sorted(samples))

    def _keep(self, packed: dict[str, Any]) -> None:
        """Keep complete groups, as `pack_samples` has them."""
        for seq_no, rollouts in unpack_samples(packed).items():
            self._incomplete.pop(seq_no, None)
            self._complete[seq_no] = rollouts


def sum_of(counters: Sequence[Counters]) -> Counters:
    """Return what several processes have spent together."""
    totals: list[Any] = [sum(values) for values in zip(*(vars(c).values() for c in counters), strict=True)]
    return Counters(*totals)
