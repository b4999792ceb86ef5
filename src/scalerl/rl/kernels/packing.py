"""A micro-batch without padding: every prompt once, then what is read of each completion, one after another.

    token_F     prompt prompt ... completion completion ...

The last token of a completion is predicted and never read; its first is predicted at the end of its prompt.

Shapes in names: M completions, U prompts, T positions, F tokens that are read, R of them at which something
is predicted, W wanted tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Packing:
    """The layout of a micro-batch; all arrays are int64."""

    token_F: np.ndarray
    prompt_start_U: np.ndarray
    """Flat offset of the first token of each prompt."""
    prompt_length_U: np.ndarray
    first_U: np.ndarray
    """The first completion of each prompt; the last entry is the number of completions."""
    start_M: np.ndarray
    """Flat offset of the first token that is read of each completion, in the order of their prompts."""
    length_M: np.ndarray
    """Tokens that are read, 0 or more."""
    needed_R: np.ndarray
    """Flat offsets at which something is predicted, ascending."""
    row_W: np.ndarray
    """For each wanted token, in the order of `wanted_MT`, its index in `needed_R`."""

    @classmethod
    def of(
        cls, token_MT: np.ndarray, wanted_MT: np.ndarray, prompt_M: np.ndarray, group_M: np.ndarray
    ) -> Packing:
        """Pack right-padded sequences, to predict those after the first token that `wanted_MT`, of shape
        (M, T - 1), marks. Those of one group begin with the same `prompt_M` tokens, at least one.
        """
        _, first_U, group_M = np.unique(group_M, return_index=True, return_inverse=True)
        # Where nothing is wanted argmax is 0, and the whole row is read: it costs, and changes nothing.
        read_M = wanted_MT.shape[1] - wanted_MT[:, ::-1].argmax(1)  # up to the last that predicts something
        length_M = np.maximum(read_M - prompt_M, 0)
        order_M = np.argsort(group_M, kind="stable")
        at_T = np.arange(wanted_MT.shape[1])
        prompt_UT = at_T < prompt_M[first_U, None]
        own_MT = (at_T >= prompt_M[:, None]) & (at_T < (prompt_M + length_M)[:, None])
        prompt_U = prompt_M[first_U]
        start_U, start_M = _starts(prompt_U), np.empty_like(length_M)
        start_M[order_M] = prompt_U.sum() + _starts(length_M[order_M])

        m_W, t_W = np.nonzero(wanted_MT)
        own_W = start_M[m_W] + t_W - prompt_M[m_W]
        at_W = np.where(t_W < prompt_M[m_W], start_U[group_M[m_W]] + t_W, own_W)
        # The end of a prompt predicts the first token of each of its completions: one hidden state for all.
        needed_R, row_W = np.unique(at_W, return_inverse=True)
        read_MT = token_MT[:, :-1]
        return cls(
            token_F=np.concatenate([read_MT[first_U][prompt_UT], read_MT[order_M][own_MT[order_M]]]),
            prompt_start_U=start_U,
            prompt_length_U=prompt_U,
            first_U=np.searchsorted(group_M[order_M], np.arange(len(prompt_U) + 1)),
            start_M=start_M[order_M],
            length_M=length_M[order_M],
            needed_R=needed_R,
            row_W=row_W,
        )

    @property
    def longest(self) -> int:
        """Positions of the longest sequence that is read."""
        prompt_M = np.repeat(self.prompt_length_U, np.diff(self.first_U))
        return int((prompt_M + self.length_M).max())


def _starts(length: np.ndarray) -> np.ndarray:
    return np.cumsum(length) - length
