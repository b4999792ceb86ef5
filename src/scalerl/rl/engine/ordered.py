"""Groups that others sample: admitted in order, complete in any order, taken in order.

What a generator with processes elsewhere keeps of them here, wherever they run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

from scalerl.errors import InputError
from scalerl.rl.engine.saved_rollouts import pack_rollouts, unpack_rollouts
from scalerl.rl.types import Counters, Prompt, Rollout

Asked = tuple[Prompt, int, int]
"""A group to be sampled: prompt, epoch, number of completions."""


class OrderedGroups(ABC):
    """The half of `scalerl.rl.types.Generator` that is the same wherever completions are sampled."""

    def __init__(self) -> None:
        self._complete: dict[int, tuple[Rollout, ...]] = {}
        self._admitted = self._taken = 0
        self._before = Counters()
        """What was spent before the run was resumed."""

    @abstractmethod
    def _assign(self, seq_no: int, group: Asked) -> None:
        """Give a group to whoever is to sample it."""

    @abstractmethod
    def _under_way(self) -> Mapping[int, Asked]:
        """The groups that are not complete, by their seq_nos."""

    @abstractmethod
    def _published(self) -> int:
        """The version of the weights that were given out last: a resume begins with them."""

    @property
    @abstractmethod
    def counters(self) -> Counters:
        """What has been spent so far, the work before a resume included."""

    def submit(self, prompt: Prompt, epoch: int, n_samples: int) -> int:
        """Admit a group; see `scalerl.rl.types.Generator`."""
        seq_no = self._admitted
        self._admitted += 1
        self._assign(seq_no, (prompt, epoch, n_samples))
        return seq_no

    @property
    def ready(self) -> int:
        """Groups that can be taken."""
        n = self._taken
        while n in self._complete:
            n += 1
        return n - self._taken

    def take(self, n_groups: int) -> list[tuple[Rollout, ...]]:
        """The next `n_groups` groups in order of admission, which are complete."""
        seq_nos = range(self._taken, self._taken + n_groups)
        self._taken = seq_nos.stop
        return [self._complete.pop(seq_no) for seq_no in seq_nos]

    @property
    def in_flight(self) -> int:
        """Groups that are admitted and not taken."""
        return self._admitted - self._taken

    def state(self) -> dict[str, Any]:
        """Which groups were in flight, and those that are complete: see `restore`."""
        counters = asdict(self.counters)  # first: to read them may complete groups
        complete = sorted(self._complete.items())
        return {
            "version": self._published(),
            "admitted": self._admitted,
            "taken": self._taken,
            "counters": counters,
            "in_flight": [
                [seq_no, dict(vars(p)), epoch, n]
                for seq_no, (p, epoch, n) in sorted(self._under_way().items())
            ],
            "seq_nos": [seq_no for seq_no, _ in complete],
            "sizes": [len(rollouts) for _, rollouts in complete],
            "complete": pack_rollouts([rollout for _, rollouts in complete for rollout in rollouts]),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`; completions that were in flight begin again, and are counted.

        Raises:
            InputError: it is the state of a generator in the process of the trainer.
        """
        if "taken" not in state:
            raise InputError("the run generates in the trainer's process (placement inline): it stays there")
        self._admitted, self._taken = state["admitted"], state["taken"]
        self._keep(state["seq_nos"], state["sizes"], state["complete"])
        for seq_no, prompt, epoch, n_samples in state["in_flight"]:
            self._assign(seq_no, (Prompt.from_json(prompt), epoch, n_samples))
        self._before = Counters(**state["counters"])
        self._before.restarted += len(state["in_flight"])

    def _keep(self, seq_nos: Sequence[int], sizes: Sequence[int], packed: dict[str, Any]) -> None:
        """Complete groups, one after the other in `packed`."""
        rollouts = iter(unpack_rollouts(packed))
        for seq_no, size in zip(seq_nos, sizes, strict=True):
            self._complete[seq_no] = tuple(islice(rollouts, size))


def sum_of(counters: Sequence[Counters]) -> Counters:
    """What several processes have spent together."""
    totals: list[Any] = [sum(values) for values in zip(*(vars(c).values() for c in counters), strict=True)]
    return Counters(*totals)
