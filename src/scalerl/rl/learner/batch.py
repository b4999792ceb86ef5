"""The data of a trainer step: the arrays of its batch, the rows of each pass, and its statistics.

Every rank computes the same cut of a batch into passes, so nothing has to be sent. Because tokens are
weighted over the whole batch, the result does not depend on the cut, except for rounding.

Shapes in names: G completions of one group, N completions of the batch, T positions (prompt and completion).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from scalerl.rl.algo.advantage import Advantage, centre
from scalerl.rl.algo.averaging import Averaging
from scalerl.rl.algo.checked import advantages_of, weights_of
from scalerl.rl.config.settings import BatchSize
from scalerl.rl.types import Group, Rollout

Fate = Literal["trained", "zero_variance", "truncated", "failed"]
"""The fate of a group: it enters the loss, or is dropped because its rewards are all the same, or because
truncation or failed verifications left fewer than two completions."""


@dataclass(frozen=True)
class Batch:
    """Completions that enter the loss, right-padded. Position t predicts the token at t.

    `weight_NT` sums to 1 over the batch (to less with `ConstantAverage`); it is 0 on prompts, inserted tokens
    and padding.
    """

    token_NT: np.ndarray
    behaviour_logp_NT: np.ndarray
    weight_NT: np.ndarray
    version_NT: np.ndarray
    advantage_N: np.ndarray
    length_N: np.ndarray
    """Number of tokens of prompt and completion, including inserted ones."""
    prompt_N: np.ndarray
    """Number of tokens of the prompt."""
    group_N: np.ndarray
    """Index of the group; its completions share their prompt."""
    fates: tuple[Fate, ...]
    """The fate of each group of the step, including dropped ones."""
    zero_variance: int
    """Number of groups without signal, including kept ones."""
    expert_NTLK: np.ndarray | None = None
    """With `routing_replay`: the K experts in each of L layers that read the token at t."""

    @property
    def groups_used(self) -> int:
        """Number of groups that enter the loss."""
        return self.fates.count("trained")

    @property
    def sampled_NT(self) -> np.ndarray:
        """True on the tokens that are trained."""
        return self.weight_NT > 0

    def __len__(self) -> int:
        return len(self.advantage_N)

    def tokens_and_positions(self) -> tuple[float, float]:
        """Return the number of tokens read, and of positions they attend to; a group's prompt counts once.

        The last token of a completion is predicted but never read.
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
    """Build the batch of one trainer step; a step with an empty batch is skipped but counted.

    `budget` is the largest number of tokens that a completion may sample.
    """
    kept: list[list[Rollout]] = []
    centred: list[np.ndarray] = []
    fates: list[Fate] = []
    without_signal = 0
    for group in groups:
        rollouts, whole = group.rollouts, _whole(group, keep_truncated)
        # The mean is over completions that enter the loss: dropped ones do not shift the baseline.
        centred_G = centre(group.reward_G[whole])
        signal = centred_G.any()
        # Kept groups without signal count too: they train only the KL divergence, if that is on.
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
    # zeros(0), because concatenate needs an array even if no group is left.
    advantage_N = np.concatenate([*advantages_of(advantage, centred), np.zeros(0)])
    length_N = np.array([r.length for r in rollouts], dtype=float)
    weight_N = weights_of(averaging, length_N, group_N, budget) if rollouts else np.zeros(0)
    return padded(rollouts, group_N, advantage_N, weight_N, tuple(fates), without_signal)


def has_signal(group: Group, *, keep_truncated: bool = False) -> bool:
    """Return whether the completions of a group that may enter the loss differ in their rewards."""
    return bool(centre(group.reward_G[_whole(group, keep_truncated)]).any())


def _whole(group: Group, keep_truncated: bool) -> list[int]:
    """Return the indices of the completions of a group that may enter the loss."""
    return [
        i
        for i, r in enumerate(group.rollouts)
        # A completion without sampled tokens trains nothing, and averaging would divide by 0.
        if r.length > 0 and (keep_truncated or not r.truncated) and i not in group.failed
    ]


def padded(
    rollouts: Sequence[Rollout],
    group_N: np.ndarray,
    advantage_N: np.ndarray,
    weight_N: np.ndarray,
    fates: tuple[Fate, ...] = (),
    without_signal: int = 0,
) -> Batch:
    """Return completions as a batch, with `weight_N` on each of their sampled tokens."""
    prompt_N = np.array([len(r.prompt_T) for r in rollouts], dtype=np.int64)
    length_N = prompt_N + np.array([len(r.token_T) for r in rollouts], dtype=np.int64)
    shape = (len(rollouts), int(length_N.max(initial=0)))
    at_T = np.arange(shape[1])
    prompt_NT, all_NT = at_T < prompt_N[:, None], at_T < length_N[:, None]
    own_NT = all_NT & ~prompt_NT

    def of_tokens(name: str, dtype: type) -> np.ndarray:
        out_NT = np.zeros(shape, dtype=dtype)
        if rollouts:
            out_NT[own_NT] = np.concatenate([getattr(r, name) for r in rollouts])
        return out_NT

    token_NT = of_tokens("token_T", np.int64)
    if rollouts:
        token_NT[prompt_NT] = np.concatenate([r.prompt_T for r in rollouts])
    recorded = [r.expert_PLK for r in rollouts if r.expert_PLK is not None]
    expert_NTLK = None
    if recorded:
        expert_NTLK = np.zeros((*shape, *recorded[0].shape[1:]), dtype=recorded[0].dtype)
        expert_NTLK[at_T < length_N[:, None] - 1] = np.concatenate(recorded)  # the last token is not read
    return Batch(
        token_NT=token_NT,
        behaviour_logp_NT=of_tokens("logp_T", np.float32),
        # Inserted tokens are read but have weight 0: the model did not choose them.
        weight_NT=of_tokens("sampled_T", np.float64) * weight_N[:, None],
        version_NT=of_tokens("version_T", np.int64),
        advantage_N=advantage_N,
        length_N=length_N,
        prompt_N=prompt_N,
        group_N=group_N,
        fates=fates,
        zero_variance=without_signal,
        expert_NTLK=expert_NTLK,
    )


def share_rows(length_N: np.ndarray, n_ranks: int) -> list[np.ndarray]:
    """Return the rows of each rank, ascending; the longest left goes to the rank with the fewest tokens."""
    shares: list[list[int]] = [[] for _ in range(n_ranks)]
    loads = [(0, rank) for rank in range(n_ranks)]
    # Stable: every rank computes all shares and must break ties between equal lengths in the same way.
    for row in np.argsort(-length_N, kind="stable"):
        tokens, rank = loads[0]
        shares[rank].append(int(row))
        heapq.heapreplace(loads, (tokens + int(length_N[row]), rank))
    return [np.array(sorted(share), dtype=np.int64) for share in shares]


def in_groups(length_N: np.ndarray, group_N: np.ndarray, size: BatchSize) -> list[np.ndarray]:
    """Cut a batch into micro-batches in its own order, for a pass that reads the prompt of a group once.

    A group stays whole if it fits into a micro-batch.
    """
    most = size.micro_tokens or size.micro
    cost_N = length_N if size.micro_tokens else np.ones_like(group_N)
    cuts, total = [], 0
    for rows in np.split(np.arange(len(group_N)), np.flatnonzero(np.diff(group_N)) + 1):
        if total and total + int(cost_N[rows].sum()) > most:
            cuts, total = [*cuts, int(rows[0])], 0
        for row in rows:
            if total and total + int(cost_N[row]) > most:  # the group alone is too large
                cuts, total = [*cuts, int(row)], 0
            total += int(cost_N[row])
    return np.split(np.arange(len(group_N)), cuts)


def by_length(length_N: np.ndarray, rows: np.ndarray, size: BatchSize, packed: bool) -> list[np.ndarray]:
    """Cut `rows` into micro-batches, the shortest completions first to keep padding small.

    A micro-batch has at most `size.micro_tokens` tokens, including padding unless they are `packed`, but at
    least one completion. If `size.micro_tokens` is 0, it has at most `size.micro` completions.
    """
    rows = rows[np.argsort(length_N[rows], kind="stable")]
    if not size.micro_tokens:
        return np.split(rows, range(size.micro, len(rows), size.micro)) if len(rows) else []
    found: list[list[int]] = []
    for row in rows:
        tokens = [int(length_N[other]) for other in (*(found[-1] if found else ()), row)]
        # Rows are sorted, so the last is the longest, and the others are padded to its length.
        total = sum(tokens) if packed else len(tokens) * tokens[-1]
        if found and total <= size.micro_tokens:
            found[-1].append(int(row))
        else:
            found.append([int(row)])
    return [np.array(one, dtype=np.int64) for one in found]


def of_rank(
    length_N: np.ndarray, rank: int, n_ranks: int, cut: Callable[[np.ndarray], list[np.ndarray]]
) -> list[np.ndarray]:
    """Return the micro-batches of one rank, followed by empty ones so that all ranks have equally many.

    `cut` makes the micro-batches from the rows of a rank. The collectives of a pass need all ranks, even
    those without completions left.
    """
    each = [cut(rows) for rows in share_rows(length_N, n_ranks)]
    nothing = np.zeros(0, dtype=np.int64)
    return [*each[rank], *[nothing] * (max(map(len, each)) - len(each[rank]))]


def nothing_of(batch: Batch) -> tuple[Batch, np.ndarray]:
    """Return a completion of two tokens with weight 0, for a rank without completions in this pass."""
    # Two tokens, because a pass must read one and does not read the last.
    one = {"weight_NT": np.zeros((1, 2)), "length_N": np.array([2]), "prompt_N": np.array([1])}
    return replace(batch, **one), np.zeros(1, dtype=np.int64)


class StepSums(NamedTuple):
    """Sums over trained tokens, added over micro-batches and ranks; scalars, except for `load`."""

    loss: Tensor
    entropy: Tensor
    ratio: Tensor
    ratio_squared: Tensor
    log_ratio_abs: Tensor
    clipped: Tensor
    """Number of tokens on which a bound of the loss acts."""
    kl: Tensor
    load: Tensor
    """Number of tokens of each expert, layer after layer; empty if the model has no experts."""

    def packed(self) -> Tensor:
        """Return all sums as one tensor in float64, on the CPU."""
        return torch.cat([part.double().reshape(-1) for part in self]).cpu()

    @classmethod
    def unpacked(cls, packed: Tensor) -> StepSums:
        """Return the sums from the tensor that `packed` returned."""
        n_scalars = len(cls._fields) - 1
        scalars = list(packed[:n_scalars])
        return cls(*scalars, load=packed[n_scalars:])


@dataclass(frozen=True)
class StepStats:
    """Statistics of one step over its trained tokens; NaN if the step was skipped."""

    loss: float = math.nan
    grad_norm: float = math.nan
    lr: float = math.nan
    entropy: float = math.nan
    """Mean entropy of the trainer's distribution, nats per token."""
    ratio_mean: float = math.nan
    ratio_max: float = math.nan
    ratio_clipped: float = math.nan
    """Share of tokens on which a bound of the loss on the importance ratio acts."""
    ess: float = math.nan
    """Effective sample size of the importance ratios, (sum rho)^2 / (n sum rho^2), in (0, 1]."""
    logp_shift: float = math.nan
    """Mean |log rho|, nats per token: the distance of trainer and generator, staleness included."""
    kl: float = math.nan
    """Mean divergence from the base model by the recipe's estimator, nats per token; NaN if it is off."""
    router_load_max: float = math.nan
    """Trained tokens of the most loaded expert of a mixture of experts, over those at an even load; the
    largest value of any layer. See `scalerl.rl.model.routing.balance_of`."""
    router_load_entropy: float = math.nan
    """Entropy of the load over experts, over that of an even load, in [0, 1]; the smallest of any layer."""
    flops: float = 0.0
    tokens: int = 0
