"""The cost of a run, the figures of a step, and the fate of every prompt: the lines of steps.jsonl."""

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np

from scalerl.rl.config.devices import HeldDevices
from scalerl.rl.learner.batch import Fate
from scalerl.rl.loop.pipeline import Pipeline, Step
from scalerl.rl.types import Counters

_OF_ROUTERS = ("router_load_max", "router_load_entropy")
_NOT_OF_ALL_STEPS = ("flops", "tokens", *_OF_ROUTERS)


class RunClock:
    """Wall time of training in laps, excluding the time for which the clock was stopped."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def lap(self) -> float:
        """Return the seconds since the last lap, excluding those for which the clock was stopped."""
        before, self._since = self._since, time.perf_counter()
        return self._since - before

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clock within the context, so that its time does not count as training."""
        started = time.perf_counter()
        yield
        self._since += time.perf_counter() - started


@dataclass
class RunCounters:
    """Cumulative counters of a run, resumes included."""

    generators: int = 1
    """Processes that decode."""
    trainers: int = 1
    """Processes that train."""
    held: HeldDevices = field(default_factory=HeldDevices)
    """Devices that one process of each role counts as; every time below but `wall_seconds` and `seen` is in
    device-seconds."""
    apart: bool = False
    """Whether generators have devices of their own rather than take turns with the trainers."""
    generator_seconds: float = 0.0
    """Time for which the decoding devices were held, idle or not, excluding start-up."""
    generator_startup: float = 0.0
    """Start-up of the processes that decode on devices of their own."""
    startup_seconds: float = 0.0
    """Start-up of the processes that train and evaluate."""
    wall_seconds: float = 0.0
    """Wall seconds of training, excluding start-up, the probe, and evaluations that block training."""
    apart_seconds: float = 0.0
    """Time for which GPUs that only evaluations or verifiers use were held."""
    trainer_seconds: float = 0.0
    """Time for which the training devices were held; a resume may change their number."""
    generate_seconds: float = 0.0
    train_seconds: float = 0.0
    evaluate_seconds: float = 0.0
    waited_seconds: float = 0.0
    """Time the trainers spent waiting for generation."""
    seen: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """The generators' last counters: seconds of work, held, and of start-up, summed over processes."""
    generate_flops: float = 0.0
    train_flops: float = 0.0
    generated: int = 0
    trained: int = 0
    samples: int = 0
    prompts: int = 0
    restarted: int = 0
    fates: dict[str, int] = field(default_factory=lambda: dict.fromkeys(get_args(Fate), 0))
    """Number of consumed groups by fate."""

    @property
    def devices(self) -> dict[str, float]:
        """Number of devices that each role holds; generators that take turns with the trainers hold none."""
        generating = self.generators * self.held.generator if self.apart else 0.0
        return {
            "generate": generating,
            "train": self.trainers * self.held.trainer,
            "evaluate": self.held.evaluator,
        }

    @property
    def idle_seconds(self) -> float:
        """Device-seconds without generation or training, including GPUs that neither role holds.

        A process's held time and working time are read at one instant, so that their difference never falls.
        """
        held = self.trainer_seconds + self.apart_seconds + (self.generator_seconds if self.apart else 0.0)
        return held - self.generate_seconds - self.train_seconds

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens per device-second of work; idle time would make the same code look slower."""
        return self.generated / (self.generate_seconds + self.train_seconds)

    def hold(self, generator: Counters, wall_seconds: float) -> None:
        """Add wall time of training and the generator's work in it; `generator` is cumulative."""
        self.wall_seconds += wall_seconds
        # Accumulated per step rather than multiplied at the end: a resume may have other devices.
        self.trainer_seconds += wall_seconds * self.trainers * self.held.trainer
        self.apart_seconds += wall_seconds * self.held.apart
        now = generator.seconds, generator.held, generator.startup
        worked, held, startup = (
            (after - before) * self.held.generator for after, before in zip(now, self.seen, strict=True)
        )
        self.seen = now
        # A generator on its own device is held before and after the trainer's steps and counts that itself;
        # one that takes turns with the trainer is held as long as the trainer.
        self.generator_seconds += held if self.apart else wall_seconds * self.generators
        self.generator_startup += startup if self.apart else 0.0
        self.generate_seconds += worked
        self.generate_flops = generator.flops
        self.generated, self.restarted = generator.tokens, generator.restarted

    def add(self, step: Step, generator: Counters, wall_seconds: float) -> None:
        """Add a step; `generator` is cumulative."""
        self.hold(generator, wall_seconds)
        training = self.trainers * self.held.trainer
        self.train_seconds += step.train_seconds * training
        self.waited_seconds += step.waited_seconds * training
        self.train_flops += step.stats.flops
        self.trained += step.stats.tokens
        # Groups without signal count too: generating them cost compute.
        self.samples += sum(len(group.rollouts) for group in step.groups)
        self.prompts += len(step.groups)
        for fate in step.batch.fates:
            self.fates[fate] += 1

    def add_probe(self, seconds: float) -> None:
        """Add the seconds that all trainers spent on the probe, as evaluation."""
        self.evaluate_seconds += seconds * self.trainers * self.held.trainer

    def add_evaluation(self, seconds: float, startup: float) -> None:
        """Add the seconds of an evaluation and of process start-up since the previous one."""
        self.evaluate_seconds += seconds * self.held.evaluator
        self.startup_seconds += startup * self.held.evaluator

    def json(self) -> dict[str, dict[str, float]]:
        """Return the counters that steps.jsonl and evals.jsonl have in common."""
        return {
            "device_seconds": {
                "generate": self.generate_seconds,
                "train": self.train_seconds,
                "evaluate": self.evaluate_seconds,
                "idle": self.idle_seconds,
                "startup": self.startup_seconds + self.generator_startup,
            },
            "flops": {"generate": self.generate_flops, "train": self.train_flops},
            "tokens": {"generated": self.generated, "trained": self.trained},
        }

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs."""
        # The fates are copied too: a thread writes this state while the counters change.
        return {k: v for k, v in vars(self).items() if k != "held"} | {"fates": dict(self.fates)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, on the devices of this start rather than those of the checkpoint."""
        now = {name: getattr(self, name) for name in ("generators", "trainers", "held", "apart")}
        self.__dict__.update(dict(state) | now)
        self.seen = tuple(state["seen"])


def step_row(step: Step, counters: RunCounters, pipeline: Pipeline) -> dict[str, Any]:
    """Return a line of steps.jsonl; docs/reference/run-folder.md has its table of fields."""
    generators_idle = counters.generator_seconds - counters.generate_seconds
    rollouts = [rollout for group in step.groups for rollout in group.rollouts]
    n, before = len(rollouts), step.index - 1  # the trainer's version when it took the batch
    # Per token: a completion may have been sampled by several versions.
    staleness_W = (before - step.batch.version_NT)[step.batch.sampled_NT]
    row = {
        "step": step.index,
        "version": step.index,
        "time": time.time(),
        "skipped": not len(step.batch),
        "reward_mean": float(np.concatenate([group.reward_G for group in step.groups]).mean()),
        "correct": float(np.concatenate([group.correct_G for group in step.groups]).mean()),
        "groups": len(step.groups),
        "groups_used": step.batch.groups_used,
        "completions": len(rollouts),
        "completions_used": len(step.batch),
        "zero_variance": step.batch.zero_variance / len(step.groups),
        "truncated": sum(r.truncated for r in rollouts) / n,
        "failed": dict(Counter(reason for g in step.groups for reason in g.failed.values())),
        "interrupted": sum(r.interrupted for r in rollouts) / n,
        "mean_length": sum(r.length for r in rollouts) / n,
        **{key: value for key, value in vars(step.stats).items() if key not in _NOT_OF_ALL_STEPS},
        "multi_version": sum(bool(r.version_T[0] != r.version_T[-1]) for r in rollouts) / n,
        "kv_staleness_max": max(before - r.first_version for r in rollouts),
        "pool": pipeline.pool_left,
        "queue": pipeline.queue(),
        "ledger": pipeline.ledger(counters.fates),
        "restarted": counters.restarted,
        **counters.json(),
        "wall_seconds": counters.wall_seconds,
        "idle_seconds": {"generate": generators_idle, "train": counters.waited_seconds},
        "weight_sync": vars(step.sync),
    }
    if counters.apart_seconds:
        row["idle_seconds"]["apart"] = counters.apart_seconds
    if not math.isnan(step.stats.router_load_max):  # a mixture of experts
        row |= {key: getattr(step.stats, key) for key in _OF_ROUTERS}
    if len(staleness_W):
        row |= {
            "staleness_mean": float(staleness_W.mean()),
            "staleness_max": int(staleness_W.max()),
            "staleness_share_over_4": float((staleness_W > 4).mean()),
            "staleness_histogram": np.bincount(staleness_W) / len(staleness_W),
        }
    return row


def groups_row(step: Step) -> dict[str, Any]:
    """Return a line of groups.jsonl: the groups of a step in order of admission, with the fate of each."""
    groups = step.groups
    return {
        "step": step.index,
        "prompt": [group.prompt.id for group in groups],
        "epoch": [group.rollouts[0].epoch for group in groups],
        "fate": list(step.batch.fates),
        "correct": [int(group.correct_G.sum()) for group in groups],
        "n": [len(group.rollouts) for group in groups],
    }
