"""Rollouts as a few long arrays, for checkpoints and pipes: many small arrays would be slow to write.

Shapes in names: S tokens of all completions, one after the other.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from scalerl.rl.types import Group, Prompt, Rollout

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
