"""How many tokens the completions have.

Shapes in names: B groups, G completions of a group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

_P95 = 1.6448536269514722
"""The 95th percentile of the standard normal distribution."""


@dataclass(frozen=True)
class Truncation:
    """Where a recipe ends completions: none is longer than `longest`.

    With an `interrupt`, thinking is ended at a length drawn uniformly between its two ends, and `phrase` and
    answer follow.
    """

    longest: int
    interrupt: tuple[int, int] | None = None
    phrase: int = 0


@dataclass(frozen=True)
class Lengths:
    """Tokens that are decoded for a completion: log-normal by `mean` and `p95`, before the recipe's cut."""

    mean: float
    p95: float
    within: float = 1.0
    """Share of the spread that is between completions of one prompt; the rest is between prompts."""
    answer: int = 0
    """Tokens of an answer after an interruption."""
    prompt: int = 0
    """Tokens of a prompt."""

    def __post_init__(self) -> None:
        if min(self.answer, self.prompt) < 0 or not 0 <= self.within <= 1:
            raise ValueError("answer and prompt must not be negative, and within must be a share")
        if not 0 < self.mean <= self.p95 <= self.mean * math.exp(_P95**2 / 2):
            raise ValueError("mean must be above 0, and p95 between it and 3.87 times it")

    def draw(self, rng: np.random.Generator, n_groups: int, samples: int, cut: Truncation) -> np.ndarray:
        """Lengths of the completions of some groups, 1 or more: (B, G)."""
        z_BG = math.sqrt(1 - self.within) * rng.standard_normal((n_groups, 1))
        z_BG = z_BG + math.sqrt(self.within) * rng.standard_normal((n_groups, samples))
        # From ln(p95 / mean) = 1.645 sigma - sigma^2 / 2.
        sigma = _P95 - math.sqrt(max(_P95**2 - 2 * math.log(self.p95 / self.mean), 0.0))
        length_BG = np.exp(math.log(self.mean) - sigma**2 / 2 + sigma * z_BG)
        if cut.interrupt is not None:
            low, high = cut.interrupt
            at_BG = rng.integers(low, high + 1, length_BG.shape)
            length_BG = np.where(length_BG > at_BG, at_BG + cut.phrase + self.answer, length_BG)
        return np.clip(np.rint(length_BG), 1, cut.longest).astype(np.int64)
