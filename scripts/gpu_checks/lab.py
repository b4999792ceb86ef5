"""Device, shapes and models of a check; how things are timed."""

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
    """Where a check runs, and how large it is."""

    device: torch.device
    tiny: bool
    folder: Path
    """Empty, and removed afterwards."""

    @classmethod
    def of(cls, tiny: bool, folder: Path) -> Lab:
        """Return the first GPU, or with `tiny` whatever there is."""
        torch.set_num_threads(2)
        return cls(compute_device(), tiny, folder)

    def size(self, real: int, tiny: int) -> int:
        """Return a size: of the real check, or of the tiny one."""
        return tiny if self.tiny else real

    def model(
        self,
        dtype: torch.dtype = torch.bfloat16,
        small: bool = False,
        tied: bool = False,
        spread: float = 2.0,
    ) -> Any:
        """Return a model of the Qwen3-0.6B shape with random weights; `small` is of no size at all.

        `spread` is the standard deviation of its logits.

        `tied` is Qwen3's own choice, for speed and memory. Random weights then repeat the last token, at this
        spread with a probability of one, which says nothing about log-probabilities: those are checked
        untied, or at a small spread.
        """
        shape = TINY if self.tiny or small else QWEN3_06B
        more = {"tie_word_embeddings": tied, "max_position_embeddings": 8192}
        return random_qwen3(dtype, self.device, spread, **shape, **more)

    def seconds(self, run: Callable[[], Any]) -> float:
        """Return the seconds of one run, until the device is done."""
        self.wait()
        started = time.perf_counter()
        run()
        self.wait()
        return time.perf_counter() - started

    def best_seconds(self, run: Callable[[], Any], times: int = 5) -> float:
        """Return the seconds of the fastest of some runs, after two to warm up."""
        for _ in range(2):
            run()
        return min(self.seconds(run) for _ in range(times))

    def wait(self) -> None:
        """Return when the device has nothing left to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak_gib(self) -> float | None:
        """Return the largest memory that tensors took since `forget_peak`; None without a GPU."""
        if self.device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self.device) / 2**30

    def forget_peak(self) -> None:
        """Begin to measure the peak anew."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def bytes_per_second(self) -> float:
        """Return the rate of a large copy, bytes read and written."""
        n = self.size(2**30, 2**20)
        source, target = (torch.empty(n, dtype=torch.uint8, device=self.device) for _ in range(2))
        return 2 * n / self.best_seconds(lambda: target.copy_(source))

    def flops_per_second(self) -> float:
        """Return the rate of a large bf16 matrix product, which an MFU is a share of."""
        d = self.size(8192, 256)
        a, b = (torch.randn(d, d, dtype=torch.bfloat16, device=self.device) for _ in range(2))
        return 2 * d**3 / self.best_seconds(lambda: a @ b)


def within(figures: dict[str, Any], **limits: float) -> dict[str, Any]:
    """Return `figures`, each of `limits` checked to be finite and at most that.

    Raises:
        AssertionError: one is not; the message has all figures.
    """
    for name, limit in limits.items():
        if not (np.isfinite(figures[name]) and figures[name] <= limit):
            raise AssertionError(f"{name} is {figures[name]}, at most {limit} is allowed; {figures}")
    return figures
