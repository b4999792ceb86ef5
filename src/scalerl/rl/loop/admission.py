"""Admission control: the in-flight limit that enforces k; and verified groups, cut into the batches of steps.

With P groups a trainer step, group g is consumed by the step that starts at version g // P, whatever the
order in which groups complete. A slot of the limit comes back only when every generator has the
weights of the step that consumed it. So `PipelineRL(k)`, with k + 1 batches in flight, admits group g once
all have version g // P - k: the group is sampled by that version or a later one, and no trained token is
older than k versions (PipelineRL, arXiv 2509.19128; PipelineRL-k, arXiv 2510.13786). `OffPolicy(k)` has k
batches in flight, all of a phase sampled by the weights at its start: the last of its batches is trained at
staleness k - 1.

A batch is P groups. With `zero_variance = "resample"` (dynamic sampling: DAPO, arXiv 2503.14476, section 3.2)
those count that enter the loss alone, so that further groups take the place of the others; but after
`max_gen_batches` times P groups a batch is complete whatever it holds. A group that is replaced gives its
slot back as soon as that is known: it is no group of the P. Of each step at most so many do as leave P groups
of all that it may consume. Then at most u + q // P is the version that trains a group, with u steps begun and
q groups before it that are in flight, and the bound is as above.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from scalerl.rl.algo.schedule import AnySchedule
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.learner.batch import has_signal
from scalerl.rl.types import Group


@dataclass
class AdmissionControl:
    """Decides whether another group may be admitted; `admitted` are all so far."""

    schedule: AnySchedule
    prompts: int
    """Groups that a trainer step consumes."""
    admitted: int = 0

    def allows(self, version: int, replaced: int = 0) -> bool:
        """Return whether a group may be admitted, `version` being the one that every generator has, and
        `replaced` the groups so far whose place others take.
        """
        # Every version is the result of one batch: so many groups have come back as weights.
        consumed = version * self.prompts + replaced
        return self.admitted < consumed + self.schedule.in_flight_limit(self.prompts)


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
        """Groups without signal so far that others replace."""

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
        # The open batch ends by what comes first: enough groups that count, or the most that it may hold.
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
        # Reversed, as `extendleft` reverses: the order of admission is what bounds staleness.
        self._groups.extendleft(reversed(groups))
        self._sizes.appendleft(len(groups))

    def state(self) -> tuple[list[Group], int]:
        """Return what `restore` needs."""
        return list(self._groups), self.replaced

    def restore(self, groups: Iterable[Group], replaced: int) -> None:
        """Go on from `state`."""
        # `add` cuts the batches anew, and counts only the groups held: `replaced` also has those consumed.
        for group in groups:
            self.add(group)
        self.replaced = replaced
