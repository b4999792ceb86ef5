"""Groups in flight: they are admitted in order, complete in any order, and are taken in order of admission.

In checkpoints and pipes their rollouts are a few long arrays, because many small ones are slow to write.
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
    """Return rollouts as a tree of plain values and arrays, with each prompt stored once."""
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
    """Return the rollouts from the result of `pack_rollouts`."""
    prompts = {p["id"]: Prompt.from_json(p) for p in packed["prompts"]}
    tokens = {
        p["id"]: np.array(t, dtype=np.int64)
        for p, t in zip(packed["prompts"], packed["prompt_tokens"], strict=True)
    }
    # With a dtype: an empty list would give floats, which cannot be slice bounds.
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
    """Return the groups from the result of `pack_samples`, by sequence number."""
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
        # Pairs, because JSON would turn the sample numbers into strings as keys.
        "failed": [[[sample, reason] for sample, reason in group.failed.items()] for group in groups],
    }


def unpack_groups(packed: dict[str, Any]) -> list[Group]:
    """Return the groups from the result of `pack_groups`."""
    groups, start = [], 0
    rollouts = unpack_samples(packed["rollouts"]).values()
    for members, failed in zip(rollouts, packed["failed"], strict=True):
        span = slice(start, start := start + len(members))
        groups.append(Group(members, packed["reward"][span], packed["correct"][span], dict(failed)))
    return groups


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0)


class Generator(ABC):
    """The base class of generators, which sample completions in any process and with any engine.

    Groups come back in the order in which they were submitted, whatever order they finish in: this bounds
    the staleness of trained tokens.
    """

    def __init__(self, version: int) -> None:
        self.version = version
        """The version of the weights that were published last; a resume starts with them."""
        self._admitted = self._taken = 0
        self._incomplete: dict[int, GroupRequest] = {}
        self._partial: dict[int, dict[int, Rollout]] = {}
        """The finished completions of incomplete groups, by sequence number and sample."""
        self._complete: dict[int, tuple[Rollout, ...]] = {}
        self._before = Counters()
        """Counters of the run before the resume."""

    @abstractmethod
    def _assign(self, seq_no: int, group: GroupRequest) -> None:
        """Start to sample a group; its completions arrive by `_add`, or the whole group by `_keep`."""

    @abstractmethod
    def work(self) -> None:
        """Make one decode step if the generator is in this process; otherwise wait for a message."""

    @abstractmethod
    def update(self, weights: Weights, version: int) -> None:
        """Update the weights, which have been read when this returns.

        Completions in flight continue and keep their stale KV cache.
        """

    @property
    @abstractmethod
    def installed(self) -> int:
        """The newest version of the weights that all processes of the generator have."""

    @property
    @abstractmethod
    def counters(self) -> Counters:
        """Counters so far, including the work before a resume."""

    @abstractmethod
    def wait_until_started(self) -> None:
        """Wait until every process has its first weights; the time before that counts as start-up."""

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
        """Start to sample a group under a given sequence number."""
        self._incomplete[seq_no] = group
        self._assign(seq_no, group)

    @property
    def ready(self) -> int:
        """Number of groups that are complete, next in order, and not yet taken."""
        # Up to the first gap: a later complete group must not overtake an earlier one.
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
        """Number of groups that are admitted and not yet taken."""
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
        """Continue from `state`; groups that were in flight are sampled again and counted as restarted.

        The generator must be new and have the weights of the version in `state`.
        """
        self._restore_groups(state)
        for seq_no, group in self._incomplete.items():
            self._assign(seq_no, group)
        # The lost tokens were paid for, so they stay in the counters.
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
        # By sample: they finish in any order, and a group must not depend on that.
        samples[rollout.sample] = rollout
        if len(samples) == self._incomplete[seq_no][2]:
            del self._partial[seq_no], self._incomplete[seq_no]
            self._complete[seq_no] = tuple(samples[sample] for sample in sorted(samples))

    def _keep(self, packed: dict[str, Any]) -> None:
        for seq_no, rollouts in unpack_samples(packed).items():
            # With a default: groups complete at a resume were never among the incomplete ones here.
            self._incomplete.pop(seq_no, None)
            self._complete[seq_no] = rollouts


def sum_of(counters: Sequence[Counters]) -> Counters:
    """Return the sums of the counters of several processes."""
    totals: list[Any] = [sum(values) for values in zip(*(vars(c).values() for c in counters), strict=True)]
    return Counters(*totals)
