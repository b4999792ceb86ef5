"""The trainer's interface to a vLLM engine: a worker that is started here, or a server over HTTP.

`call` calls one of these by name, in both of them:

    limits                            name of the model, and the most tokens of a prompt and its completion
    tokenize(text)                    the tokens of a text, without special ones
    describe                          the settings that `scalerl.rl.engine.vllm.served.Worker` reports
    cache_bytes                       the size of the KV cache (workers only)
    complete(name, prompt_T, salt, params, extra)    `SampledTokens`; None if it was aborted
    pause, resume                     pause once no step is running; completions and KV cache stay
    install(folder)                   load the safetensors files of a folder; returns `progress`
    progress                          tokens sampled so far of each started completion, by its name
    abort(names)                      abort those of these completions that have arrived
    transfer(method, info)            a method of vLLM's weight transfer
    world_size                        number of GPUs
    check                             return if the engine is healthy
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np

from scalerl.rl.workers.backend import WorkerLostError


class SampledTokens(NamedTuple):
    """A completion: its tokens, their log-probabilities, and the number of prompt tokens that were cached."""

    token_T: np.ndarray
    logp_T: np.ndarray
    cached: int


class VllmClient(ABC):
    """The client of a vLLM engine."""

    name: str
    gpus: tuple[int, ...] = ()
    """The engine's GPUs among those of this process, by their numbers here."""

    # By name, because a worker gets a call as a message, and a server as a request of another name.
    @abstractmethod
    async def call(self, method: str, *arguments: Any, seconds: float) -> Any:
        """Call a method of the engine and return its answer.

        Raises:
            WorkerLostError: the engine does not answer, or not in time.
            WorkerError: its answer shows that a retry is of no use.
        """

    async def is_well(self) -> bool:
        """Return whether the engine answers at all."""
        try:  # a short timeout: a dropped call waits for this, and is sent again only to a healthy server
            await self.call("check", seconds=5.0)
        except WorkerLostError:
            return False
        return True
