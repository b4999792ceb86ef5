"""Schedules: how far the trainer may be ahead of the weights that sampled a token.

A schedule has three rules, for `prompts` groups per trainer step: how many groups may be in flight, counted
until all generators have the weights of their step (`scalerl.rl.loop.admission`), how many groups the trainer
waits for at once, and after which steps the weights are published.
"""

from dataclasses import dataclass
from typing import Literal

MOST_STALE = 1000
"""The largest k, as about k batches are admitted, and held, at once."""


@dataclass(frozen=True)
class PipelineRL:
    """Push weights after every trainer step; the trainer is at most `k` steps ahead of a token's weights.

    PipelineRL, arXiv 2509.19128; k as in arXiv 2510.13786. k = 0 is on-policy.
    """

    k: int = 8
    kind: Literal["pipeline_rl"] = "pipeline_rl"

    def __post_init__(self) -> None:
        if not 0 <= self.k <= MOST_STALE:
            raise ValueError(f"k must be between 0 and {MOST_STALE}")

    def in_flight_limit(self, prompts: int) -> int:
        """Return how many groups may be admitted before all generators have the weights of their step."""
        return (self.k + 1) * prompts

    def at_once(self, prompts: int) -> int:
        """Return how many groups the trainer waits for before it trains."""
        return prompts

    def publishes(self, version: int) -> bool:
        """Whether the weights of `version` go to the generators."""
        return True

    @property
    def max_staleness(self) -> int:
        """The largest staleness that a trained token can have, in versions."""
        return self.k


@dataclass(frozen=True)
class OffPolicy:
    """Generate `k` batches, then make `k` updates with them: PPO-off-policy-k of arXiv 2510.13786.

    Generator and trainer take turns. The weights at the start of a phase sample all of it, so that the
    largest staleness is k - 1; k = 1 is on-policy.
    """

    k: int = 8
    kind: Literal["off_policy"] = "off_policy"

    def __post_init__(self) -> None:
        if not 1 <= self.k <= MOST_STALE:
            raise ValueError(f"k must be between 1 and {MOST_STALE}")

    def in_flight_limit(self, prompts: int) -> int:
        """Return how many groups may be admitted before all generators have the weights of their step."""
        return self.k * prompts

    def at_once(self, prompts: int) -> int:
        """Return how many groups the trainer waits for before it trains: those of the whole phase."""
        return self.k * prompts

    def publishes(self, version: int) -> bool:
        """Whether the weights of `version` go to the generators: at the end of a phase."""
        return version % self.k == 0

    @property
    def max_staleness(self) -> int:
        """The largest staleness that a trained token can have, in versions."""
        return self.k - 1


AnySchedule = PipelineRL | OffPolicy
"""The schedules that a recipe can name."""
