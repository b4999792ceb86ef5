"""Groups in flight: admitted in order, complete in any order, taken in order, wherever they are sampled.

In checkpoints and pipes their rollouts are a few long arrays, as many small ones would be slow to write.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

import numpy as np

from scalerl.rl.engine.sampling import GroupRequest
from scalerl.rl.types import Counters, Group, Prompt, Rollout, Weights

_BY_TOKEN = ("token_T", "sampled_T", "logp_T", "version_T")
_BY_ROLLOUT = ("epoch", "sample", "first_version", "truncated", "interrupted")


def pack_rollouts(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Return a tree of plain values and arrays; every prompt is in it once."""
    # The completions of a group share their prompt, which may be longer than they are.
    prompts = {r.prompt.id: r for r in rollouts}
    packed: dict[str, Any] = {
        "prompts": [dict(vars(r.prompt)) for r in prompts.values()],
        "prompt_tokens": [r.prompt_T.tolist() for r in prompts.values()],
        "prompt": [r.prompt.id for r in rollouts],
        "tokens": [len(r.token_T) for r in rollouts],
    }
    packed |= {name: [getattr(r, name) for r in rollouts] for name in _BY_ROLLOUT}
    experts = [r.expert_PLK for r in rollouts if r.expert_PLK is not None]
    packed |= {"experts": np.concatenate(experts)} if experts else {}
    return packed | {name: _joined([getattr(r, name) for r in rollouts]) for name in _BY_TOKEN}


def unpack_rollouts(packed: dict[str, Any]) -> list[Rollout]:
    """Return what `pack_rollouts` was given."""
    prompts = {p["id"]: Prompt.from_json(p) for p in packed["prompts"]}
    tokens = {
        p["id"]: np.array(t, dtype=np.int64)
        for p, t in zip(packed["prompts"], packed["prompt_tokens"], strict=True)
    }
    # dtype, as an empty list would give floats, which slice nothing.
    ends = np.cumsum(packed["tokens"], dtype=np.int64)
    rollouts, experts, read = [], packed.get("experts"), 0
    for i, (name, end) in enumerate(zip(packed["prompt"], ends, strict=True)):
        span = slice(end - packed["tokens"][i], end)
        values = {key: packed[key][i] for key in _BY_ROLLOUT} | {key: packed[key][span] for key in _BY_TOKEN}
        if experts is not None:
            before, read = read, read + len(tokens[name]) + packed["tokens"][i] - 1
            values["expert_PLK"] = experts[before:read]
        rollouts.append(Rollout(prompt=prompts[name], prompt_T=tokens[name], **values))
    return rollouts


def pack_samples(samples: Mapping[int, Sequence[Rollout]]) -> dict[str, Any]:
    """Pack rollouts with the sequence numbers of their groups, for checkpoints and pipes."""
    rollouts = [rollout for group in samples.values() for rollout in group]
    return {
        "seq_nos": list(samples),
        "sizes": [len(group) for group in samples.values()],
        "rollouts": pack_rollouts(rollouts),
    }


def unpack_samples(packed: dict[str, Any]) -> dict[int, tuple[Rollout, ...]]:
    """Return what `pack_samples` was given."""
    rollouts = iter(unpack_rollouts(packed["rollouts"]))
    return {
        seq_no: tuple(islice(rollouts, size))
        for seq_no, size in zip(packed["seq_nos"], packed["sizes"], strict=True)
    }


def pack_groups(groups: Sequence[Group]) -> dict[str, Any]:
    """Pack verified groups, rewards included."""
    return {
        "rollouts": pack_samples({i: group.rollouts for i, group in enumerate(groups)}),
        "reward": _joined([group.reward_G for group in groups]),
        "correct": _joined([group.correct_G for group in groups]),
        # Pairs, as JSON would make texts of the numbers of samples.
        "failed": [[[sample, reason] for sample, reason in group.failed.items()] for group in groups],
    }


def unpack_groups(packed: dict[str, Any]) -> list[Group]:
    """Return what `pack_groups` was given."""
    groups, start = [], 0
    rollouts = unpack_samples(packed["rollouts"]).values()
    for members, failed in zip(rollouts, packed["failed"], strict=True):
        span = slice(start, start := start + len(members))
        groups.append(Group(members, packed["reward"][span], packed["correct"][span], dict(failed)))
    return groups


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0)


class Generator(ABC):
    """Samples completions, wherever and with whatever engine.

    Groups come back in the order in which they were submitted, whatever order they finish in: that is what
    bounds the staleness of trained tokens.
    """

    def __init__(self, version: int) -> None:
        self.version = version
        """The version of the weights that were published last: a resume starts with them."""
        self._admitted = self._taken = 0
        self._incomplete: dict[int, GroupRequest] = {}
        self._partial: dict[int, dict[int, Rollout]] = {}
        """The completions that are there of incomplete groups, by sequence number and sample."""
        self._complete: dict[int, tuple[Rollout, ...]] = {}
        self._before = Counters()
        """Counters of the run before the resume."""

    @abstractmethod
    def _assign(self, seq_no: int, group: GroupRequest) -> None:
        """Have a group sampled; its completions come by `_add`, or the whole group by `_keep`."""

    @abstractmethod
    def work(self) -> None:
        """Make one decode step where the generator is in this process; elsewhere, wait for a message."""

    @abstractmethod
    def update(self, weights: Weights, version: int) -> None:
        """Install new weights, which have been read when this returns.

        Completions in flight go on, and keep their stale KV cache.
        """

    @property
    @abstractmethod
    def installed(self) -> int:
        """The newest version of the weights that all parts of the generator have."""

    @property
    @abstractmethod
    def counters(self) -> Counters:
        """Counters so far, the work before a resume included."""

    @abstractmethod
    def wait_until_started(self) -> None:
        """Wait until every process has its first weights: the time before counts as start-up."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources; completions in flight are lost."""

    def submit(self, prompt: Prompt, epoch: int, n_samples: int) -> int:
        """Admit a group of `n_samples` completions; return its sequence number."""
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
        """Groups that are complete, next in order, and not taken."""
        # Up to the first gap: a later group that is complete must not overtake one that is older.
        n = self._taken
        while n in self._complete:
            n += 1
        return n - self._taken

    def take(self, n_groups: int) -> list[tuple[Rollout, ...]]:
        """Return the next `n_groups` groups in order of admission, which must be ready."""
        seq_nos = range(self._taken, self._taken + n_groups)
        self._taken = seq_nos.stop
        return [self._complete.pop(seq_no) for seq_no in seq_nos]

    def collect(self, n_groups: int) -> list[tuple[Rollout, ...]]:
        """Work until the next `n_groups` groups in order of admission are complete, and take them."""
        if n_groups > self.in_flight:
            raise ValueError(f"only {self.in_flight} groups are admitted, {n_groups} were asked for")
        while self.ready < n_groups:
            self.work()
        return self.take(n_groups)

    def take_complete(self) -> dict[int, tuple[Rollout, ...]]:
        """Return all complete groups by sequence number, whatever their order."""
        complete, self._complete = self._complete, {}
        return complete

    @property
    def in_flight(self) -> int:
        """Groups that are admitted and not taken."""
        return self._admitted - self._taken

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, as a tree of plain values and copied arrays, without weights."""
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

        The generator must be new, and have the weights of the version in `state`.
        """
        self._restore_groups(state)
        for seq_no, group in self._incomplete.items():
            self._assign(seq_no, group)
        # Their tokens were computed: they stay in the counters, and are sampled a second time.
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
        # By sample, as they finish in any order, and a group must not depend on that.
        samples[rollout.sample] = rollout
        if len(samples) == self._incomplete[seq_no][2]:
            del self._partial[seq_no], self._incomplete[seq_no]
            self._complete[seq_no] = tuple(samples[sample] for sample in sorted(samples))

    def _keep(self, packed: dict[str, Any]) -> None:
        for seq_no, rollouts in unpack_samples(packed).items():
            # A default: the complete groups of a resume were never among the incomplete ones here.
            self._incomplete.pop(seq_no, None)
            self._complete[seq_no] = rollouts


def sum_of(counters: Sequence[Counters]) -> Counters:
    """Return what several processes have spent together."""
    totals: list[Any] = [sum(values) for values in zip(*(vars(c).values() for c in counters), strict=True)]
    return Counters(*totals)
