"""Device, shapes and models of a check; timing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from random_model import random_qwen3
from scalerl.rl.model.causal_lm import compute_device

QWEN3_06B = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


@dataclass(frozen=True)
class Lab:
    """Where a check runs and at what size."""

    device: torch.device
    tiny: bool
    folder: Path
    """Scratch folder, empty at the start and removed afterwards."""

    @classmethod
    def of(cls, tiny: bool, folder: Path) -> Lab:
        """Return a lab on this machine's compute device."""
        torch.set_num_threads(2)
        return cls(compute_device(), tiny, folder)

    def size(self, real: int, tiny: int) -> int:
        """Return `tiny` in a tiny check, otherwise `real`."""
        return tiny if self.tiny else real

    def model(
        self,
        dtype: torch.dtype = torch.bfloat16,
        small: bool = False,
        tied: bool = False,
        spread: float = 2.0,
    ) -> Any:
        """Return a model of the Qwen3-0.6B shape with random weights, or of a tiny shape with `small`.

        `spread` is the standard deviation of its logits.

        `tied` embeddings are Qwen3's own choice; use them to measure speed and memory. With random weights
        a tied model repeats the last token, with probability one at the default spread. That says nothing
        about log-probabilities: check those untied or at a small spread.
        """
        shape = TINY if self.tiny or small else QWEN3_06B
        more = {"tie_word_embeddings": tied, "max_position_embeddings": 8192}
        return random_qwen3(dtype, self.device, spread, **shape, **more)

    def seconds(self, run: Callable[[], Any]) -> float:
        """Return the seconds that `run` takes, including its work on the device."""
        self.wait()
        started = time.perf_counter()
        run()
        self.wait()
        return time.perf_counter() - started

    def best_seconds(self, run: Callable[[], Any], times: int = 5) -> float:
        """Return the seconds of the fastest of `times` runs, after two warm-up runs."""
        for _ in range(2):
            run()
        return min(self.seconds(run) for _ in range(times))

    def wait(self) -> None:
        """Wait until the device has finished all its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak_gib(self) -> float | None:
        """Return the peak memory of tensors since `forget_peak`, in GiB; None without a GPU."""
        if self.device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self.device) / 2**30

    def forget_peak(self) -> None:
        """Reset the peak of memory."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def bytes_per_second(self) -> float:
        """Return the rate of a large copy, counting bytes read and bytes written."""
        n = self.size(2**30, 2**20)
        source, target = (torch.empty(n, dtype=torch.uint8, device=self.device) for _ in range(2))
        return 2 * n / self.best_seconds(lambda: target.copy_(source))

    def flops_per_second(self) -> float:
        """Return the rate of a large bf16 matrix product, the denominator of the MFU."""
        d = self.size(8192, 256)
        a, b = (torch.randn(d, d, dtype=torch.bfloat16, device=self.device) for _ in range(2))
        return 2 * d**3 / self.best_seconds(lambda: a @ b)


def within(figures: dict[str, Any], **limits: float) -> dict[str, Any]:
    """Check that every figure in `limits` is finite and at most its limit; return `figures`.

    Raises:
        AssertionError: a figure is not; the message has all figures.
    """
    for name, limit in limits.items():
        if not (np.isfinite(figures[name]) and figures[name] <= limit):
            raise AssertionError(f"{name} is {figures[name]}, at most {limit} is allowed; {figures}")
    return figures
