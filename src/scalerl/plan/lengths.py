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
    """Tokens that are decoded for a completion: log-normal by `mean` and `p95` before the recipe's cut, or
    as measured, by `quantiles` at even shares from 0 to 1, in which the cut is already."""

    mean: float = 0.0
    p95: float = 0.0
    quantiles: tuple[float, ...] = ()
    within: float = 1.0
    """Share of the spread that is between completions of one prompt; the rest is between prompts."""
    answer: int = 0
    """Tokens of an answer after an interruption."""
    prompt: int = 0
    """Tokens of a prompt."""

    def __post_init__(self) -> None:
        if min(self.answer, self.prompt) < 0 or not 0 <= self.within <= 1:
            raise ValueError("answer and prompt must not be negative, and within must be a share")
        if self.quantiles:
            steps = np.diff(self.quantiles)
            if not len(steps) or (steps < 0).any() or not 0 < self.quantiles[-1] < math.inf:
                raise ValueError("quantiles must be two or more, rising, and end above 0")
        elif not 0 < self.mean <= self.p95 <= self.mean * math.exp(_P95**2 / 2):
            raise ValueError("give quantiles; or a mean above 0, and a p95 between it and 3.87 times it")

    def draw(self, rng: np.random.Generator, n_groups: int, samples: int, cut: Truncation) -> np.ndarray:
        """Lengths of the completions of some groups, 1 or more: (B, G)."""
        prompt_B1 = rng.standard_normal((n_groups, 1))
        z_BG = math.sqrt(1 - self.within) * prompt_B1
        z_BG = z_BG + math.sqrt(self.within) * rng.standard_normal((n_groups, samples))
        if self.quantiles:
            rank_BG = z_BG.ravel().argsort().argsort().reshape(z_BG.shape)
            share_BG = (rank_BG + 0.5) / z_BG.size
            length_BG = np.interp(share_BG, np.linspace(0, 1, len(self.quantiles)), self.quantiles)
            return np.clip(np.rint(length_BG), 1, cut.longest).astype(np.int64)
        return self._cut(np.exp(self._mu + self._sigma * z_BG), rng, cut)

    @property
    def _sigma(self) -> float:
        """From ln(p95 / mean) = 1.645 sigma - sigma^2 / 2."""
        return _P95 - math.sqrt(max(_P95**2 - 2 * math.log(self.p95 / self.mean), 0.0))

    @property
    def _mu(self) -> float:
        return math.log(self.mean) - self._sigma**2 / 2

    def _cut(self, length_BG: np.ndarray, rng: np.random.Generator, cut: Truncation) -> np.ndarray:
        if cut.interrupt is not None:
            low, high = cut.interrupt
            at_BG = rng.integers(low, high + 1, length_BG.shape)
            after = cut.phrase + self.answer
            length_BG = np.where(length_BG > at_BG, at_BG + after, length_BG)
        return np.clip(np.rint(length_BG), 1, cut.longest).astype(np.int64)
