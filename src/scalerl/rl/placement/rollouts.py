"""Groups assigned to rollout workers: the table of what is in flight, wherever the workers run."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from scalerl.rl.engine.ordered import OrderedGroups, sum_of
from scalerl.rl.engine.sampling import GroupRequest
from scalerl.rl.types import Counters


@dataclass(eq=False)
class Assigned:
    """What one rollout worker is assigned, has installed and has spent, over all of its processes."""

    in_flight: dict[int, GroupRequest] = field(default_factory=dict)
    """Groups by sequence number."""
    installed: int = -1
    """The version of its weights; -1 before the first."""
    counters: Counters = field(default_factory=Counters)
    lost_counters: Counters = field(default_factory=Counters)
    """What its lost processes had spent."""
    launched_at: float = 0.0
    """When its process was started; 0 where it waits for room."""
    reported_at: float = 0.0

    def reported(self, counters: Counters) -> None:
        """Note what its process has spent."""
        self.counters, self.reported_at = counters, time.monotonic()

    def take_back(self) -> dict[int, GroupRequest]:
        """Count what a lost process has spent; return its groups, which are sampled again."""
        # The time since its last report is spent too: what it has done in it is lost.
        now, spent = time.monotonic(), self.counters
        if spent.held:
            spent = replace(spent, held=spent.held + now - self.reported_at)
        else:
            spent = replace(spent, startup=now - self.launched_at if self.launched_at else 0.0)
        groups, self.in_flight = self.in_flight, {}
        self.lost_counters, self.counters = sum_of([self.lost_counters, spent]), Counters()
        self.lost_counters.restarted += len(groups)
        self.installed, self.launched_at = -1, 0.0
        return groups


W = TypeVar("W", bound=Assigned)


class AssignedGroups(OrderedGroups, Generic[W]):
    """Groups that are sampled by rollout workers."""

    _workers: list[W]

    @property
    def counters(self) -> Counters:
        """What all processes have spent, the lost ones included."""
        return sum_of([self._before, *(c for w in self._workers for c in (w.counters, w.lost_counters))])

    def _complete_groups(self, worker: W, packed: dict[str, Any]) -> None:
        """Take complete groups from a worker, as `pack_samples` has them."""
        self._keep(packed)
        for seq_no in packed["seq_nos"]:
            del worker.in_flight[seq_no]
