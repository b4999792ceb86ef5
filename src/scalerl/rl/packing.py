"""A micro-batch without padding: every prompt once, then what is read of each completion, one after another.

    token_F     prompt prompt ... completion completion ...      (the shortest completion first)

All that works token by token (norms, matrix products) runs over these F tokens. Attention runs in buckets of
completions of about one length: `gather` spreads queries, keys and values out to them, the keys of a prompt
to every completion of its group, and `scatter` brings gradients back. The last token of a completion is
predicted and never read; its first is predicted at the end of its prompt.

Shapes in names: M completions, U prompts, T positions, F tokens that are read, R of them at which something
is predicted, W wanted tokens, H query heads, J key and value heads (X = H + 2 J in all), B sequences of a
bucket, C positions of the longest of them, P of the longest prompt, K keys of a bucket (P + C, or P in that of
the prompts), G rows that are gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

BUCKET = 16
"""Completions whose attention is computed together: fewer pad less, more have less overhead."""


@dataclass(frozen=True)
class Bucket:
    """Some sequences of about one length, and the places of theirs among the rows that are gathered."""

    n: int
    length: int
    queries: slice
    """Rows of shape (B, H, C)."""
    keys: slice
    """Rows of shape (B, J, K)."""
    values: slice
    bias_BCK: Tensor
    """0 where a token attends, -inf elsewhere. B may be 1: the same for all."""


@dataclass(frozen=True)
class Packing:
    """Where everything of a micro-batch stands. A row is one head of one token."""

    token_F: Tensor
    position_F: Tensor
    needed_R: Tensor
    """Tokens at which something is predicted, ascending."""
    row_W: Tensor
    """For each wanted token, in the order of `wanted_MT`, its place in `needed_R`."""
    target_W: Tensor
    buckets: tuple[Bucket, ...]
    """The prompts first, then completions."""
    gather_G: Tensor
    """For each gathered row its row among F x X; padding takes any."""
    scatter_FX: Tensor
    """For each row of F x X where it was gathered to; for a prompt's, in the bucket of the prompts."""
    out_G: Tensor
    """For each gathered query its row among F x H, F H and above at padding."""
    reread_2MJP: Tensor
    """Where the keys and values of its prompt were gathered to for each completion that reads tokens."""
    group_UM: Tensor
    """1 where such a completion is of that prompt."""
    prompt_place_F: Tensor
    """For the tokens of prompts, their place in (U, P)."""

    @classmethod
    def of(
        cls,
        token_MT: np.ndarray,
        wanted_MT: np.ndarray,
        prompt_M: np.ndarray,
        group_M: np.ndarray,
        heads: tuple[int, int],
        device: torch.device | None = None,
    ) -> Packing:
        """Pack right-padded sequences, of which the log-probability of `wanted_MT` (after the first token) is
        asked for. Sequences of one group begin with the same `prompt_M` tokens, of which there is at least
        1. `heads` are H and J.
        """
        _, first_U, group_M = np.unique(group_M, return_index=True, return_inverse=True)
        read_M = wanted_MT.shape[1] - wanted_MT[:, ::-1].argmax(1)  # up to the last that predicts something
        own_M = np.maximum(read_M - prompt_M, 0)
        order_M = np.argsort(own_M, kind="stable")
        at_T = np.arange(wanted_MT.shape[1])
        prompt_UT = at_T < prompt_M[first_U, None]
        own_MT = (at_T >= prompt_M[order_M, None]) & (at_T < (prompt_M + own_M)[order_M, None])
        token_F = np.concatenate([token_MT[first_U, :-1][prompt_UT], token_MT[order_M, :-1][own_MT]])
        position_F = np.concatenate([np.nonzero(prompt_UT)[1], np.nonzero(own_MT)[1]])

        prompt_U = prompt_M[first_U]
        start_U, start_M = _starts(prompt_U), np.empty_like(own_M)
        start_M[order_M] = prompt_U.sum() + _starts(own_M[order_M])
        m_W, t_W = np.nonzero(wanted_MT)
        shared_W = t_W < prompt_M[m_W]
        at_W = np.where(shared_W, start_U[group_M[m_W]] + t_W, start_M[m_W] + t_W - prompt_M[m_W])
        needed_R, row_W = np.unique(at_W, return_inverse=True)

        readers = order_M[own_M[order_M] > 0]
        spread = _Spread(heads, len(token_F), start_U, prompt_U)
        for n in range(0, len(readers), BUCKET):
            rows = readers[n : n + BUCKET]
            spread.add(start_M[rows], own_M[rows], group_M[rows])
        parts = spread.finish(device)

        def to(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device)

        group_UM = (group_M[readers] == np.arange(len(prompt_U))[:, None]).astype(np.float32)
        inside_UP = np.arange(prompt_U.max()) < prompt_U[:, None]
        return cls(
            to(token_F),
            to(position_F),
            to(needed_R),
            to(row_W),
            to(token_MT[:, 1:][wanted_MT]),
            *parts,
            to(group_UM),
            to(np.flatnonzero(inside_UP)),
        )


class _Spread:
    """Collects the rows of attention, bucket by bucket. Rows of queries, keys and values are numbered apart,
    until `finish` puts them after one another."""

    def __init__(
        self, heads: tuple[int, int], n_tokens: int, start_U: np.ndarray, prompt_U: np.ndarray
    ) -> None:
        self.n_heads, self.n_kv = heads
        self.width = self.n_heads + 2 * self.n_kv
        self.n_tokens = n_tokens
        self.n_queries = self.n_keys = 0
        self.token_BP = _padded(start_U, prompt_U)
        self.shapes: list[tuple[int, int, slice, slice, np.ndarray]] = []
        self.query_rows: list[np.ndarray] = []
        self.key_rows: list[np.ndarray] = []
        self.out_rows: list[np.ndarray] = []
        self.reread: list[np.ndarray] = []
        self.query_of_FH = np.empty((n_tokens, self.n_heads), dtype=np.int64)
        self.key_of_FJ = np.empty((n_tokens, self.n_kv), dtype=np.int64)
        self.add(start_U, prompt_U, None)

    def add(self, start_B: np.ndarray, length_B: np.ndarray, prompt_B: np.ndarray | None) -> None:
        """Sequences that are `length_B` tokens from `start_B` on, and read the prompts `prompt_B`."""
        token_BC = _padded(start_B, length_B)
        n, length = token_BC.shape
        real_BC = token_BC < PADDING
        before_BP = self.token_BP[prompt_B] if prompt_B is not None else self.token_BP[:n, :0]
        if (before_BP < PADDING).all():  # then the mask is the same for all
            before_BP = before_BP[:, :]
        token_BK = np.concatenate([before_BP, token_BC], axis=1)
        n_keys = token_BK.shape[1]
        queries = slice(self.n_queries, self.n_queries + n * self.n_heads * length)
        keys = slice(self.n_keys, self.n_keys + n * self.n_kv * n_keys)
        self.n_queries, self.n_keys = queries.stop, keys.stop

        head_H1, head_J1 = np.arange(self.n_heads)[:, None], np.arange(self.n_kv)[:, None]
        first_BK = np.where(token_BK < PADDING, token_BK, 0) * self.width
        first_BC = first_BK[:, n_keys - length :]
        self.query_rows.append((first_BC[:, None] + head_H1).ravel())
        self.key_rows.append((first_BK[:, None] + self.n_heads + head_J1).ravel())
        out_BC = np.where(real_BC, token_BC, self.n_tokens)
        self.out_rows.append((out_BC[:, None] * self.n_heads + head_H1).ravel())

        query_BCH = np.arange(queries.start, queries.stop).reshape(n, -1, length).swapaxes(1, 2)
        key_BJK = np.arange(keys.start, keys.stop).reshape(n, -1, n_keys)
        self.query_of_FH[token_BC[real_BC]] = query_BCH[real_BC]
        self.key_of_FJ[token_BC[real_BC]] = key_BJK[:, :, n_keys - length :].swapaxes(1, 2)[real_BC]
        if prompt_B is not None:
            self.reread.append(key_BJK[:, :, : n_keys - length])
        at_C = np.arange(length)
        own_BCC = np.broadcast_to(at_C <= at_C[:, None], (n, length, length))
        before_BCP = np.broadcast_to((before_BP < PADDING)[:, None], (n, length, n_keys - length))
        allowed_BCK = np.concatenate([before_BCP, own_BCC], axis=2)
        if (before_BP < PADDING).all():
            allowed_BCK = allowed_BCK[:1]
        bias_BCK = np.where(allowed_BCK, np.float32(0), np.float32(-np.inf))
        self.shapes.append((n, length, queries, keys, bias_BCK))

    def finish(
        self, device: torch.device | None
    ) -> tuple[tuple[Bucket, ...], Tensor, Tensor, Tensor, Tensor]:
        """Buckets, `gather_G`, `scatter_FX`, `out_G` and `reread_2MJP` of a packing."""
        key_rows = np.concatenate(self.key_rows)
        gather_G = np.concatenate([*self.query_rows, key_rows, key_rows + self.n_kv])
        key_of_FJ, values = self.key_of_FJ + self.n_queries, self.n_keys
        scatter_FX = np.concatenate([self.query_of_FH, key_of_FJ, key_of_FJ + values], axis=1)
        empty = np.zeros((0, self.n_kv, self.token_BP.shape[1]), dtype=np.int64)
        reread_MJP = np.concatenate([empty, *self.reread]) + self.n_queries

        def shifted(rows: slice, by: int) -> slice:
            return slice(rows.start + by, rows.stop + by)

        def to(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device)

        buckets = tuple(
            Bucket(
                n,
                length,
                queries,
                shifted(keys, self.n_queries),
                shifted(keys, self.n_queries + values),
                to(bias_BCK),
            )
            for n, length, queries, keys, bias_BCK in self.shapes
        )
        return (
            buckets,
            to(gather_G),
            to(scatter_FX.ravel()),
            to(np.concatenate(self.out_rows)),
            to(np.stack([reread_MJP, reread_MJP + values])),
        )


PADDING = np.iinfo(np.int64).max


def _padded(start_B: np.ndarray, length_B: np.ndarray) -> np.ndarray:
    """The tokens of each sequence, padded to the longest with PADDING."""
    at_C = np.arange(length_B.max())
    return np.where(at_C < length_B[:, None], start_B[:, None] + at_C, PADDING)


def _starts(length: np.ndarray) -> np.ndarray:
    return np.cumsum(length) - length
