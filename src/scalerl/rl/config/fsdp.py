"""What a recipe may say of a learner that is sharded over processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scalerl.rl.config.bounds import positive


@dataclass(frozen=True)
class Fsdp2:
    """The learner sharded by PyTorch FSDP2: parameters, gradients and the optimiser's moments.

    None of these changes the result but by rounding.
    """

    micro_tokens: int = 0
    """Tokens of a forward pass of one process, at least one completion; 0 is `batch.micro` completions."""
    chunk: int = 1024
    """Tokens whose logits are in memory at once."""
    packed: bool = True
    """Completions of a pass one after another instead of padded, where the model's attention can keep them
    apart."""
    attention: Literal["sdpa", "flash_attention_2"] = "sdpa"
    """The model's attention; packed completions cost the square of a pass without flash attention."""
    sync: Literal["step", "pass"] = "step"
    """When gradients are reduced over the processes: once a step, which holds them whole meanwhile, or after
    every pass."""
    tensor_parallel: int = 1
    """Processes that share every matrix product; a divisor of the number of processes."""
    timeout: float = 600.0
    """Seconds that a process waits for another before it ends with an error."""
    kind: Literal["fsdp2"] = "fsdp2"

    def __post_init__(self) -> None:
        if self.micro_tokens < 0:
            raise ValueError("micro_tokens must not be negative")
        if self.chunk < 1 or self.tensor_parallel < 1:
            raise ValueError("chunk and tensor_parallel must be at least 1")
        positive(timeout=self.timeout)
