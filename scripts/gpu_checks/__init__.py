"""The checks of scripts/gpu_check.py, most valuable first.

lab.py        the device, shapes and models of a check; timing
numerics.py   imports; the LM head; the learner's step on the device against the CPU
engine.py     log-probabilities, replay across weight updates, decoding speed
vllm_engine.py  vLLM beside the learner: completions across weight updates in flight, and its speed
training.py   a trainer step, compiled or not: losses, speed, MFU and peak memory
runs.py       `scalerl train` killed and resumed, in one process, under torchrun and under Ray
peers.py      several processes: collectives, a lost peer, memory shared between processes
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


class SkippedError(Exception):
    """Raised, with the reason, by a check that cannot run on this machine."""


@dataclass(frozen=True)
class Check:
    """One check: a function `module.function(lab)` that returns figures, or raises if they are wrong."""

    name: str
    at: str
    seconds: int
    """Time limit, including the start of the process."""
    says: str

    def run(self, lab: Any) -> dict[str, Any]:
        """Run the check in this process; `lab` is a `Lab`."""
        module, function = self.at.split(".")
        return getattr(importlib.import_module(f"gpu_checks.{module}"), function)(lab)


CHECKS = (
    Check("imports", "numerics.imports", 90, "versions of what is installed, and the device"),
    Check("head", "numerics.head", 60, "log-probabilities of the LM head in FP32 against float64 on the CPU"),
    Check("logps", "engine.logps", 90, "recorded log-probabilities against a whole forward pass"),
    Check("replay", "engine.replay_updates", 90, "completions across weight updates, replayed by version"),
    Check("learner", "numerics.learner", 60, "steps on the device against the same steps on the CPU"),
    Check(
        "train", "training.step", 360, "a step of the 0.6B shape, compiled or not: losses, MFU, peak memory"
    ),
    Check(
        "decode", "engine.decode", 150, "tokens/s at 16 and 64 slots, 512 and 4,096 tokens, against the floor"
    ),
    Check("vllm", "vllm_engine.updates_in_flight", 240, "vLLM beside the learner, updates in flight"),
    Check("vllm_decode", "vllm_engine.decode", 180, "tokens/s of vLLM at 16 and 64 slots, 0.6B shape"),
    Check("run", "runs.killed_and_resumed", 300, "scalerl train: killed, resumed, and equal to a whole run"),
    Check("sharded", "runs.sharded", 240, "the same under torchrun with FSDP2, sharded checkpoints"),
    Check("ray", "runs.under_ray", 240, "roles as Ray actors with fractions of a GPU"),
    Check("ray_vllm", "runs.vllm_under_ray", 210, "three steps with vLLM placed by Ray on the learner's GPU"),
    Check("ipc", "peers.shared_memory", 90, "a tensor of one process read by another, on the device"),
    Check(
        "lost",
        "peers.lost_peer",
        150,
        "a weight broadcast whose receiver is killed costs an error, and not the sender",
    ),
    Check("peers", "peers.collectives", 120, "broadcast and all-reduce between two devices"),
)
