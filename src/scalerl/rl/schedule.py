"""Schedules: how far the trainer may be ahead of the weights that sampled a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PipelineRL:
    """Weights are pushed after every trainer step; the trainer's lead over a token is at most `k` steps."""

    kind: Literal["pipeline_rl"] = "pipeline_rl"
    k: int = 8

    def __post_init__(self) -> None:
        if self.k < 0:
            raise ValueError("k must not be negative")

    def tickets(self, prompts: int) -> int:
        """Groups that may be admitted before the weights of their step are installed, at `prompts` a step."""
        return (self.k + 1) * prompts
