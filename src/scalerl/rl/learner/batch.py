"""From verified groups to the arrays of one trainer step.

Shapes in names: G completions of one group, N completions of the batch, T positions (prompt and completion).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from scalerl.rl.algo.advantage import Advantage, centre
from scalerl.rl.algo.averaging import Averaging
from scalerl.rl.types import Group, Rollout

Fate = Literal["trained", "zero_variance", "truncated", "failed"]
"""The fate of a group: it enters the loss; or it leaves it because its rewards are all the same, because
truncation left fewer than two of its completions, or because failed verifications did."""


@dataclass(frozen=True)
class Batch:
    """Completions that enter the loss, right-padded. Position t predicts the token at t.

    `weight_NT` sums to 1 over the batch (to less with `ConstantAverage`), and is 0 on prompts, on inserted
    tokens and on padding.
    """

    token_NT: np.ndarray
    behaviour_logp_NT: np.ndarray
    weight_NT: np.ndarray
    version_NT: np.ndarray
    advantage_N: np.ndarray
    length_N: np.ndarray
    """Prompt and completion, inserted tokens included."""
    prompt_N: np.ndarray
    """Tokens of the prompt."""
    group_N: np.ndarray
    """Number of the group; its completions share their prompt."""
    fates: tuple[Fate, ...]
    """The fate of each group."""
    zero_variance: int
    """Groups without signal."""
    expert_NTLK: np.ndarray | None = None
    """With `routing_replay`, the K experts of each of L layers that read the token at t."""

    @property
    def groups_used(self) -> int:
        """Groups that enter the loss."""
        return self.fates.count("trained")

    @property
    def sampled_NT(self) -> np.ndarray:
        """True on the tokens that are trained."""
        return self.weight_NT > 0

    def __len__(self) -> int:
        return len(self.advantage_N)

    def tokens_and_positions(self) -> tuple[float, float]:
        """Return the tokens read, and the positions that they attend to; a group's prompt counts once.

        The last token of a completion is predicted and never read.
        """
        _, first_U = np.unique(self.group_N, return_index=True)
        prompt_N, read_N = self.prompt_N.astype(float), self.length_N - 1.0
        own_N, prompt_U = read_N - prompt_N, prompt_N[first_U]
        positions_N = (read_N * (read_N + 1) - prompt_N * (prompt_N + 1)) / 2
        return own_N.sum() + prompt_U.sum(), positions_N.sum() + (prompt_U * (prompt_U + 1) / 2).sum()


def make_batch(
    groups: Sequence[Group],
    advantage: Advantage,
    averaging: Averaging,
    budget: int,
    *,
    keep_zero_variance: bool = False,
    keep_truncated: bool = False,
) -> Batch:
    """Build the batch of one trainer step; it may be empty, and the step is then skipped and counted.

    `budget` is the most tokens that a completion may sample.
    """
    kept: list[list[Rollout]] = []
    centred: list[np.ndarray] = []
    fates: list[Fate] = []
    without_signal = 0
    for group in groups:
        rollouts, whole = group.rollouts, _whole(group, keep_truncated)
        # The mean is over what enters the loss: a truncated completion is no baseline either.
        centred_G = centre(group.reward_G[whole])
        signal = centred_G.any()
        # Counted also where such groups are kept: they train nothing but the divergence, if that is on.
        without_signal += not signal
        if signal or (keep_zero_variance and whole):
            kept.append([rollouts[i] for i in whole])
            centred.append(centred_G)
            fates.append("trained")
        elif len(whole) > 1:
            fates.append("zero_variance")
        else:
            truncated = sum(r.truncated for r in rollouts)
            fates.append("failed" if len(group.failed) > truncated else "truncated")
    rollouts = [rollout for members in kept for rollout in members]
    group_N = np.repeat(np.arange(len(kept)), [len(members) for members in kept])
    # zeros(0), as a batch may have no group left, and nothing cannot be concatenated.
    advantage_N = np.concatenate([*advantage(centred), np.zeros(0)])
    length_N = np.array([r.length for r in rollouts], dtype=float)
    weight_N = averaging(length_N, group_N, budget) if rollouts else np.zeros(0)
    return _pad(rollouts, group_N, advantage_N, weight_N, tuple(fates), without_signal)


def has_signal(group: Group, *, keep_truncated: bool = False) -> bool:
    """Return whether the completions of a group that may enter the loss differ in their rewards."""
    return bool(centre(group.reward_G[_whole(group, keep_truncated)]).any())


def _whole(group: Group, keep_truncated: bool) -> list[int]:
    """Return the completions of a group that may enter the loss."""
    return [
        i
        for i, r in enumerate(group.rollouts)
        # Without sampled tokens there is nothing to train, and averaging would divide by 0.
        if r.length > 0 and (keep_truncated or not r.truncated) and i not in group.failed
    ]


def _pad(
    rollouts: Sequence[Rollout],
    group_N: np.ndarray,
    advantage_N: np.ndarray,
    weight_N: np.ndarray,
    fates: tuple[Fate, ...],
    without_signal: int,
) -> Batch:
    prompt_N = np.array([len(r.prompt_T) for r in rollouts], dtype=np.int64)
    length_N = prompt_N + np.array([len(r.token_T) for r in rollouts], dtype=np.int64)
    shape = (len(rollouts), int(length_N.max(initial=0)))
    at_T = np.arange(shape[1])
    prompt_NT, all_NT = at_T < prompt_N[:, None], at_T < length_N[:, None]
    own_NT = all_NT & ~prompt_NT

    def padded(name: str, dtype: type) -> np.ndarray:
        """Return an attribute of the rollouts that has a value per completion token, padded."""
        out_NT = np.zeros(shape, dtype=dtype)
        if rollouts:
            out_NT[own_NT] = np.concatenate([getattr(r, name) for r in rollouts])
        return out_NT

    token_NT = padded("token_T", np.int64)
    if rollouts:
        token_NT[prompt_NT] = np.concatenate([r.prompt_T for r in rollouts])
    recorded = [r.expert_PLK for r in rollouts if r.expert_PLK is not None]
    expert_NTLK = None
    if recorded:
        expert_NTLK = np.zeros((*shape, *recorded[0].shape[1:]), dtype=recorded[0].dtype)
        expert_NTLK[at_T < length_N[:, None] - 1] = np.concatenate(recorded)  # the last token is not read
    return Batch(
        token_NT=token_NT,
        behaviour_logp_NT=padded("logp_T", np.float32),
        # Inserted tokens are read and weigh 0: the model has not chosen them.
        weight_NT=padded("sampled_T", np.float64) * weight_N[:, None],
        version_NT=padded("version_T", np.int64),
        advantage_N=advantage_N,
        length_N=length_N,
        prompt_N=prompt_N,
        group_N=group_N,
        fates=fates,
        zero_variance=without_signal,
        expert_NTLK=expert_NTLK,
    )
