"""Admission control: the in-flight limit that enforces k, and the batches that verified groups are cut into.

A trainer step consumes P groups in order of admission, so group g is consumed by the step that starts at
version g // P, whatever order groups complete in. A slot of the limit is freed only when every generator has
the weights of the step that consumed it. `PipelineRL(k)` has k + 1 batches in flight, so it admits group g
once all generators have version g // P - k: the group is sampled by that version or a later one, and no
trained token is older than k versions (PipelineRL, arXiv 2509.19128; PipelineRL-k, arXiv 2510.13786).
`OffPolicy(k)` has k batches in flight, all sampled by the weights at the start of their phase: the last one
is trained at staleness k - 1.

With `zero_variance = "resample"` (dynamic sampling: DAPO, arXiv 2503.14476, section 3.2) only groups with
signal count towards the P of a batch, and further groups replace the others. A batch is also complete after
`max_gen_batches` times P groups, whatever it holds. A replaced group frees its slot as soon as it is found to
have no signal. A batch replaces at most `max_gen_batches - 1` times P groups, so every step still consumes at
least P groups that keep their slot. After u steps have started, a group with q groups in flight before it is
therefore trained at version u + q // P at the latest, and the bound above holds.
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
    """The in-flight limit of a schedule; `admitted` counts all groups admitted so far."""

    schedule: AnySchedule
    prompts: int
    """Groups that a trainer step consumes."""
    admitted: int = 0

    def allows(self, version: int, replaced: int = 0) -> bool:
        """Return whether another group may be admitted.

        Every generator has `version`; `replaced` groups so far gave their place to others.
        """
        # Each version results from one batch, so all generators have the weights that these groups trained.
        consumed = version * self.prompts + replaced
        return self.admitted < consumed + self.schedule.in_flight_limit(self.prompts)


class VerifiedGroups:
    """Groups that are verified and not yet consumed: complete batches, then the open one."""

    def __init__(self, recipe: Recipe) -> None:
        self._resamples = recipe.zero_variance == "resample"
        self._keep_truncated = recipe.truncated == "keep"
        self._prompts = recipe.batch.prompts
        self._most = self._prompts * (recipe.batch.max_gen_batches if self._resamples else 1)
        self._groups, self._sizes = deque[Group](), deque[int]()
        self._open = self._counting = 0
        """Groups of the open batch, and how many of them count towards its P groups."""
        self.replaced = 0
        """Groups without signal so far that other groups replace."""

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def complete(self) -> int:
        """Number of complete batches."""
        return len(self._sizes)

    def missing(self, batches: int) -> int:
        """Return the least number of further groups that could complete `batches` batches."""
        if batches <= self.complete:
            return 0
        # The open batch is complete with enough groups that count, or with the most groups it may hold.
        first = min(self._prompts - self._counting, self._most - self._open)
        return first + (batches - self.complete - 1) * self._prompts

    def add(self, group: Group) -> None:
        """Add the next group in order of admission."""
        self._groups.append(group)
        self._open += 1
        if not self._resamples or has_signal(group, keep_truncated=self._keep_truncated):
            self._counting += 1
        # Beyond this many the batch reaches its most groups without a replacement for this one.
        elif self._open - self._counting <= self._most - self._prompts:
            self.replaced += 1
        if self._counting == self._prompts or self._open == self._most:
            self._sizes.append(self._open)
            self._open = self._counting = 0

    def first(self) -> list[Group]:
        """Return the groups of the first batch, which must be complete."""
        return list(islice(self._groups, self._sizes[0]))

    def take(self) -> list[Group]:
        """Remove the first batch and return its groups."""
        return [self._groups.popleft() for _ in range(self._sizes.popleft())]

    def put_back(self, groups: list[Group]) -> None:
        """Undo a `take`."""
        # `extendleft` reverses, so reverse first: the order of admission is what bounds staleness.
        self._groups.extendleft(reversed(groups))
        self._sizes.appendleft(len(groups))

    def state(self) -> tuple[list[Group], int]:
        """Return what `restore` needs."""
        return list(self._groups), self.replaced

    def restore(self, groups: Iterable[Group], replaced: int) -> None:
        """Continue from `state`."""
        # `add` cuts the batches again but counts only the groups held; `replaced` includes consumed ones.
        for group in groups:
            self.add(group)
        self.replaced = replaced
