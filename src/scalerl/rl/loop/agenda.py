"""What is due at which share of the budget: evaluations, and frozen forecasts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class Agenda:
    """Keeps what has been done."""

    count: int
    milestones: Sequence[float] = ()
    """Shares of the budget at which a forecast is frozen."""
    due: int = 1
    """Of `count` evaluations, the next."""
    frozen: int = 0
    """Milestones that have passed."""

    def evaluates(self, share: float) -> bool:
        """Whether an evaluation is due; those that one step passes together are made once."""
        before, share = self.due, min(share, 1.0)  # a step may cost any multiple of the budget
        self.due = max(self.due, math.floor(share * self.count))
        while self.due / self.count <= share:
            self.due += 1
        return self.due > before

    def to_freeze(self, share: float) -> bool:
        """Whether a milestone has been reached of which no forecast was frozen."""
        return self._passed(share) > self.frozen

    def froze(self, share: float) -> None:
        """A forecast was frozen, or cannot be made."""
        self.frozen = self._passed(share)

    def _passed(self, share: float) -> int:
        return sum(milestone <= share for milestone in self.milestones)

    def state(self) -> dict[str, Any]:
        """What `restore` needs."""
        return {"due": self.due, "frozen": self.frozen}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        self.due, self.frozen = state["due"], state["frozen"]
