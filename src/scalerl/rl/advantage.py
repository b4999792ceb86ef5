"""Advantages: from the rewards of verified groups to one number per completion.

The order is fixed, and stated because trainers differ in it (docs/definitions.md):
1. truncated completions leave their group, before the mean;
2. A_i = r_i - mean of the rewards that are left in the group;
3. groups whose rewards are all the same (zero variance) are dropped, or kept at A = 0;
4. the scale: `BatchStd` divides by the standard deviation over the completions that are left.

Shapes in names: G completions of one group, N completions of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class BatchStd:
    """A_i / std over the batch (ScaleRL section 2, arXiv 2510.13786; after REINFORCE++, arXiv 2501.03262).

    The std is the population form (divided by n) over the advantages of all completions that enter the loss;
    their mean is zero by construction, group by group.
    """

    kind: Literal["batch_std"] = "batch_std"

    def __call__(self, centred: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Scale the centred rewards of each group; an all-zero batch stays zero."""
        std = float(np.concatenate(centred).std()) if centred else 0.0
        return [a_G / std if std > 0 else a_G for a_G in centred]


def centre(reward_G: np.ndarray) -> np.ndarray:
    """Rewards less the mean of their group."""
    return reward_G - reward_G.mean()


def has_signal(reward_G: np.ndarray) -> bool:
    """Whether the rewards differ at all: an exact test, safe for any float rewards."""
    return len(reward_G) > 1 and bool(reward_G.max() != reward_G.min())
