"""Averaging: a weight for every token, summing to 1 over the whole batch.

With weights the loss is a plain sum, so gradient accumulation and sharding cannot change it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class PromptAverage:
    """Every prompt counts alike, and within a prompt every token (ScaleRL section 2, arXiv 2510.13786; DAPO's
    group form).

    weight = 1 / (number of groups * sampled tokens of the group's completions)
    """

    kind: Literal["prompt"] = "prompt"

    def __call__(self, length_N: np.ndarray, group_N: np.ndarray) -> np.ndarray:
        """Weight of each token of each completion, shape (N,), from sampled lengths and group numbers."""
        _, index_N = np.unique(group_N, return_inverse=True)
        tokens_per_group = np.bincount(index_N, weights=length_N)
        return 1.0 / (len(tokens_per_group) * tokens_per_group[index_N])
