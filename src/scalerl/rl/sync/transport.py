"""What brings weights from the learner to rollout workers, on one machine or on a cluster."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from scalerl.rl.types import Weights


class WeightTransport(ABC):
    """Brings weights from the learner to rollout workers.

    By default workers read the weights by themselves, and messages only wake them.
    """

    @abstractmethod
    def publish(self, weights: Weights, version: int) -> None:
        """Make these the latest weights."""

    def for_one(self) -> Any:
        """Return the message to one worker, which fetches the latest weights by itself."""
        return None

    def for_all(self, receivers: Sequence[int], version: int) -> Sequence[Any]:
        """Return the message to each of all workers, which have numbers that are never used again."""
        return [self.for_one() for _ in receivers]

    def failed(self) -> None:  # noqa: B027
        """Note that a worker did not receive the weights."""

    def close(self) -> None:  # noqa: B027
        """Free what is held."""
