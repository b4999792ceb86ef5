"""Verified groups in order of admission, cut into the batches of steps.

A batch is `prompts` groups. With `zero_variance = "resample"` (dynamic sampling: DAPO, arXiv 2503.14476,
section 3.2) those count that enter the loss alone, so that further groups take the place of the others; but
after `max_gen_batches` times `prompts` groups a batch is complete whatever it holds.
"""

from collections import deque
from collections.abc import Iterable
from itertools import islice

from scalerl.rl.config.recipe import Recipe
from scalerl.rl.learner.batch import has_signal
from scalerl.rl.types import Group


class VerifiedGroups:
    """The groups that are verified and not consumed yet: complete batches, and then the open one."""

    def __init__(self, recipe: Recipe) -> None:
        self._resamples = recipe.zero_variance == "resample"
        self._keep_truncated = recipe.truncated == "keep"
        self._prompts = recipe.batch.prompts
        self._most = self._prompts * (recipe.batch.max_gen_batches if self._resamples else 1)
        self._groups, self._sizes = deque[Group](), deque[int]()
        self._open = self._counting = 0
        """Groups of the open batch, and those of them that count."""
        self.replaced = 0
        """Groups without signal so far that others replace, for `scalerl.rl.loop.admission`."""

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def complete(self) -> int:
        """Batches that are complete."""
        return len(self._sizes)

    def missing(self, batches: int) -> int:
        """Return the least number of groups with which so many batches may be complete."""
        if batches <= self.complete:
            return 0
        first = min(self._prompts - self._counting, self._most - self._open)
        return first + (batches - self.complete - 1) * self._prompts

    def add(self, group: Group) -> None:
        """Add the next group in order of admission."""
        self._groups.append(group)
        self._open += 1
        if not self._resamples or has_signal(group, keep_truncated=self._keep_truncated):
            self._counting += 1
        # Beyond that the batch is complete without another in its place.
        elif self._open - self._counting <= self._most - self._prompts:
            self.replaced += 1
        if self._counting == self._prompts or self._open == self._most:
            self._sizes.append(self._open)
            self._open = self._counting = 0

    def first(self) -> list[Group]:
        """Return the groups of the first batch, which must be complete."""
        return list(islice(self._groups, self._sizes[0]))

    def take(self) -> list[Group]:
        """Remove the first batch, and return its groups."""
        return [self._groups.popleft() for _ in range(self._sizes.popleft())]

    def put_back(self, groups: list[Group]) -> None:
        """Undo a `take`."""
        self._groups.extendleft(reversed(groups))
        self._sizes.appendleft(len(groups))

    def state(self) -> tuple[list[Group], int]:
        """Return what `restore` needs."""
        return list(self._groups), self.replaced

    def restore(self, groups: Iterable[Group], replaced: int) -> None:
        """Go on from `state`."""
        for group in groups:
            self.add(group)
        self.replaced = replaced
