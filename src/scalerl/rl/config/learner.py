"""The table `[learner]` of a recipe: memory and speed of the trainer, on one process and on many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scalerl.rl.config.settings import at_least, positive


@dataclass(frozen=True)
class LearnerSettings:
    """How the trainer computes; none of these changes the result but by rounding."""

    activation_checkpointing: bool = False
    """Keep only the inputs of every block for the backward pass: less memory, a third more time."""
    offload_optimiser: bool = False
    """Keep the optimiser's moments in the memory of the CPU, and on the device one tensor's at a time: 8
    bytes less per trained weight, which travel there and back once a step."""
    chunk: int = 1024
    """Tokens whose logits are in memory at once."""
    attention: Literal["auto", "sdpa", "varlen", "flash_attention_2"] = "auto"
    """`sdpa` pads the completions of a micro-batch. The others pack them one after another: `varlen` by
    PyTorch's own kernel, `flash_attention_2` by the package flash_attn. `auto` is `varlen` for bfloat16 on a
    GPU, else `sdpa`; a model whose hidden states packing would change is padded."""
    reduce: Literal["micro_batch", "step"] = "micro_batch"
    """When gradients are reduced over several processes: after every micro-batch, so that each process holds
    its shard of them, or once a step, which holds them whole in float32 meanwhile."""
    tensor_parallel: int = 1
    """Processes that share every matrix product; a divisor of the number of processes."""
    timeout: float = 600.0
    """Seconds that a process waits for another before it ends with an error."""

    def __post_init__(self) -> None:
        at_least(1, chunk=self.chunk, tensor_parallel=self.tensor_parallel)
        positive(timeout=self.timeout)
