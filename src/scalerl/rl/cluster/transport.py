"""How weights get from the learner to the generators."""

from __future__ import annotations

from scalerl.rl.cluster.parcel import StoredWeights, store
from scalerl.rl.types import Weights


class ObjectStore:
    """Ray's object store: every generator fetches the weights by itself, when it can."""

    def __init__(self, bucket_mib: float, seconds: float) -> None:
        self._bucket_mib, self._seconds = bucket_mib, seconds

    def publish(self, weights: Weights, version: int) -> StoredWeights:
        """What generators are to be sent, who fetch from it."""
        if isinstance(weights, StoredWeights):
            return weights
        return store(weights.items(), self._bucket_mib, self._seconds)

    def close(self) -> None:
        """Nothing is held."""
