"""Advantages: from the rewards of verified groups to one number per completion.

The order is fixed. It is stated here because trainers differ in it (docs/reference/definitions.md):
1. truncated completions leave their group, before the mean (unless the recipe keeps them);
2. A_i = r_i - mean of the rewards that are left in the group;
3. groups whose rewards are all the same (zero variance) are dropped, or kept at A = 0;
4. the advantages are scaled, each choice below in its own way.

Shapes in names: G completions of one group, N completions of the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np


class Advantage(Protocol):
    """Turn the centred rewards of each group into its advantages."""

    def __call__(self, centred: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Scale one array (G,) per group, exactly 0 for a group without signal; return the same shapes."""
        ...


@dataclass(frozen=True)
class BatchStd:
    """A_i / std over the batch (ScaleRL section 2, arXiv 2510.13786; after REINFORCE++, arXiv 2501.03262).

    The std is the population form (divided by n) over the advantages of all completions that enter the loss.
    Their mean is zero by construction in every group.
    """

    kind: Literal["batch_std"] = "batch_std"

    def __call__(self, centred: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Scale the centred rewards of each group; an all-zero batch stays zero."""
        # One scale for all: with a scale per group, nearly solved groups would weigh most.
        std = float(np.concatenate(centred).std()) if centred else 0.0
        return [a_G / std if std > 0 else a_G for a_G in centred]


@dataclass(frozen=True)
class PromptStd:
    """A_i / std over the group (GRPO, arXiv 2402.03300, section 4.1.2): population form, no epsilon."""

    kind: Literal["prompt_std"] = "prompt_std"

    def __call__(self, centred: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Scale each group by its own std; an all-zero group stays zero."""
        # No epsilon, as `centre` makes groups without signal exactly 0: any other std is signal.
        return [a_G / std if (std := float(a_G.std())) > 0 else a_G for a_G in centred]


@dataclass(frozen=True)
class NoStd:
    """A_i unscaled (Dr. GRPO, arXiv 2503.20783)."""

    kind: Literal["none"] = "none"

    def __call__(self, centred: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the centred rewards unchanged."""
        return list(centred)


@dataclass(frozen=True)
class LeaveOneOut:
    """r_i minus the mean of the *others* in its group (RLOO, arXiv 2402.14740), unscaled.

    This equals A_i G / (G - 1). A completion's baseline then does not depend on the completion itself.
    """

    kind: Literal["leave_one_out"] = "leave_one_out"

    def __call__(self, centred: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Scale the centred rewards by G / (G - 1); a group of one has no others, and stays zero."""
        return [a_G * (len(a_G) / max(len(a_G) - 1, 1)) for a_G in centred]


AnyAdvantage = BatchStd | PromptStd | NoStd | LeaveOneOut
"""The advantages that a recipe can name."""

_NOISE = 8 * np.finfo(float).eps  # relative to the largest reward: .1 + .2 and .3 are the same reward


def centre(reward_G: np.ndarray) -> np.ndarray:
    """Return rewards minus the mean of their group; exactly 0 if the group has no signal."""
    return reward_G - reward_G.mean() if has_signal(reward_G) else np.zeros(len(reward_G))


def has_signal(reward_G: np.ndarray) -> bool:
    """Whether the rewards differ by more than rounding errors.

    It compares the largest with the smallest, as the std of equal rewards such as .1 is not always 0.
    """
    if len(reward_G) < 2:
        return False
    return bool(np.ptp(reward_G) > _NOISE * np.abs(reward_G).max())
