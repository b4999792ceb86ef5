"""Averaging: a weight for every token, so that the loss is a plain sum over the batch.

So gradient accumulation and sharding cannot change the result. The weights of all tokens sum to 1, except for
`ConstantAverage`, where they sum to the mean length of a completion divided by that constant.

Shapes in names: N completions. `length_N` counts sampled tokens; `group_N` is the number of each one's group.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np


class Averaging(Protocol):
    """Return the weight of a token of each completion, (N,), from sampled lengths and group numbers."""

    def __call__(self, length_N: np.ndarray, group_N: np.ndarray, budget: int) -> np.ndarray:
        """Return the weights; `budget` is the most tokens a completion may sample (thinking plus answer)."""
        ...


@dataclass(frozen=True)
class PromptAverage:
    """Every prompt counts alike, and within a prompt every token (ScaleRL section 2, arXiv 2510.13786).

    weight = 1 / (number of groups * sampled tokens of the group's completions)
    """

    kind: Literal["prompt"] = "prompt"

    def __call__(self, length_N: np.ndarray, group_N: np.ndarray, budget: int) -> np.ndarray:
        """See `Averaging`."""
        _, index_N = np.unique(group_N, return_inverse=True)
        tokens_per_group = np.bincount(index_N, weights=length_N)
        return 1.0 / (len(tokens_per_group) * tokens_per_group[index_N])


@dataclass(frozen=True)
class SampleAverage:
    """Every completion counts alike, and within it every token (GRPO, arXiv 2402.03300, eq. 3).

    weight = 1 / (number of completions * sampled tokens of the completion)
    """

    kind: Literal["sample"] = "sample"

    def __call__(self, length_N: np.ndarray, group_N: np.ndarray, budget: int) -> np.ndarray:
        """See `Averaging`."""
        return 1.0 / (len(length_N) * length_N)


@dataclass(frozen=True)
class TokenAverage:
    """Every token of the batch counts alike (the code of DAPO, arXiv 2503.14476).

    weight = 1 / (sampled tokens of the batch)
    """

    kind: Literal["token"] = "token"

    def __call__(self, length_N: np.ndarray, group_N: np.ndarray, budget: int) -> np.ndarray:
        """See `Averaging`."""
        return np.full(len(length_N), 1.0 / length_N.sum())


@dataclass(frozen=True)
class ConstantAverage:
    """Divide by a constant, so that no weight depends on a completion's length (Dr. GRPO, arXiv 2503.20783).

    weight = 1 / (number of completions * length), with `length` the whole budget of a completion unless given
    """

    length: int = 0
    """Divisor in tokens; 0 stands for the whole budget."""
    kind: Literal["constant"] = "constant"

    def __post_init__(self) -> None:
        if self.length < 0:
            raise ValueError("length must not be negative")

    def __call__(self, length_N: np.ndarray, group_N: np.ndarray, budget: int) -> np.ndarray:
        """See `Averaging`."""
        # The budget, not the longest completion: no token's weight may depend on another completion's length.
        return np.full(len(length_N), 1.0 / (len(length_N) * (self.length or budget)))


AnyAveraging = PromptAverage | SampleAverage | TokenAverage | ConstantAverage
"""The ways of averaging that a recipe can name."""
