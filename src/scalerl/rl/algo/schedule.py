"""Schedules: how far the trainer may be ahead of the weights that sampled a token.

A schedule is three rules, at `prompts` groups a trainer step: how many groups may be in flight, counted until
all generators have the weights of their step (`scalerl.rl.loop.admission`), how many are waited for at once,
and after which steps the weights are published.
"""

from dataclasses import dataclass
from typing import Literal

MOST_STALE = 1000
"""The largest k: so many batches are admitted, and held, at once."""


@dataclass(frozen=True)
class PipelineRL:
    """Weights are pushed after every trainer step; the trainer's lead over a token is at most `k` steps.

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
        """Groups that the trainer waits for before it goes on."""
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

    Generator and trainer take turns. All of a phase is sampled by the weights at its start, so that the
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
        """Groups that the trainer waits for before it goes on: those of the whole phase."""
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
