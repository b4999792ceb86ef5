"""The recipe's table `lora`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters (arXiv 2106.09685) on every linear layer but the head; off at rank 0.

    An adapter adds alpha / rank * B A to a weight, B being 0 at first. No dropout: the trainer's
    log-probabilities must be those of the weights that are published.
    """

    rank: int = 0
    alpha: int = 32

    def __post_init__(self) -> None:
        if self.rank < 0 or not self.alpha > 0:
            raise ValueError("rank must not be negative, and alpha must be positive")
