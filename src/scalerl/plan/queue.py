"""Groups that have been admitted, until the driver takes them."""

from __future__ import annotations

from scalerl.plan.replica import SimulatedGroup


class Queue:
    """Groups from their admission until they are taken, which are complete when all their parts are."""

    def __init__(self, in_order: bool) -> None:
        self._in_order = in_order
        self._left: dict[int, int] = {}  # parts that are not complete, by place
        self._complete: dict[int, SimulatedGroup] = {}
        self._next = 0  # the first place that is not ready
        self._taken = 0

    def admit(self, place: int, n_parts: int) -> None:
        """A group comes in so many parts."""
        self._left[place] = n_parts

    def complete(self, part: SimulatedGroup) -> None:
        """A part of a group is."""
        group = self._complete.setdefault(part.place, part)
        if group is not part:
            group.lengths += part.lengths
            for version, tokens in part.tokens.items():
                group.tokens[version] = group.tokens.get(version, 0) + tokens
        self._left[part.place] -= 1
        if not self._left[part.place]:
            del self._left[part.place]
        while self._next in self._complete and self._next not in self._left:
            self._next += 1

    @property
    def ready(self) -> int:
        """Groups that can be taken."""
        if self._in_order:
            return self._next - self._taken
        return sum(place not in self._left for place in self._complete)

    def take(self, n: int) -> list[SimulatedGroup]:
        """So many of them, those first that were admitted first."""
        places = sorted(place for place in self._complete if place not in self._left)[:n]
        self._taken += n
        return [self._complete.pop(place) for place in places]

    def __len__(self) -> int:
        """Groups of which a part is complete."""
        return len(self._complete)
