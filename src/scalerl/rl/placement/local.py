"""The placement `local`: rollout workers in processes of their own, beside the learner in this one.

Weights go through shared memory, which every process reads between two decode steps.
"""

import atexit
from collections.abc import Sequence

from scalerl.rl.config.recipe import Recipe
from scalerl.rl.placement.rollouts import RolloutPool, RolloutWorker, WeightTransport
from scalerl.rl.sync.shared_weights import SharedWeights
from scalerl.rl.types import Weights
from scalerl.rl.workers.processes import Processes


class LocalGenerator(RolloutPool):
    """Generators in `n_processes` processes, `recipe.decode_slots` each."""

    def __init__(
        self,
        recipe: Recipe,
        model_folder: str,
        weights: Weights,
        n_processes: int = 1,
        version: int = 0,
        devices: Sequence[str] = (),
    ) -> None:
        """`devices` are the GPUs of the processes, by their names in CUDA_VISIBLE_DEVICES."""
        shared = SharedWeights(weights, version)
        limits = recipe.timeouts
        workers = [
            RolloutWorker(f"generator {i}", i, limits.generator, limits.start) for i in range(n_processes)
        ]
        # Python ends its children by SIGTERM at its exit, which these do not answer.
        self._at_exit = atexit.register(self.kill)
        arguments = recipe.without_prompts(), model_folder
        processes = Processes(shared, devices=devices)
        super().__init__(workers, processes, arguments, InSharedMemory(shared), weights, version)

    def close(self) -> None:
        """See `RolloutPool.close`."""
        super().close()
        atexit.unregister(self._at_exit)


class InSharedMemory(WeightTransport):
    """Memory that is freed with the last process that has it."""

    def __init__(self, shared: SharedWeights) -> None:
        self._shared = shared

    def publish(self, weights: Weights, version: int) -> None:
        """Write the weights, unless they are there."""
        if version != self._shared.version:
            self._shared.write(weights, version)
