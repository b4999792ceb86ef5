"""An engine of vLLM as the trainer sees it: a worker that is started here, or a server over HTTP.

`call` has one of these done, by name, in both of them:

    limits                            name of its model, and the most tokens of a prompt and its completion
    tokenize(text)                    its tokens, without special ones
    describe                          what `scalerl.rl.engine.vllm.served.Worker` says of its settings
    complete(name, prompt_T, salt, params, extra)    `SampledTokens`; None where it was aborted
    pause, resume                     pause once no step is under way; completions and KV cache stay
    install(folder)                   load the safetensors files of a folder; returns `progress`
    progress                          tokens sampled so far of each completion that has begun, by its name
    abort(names)                      end completions, as far as they have arrived
    transfer(method, info)            a method of vLLM's weight transfer
    world_size                        its GPUs
    check                             returns if it is well
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class ServerLostError(Exception):
    """The engine does not answer any more: it is to be started again, or waited for."""


class SampledTokens(NamedTuple):
    """A completion: its tokens, their log-probabilities, and the prompt's tokens that were in a cache."""

    token_T: np.ndarray
    logp_T: np.ndarray
    cached: int


class VllmClient(ABC):
    """An engine of vLLM."""

    name: str
    pid: int | None = None
    """Its process, where it was started here and has not exited."""
    log: Path | None = None
    """Its log, where it was started here."""
    gpus: tuple[int, ...] = ()
    """The GPUs that it has of those of this process, by their numbers here."""

    @abstractmethod
    async def reach(self, seconds: float) -> None:
        """Start it, or wait until it answers.

        Raises:
            ServerLostError: it does not within `seconds`.
        """

    # By name, as a worker gets a call as a message, and a server as a request of another name.
    @abstractmethod
    async def call(self, method: str, *arguments: Any, seconds: float) -> Any:
        """Have something done, and return the answer.

        Raises:
            ServerLostError: it does not answer, or not in time.
            WorkerError: its answer shows that a retry is of no use.
        """

    async def is_well(self) -> bool:
        """Return whether it answers at all."""
        try:  # soon: a call that was dropped is sent again only to a server that is well
            await self.call("check", seconds=5.0)
        except ServerLostError:
            return False
        return True

    def exit_reason(self) -> str:
        """Return why a process that was started here has exited."""
        return ""

    def kill(self) -> None:  # noqa: B027
        """Kill its processes, where they were started here."""

    @abstractmethod
    async def close(self) -> None:
        """Stop it, where it was started here; else drop the connections."""
