"""Settings of a run that are no choice of algorithm: batch, context, budget, placement, checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from scalerl.rl.config.bounds import at_least, positive


@dataclass(frozen=True)
class BatchSize:
    """Completions per trainer step: `prompts` groups of `samples` completions each."""

    prompts: int = 48
    samples: int = 16
    micro: int = 64
    """Completions per forward pass of the trainer: a matter of memory and speed, not of the result."""

    def __post_init__(self) -> None:
        at_least(1, prompts=self.prompts, micro=self.micro)
        at_least(2, samples=self.samples)  # a group of one has no baseline


@dataclass(frozen=True)
class Context:
    """Budgets in tokens. After an interruption the answer has its own; with no length control, thinking and
    answer share theirs."""

    prompt: int = 2048
    thinking: int = 12288
    answer: int = 2048

    def __post_init__(self) -> None:
        at_least(1, prompt=self.prompt, thinking=self.thinking, answer=self.answer)

    @property
    def sampled(self) -> int:
        """The most tokens that a completion may sample."""
        return self.thinking + self.answer


@dataclass(frozen=True)
class Steps:
    """A budget of trainer steps."""

    amount: float
    kind: Literal["steps"] = "steps"

    def __post_init__(self) -> None:
        positive(amount=self.amount)


@dataclass(frozen=True)
class FlopsBudget:
    """A budget of floating-point operations, of generation and training together."""

    amount: float
    kind: Literal["flops"] = "flops"

    def __post_init__(self) -> None:
        positive(amount=self.amount)


@dataclass(frozen=True)
class Evaluation:
    """Evaluations on the held-out prompts: `count` of them evenly over the budget, and one before it.

    All have the same seed, so that the noise between them is the least.
    """

    count: int = 30
    samples: int = 4
    decode_slots: int = 1000
    seed: int = 20251016
    forecast_at: tuple[float, ...] = (0.25, 0.5, 0.75)
    """Shares of the budget at which a forecast of its end is frozen, before training goes on."""

    def __post_init__(self) -> None:
        at_least(1, count=self.count, samples=self.samples, decode_slots=self.decode_slots)
        at_least(0, seed=self.seed)
        if not all(0 < share < 1 for share in self.forecast_at):
            raise ValueError("forecast_at must be shares of the budget between 0 and 1")

    def slots_for(self, n_prompts: int) -> int:
        """Completions decoded at once, where there are so many prompts."""
        return min(self.decode_slots, n_prompts * self.samples)


@dataclass(frozen=True)
class Inline:
    """Generator and trainer take turns in one process: a run is a function of its seed, bit for bit."""

    kind: Literal["inline"] = "inline"

    @property
    def processes(self) -> int:
        """Processes that decode."""
        return 1

    @property
    def devices(self) -> int:
        """Devices whose time is counted, where one process trains."""
        return 1

    @property
    def apart(self) -> bool:
        """Whether generators have devices of their own."""
        return False


EngineKind = Literal["auto", "kernels", "transformers"]


@dataclass(frozen=True)
class BuiltInEngine:
    """What computes the model in the built-in generator, and in a trainer that is not sharded.

    `kernels` is this package's C code: Llama, Mistral, Qwen2 and Qwen3 in float32 on a CPU. `transformers` is
    the model's own modules, on any device. `auto` takes the kernels where they fit.
    """

    kind: EngineKind = "auto"


@dataclass(frozen=True)
class Local:
    """Generators in processes of their own beside the trainer, on one machine; they never wait for it."""

    generators: int = 1
    kind: Literal["local"] = "local"

    def __post_init__(self) -> None:
        at_least(1, generators=self.generators)

    @property
    def processes(self) -> int:
        """Processes that decode."""
        return self.generators

    @property
    def devices(self) -> int:
        """Devices whose time is counted: the generators and the trainer."""
        return self.generators + 1

    @property
    def apart(self) -> bool:
        """Whether generators have devices of their own."""
        return True


@dataclass(frozen=True)
class Checkpointing:
    """When checkpoints are made: after so many steps, or minutes, whichever comes first; 0 is never."""

    steps: int = 50
    minutes: float = 30.0
    keep: int = 2
    """How many are kept: the last ones."""

    def __post_init__(self) -> None:
        if self.steps < 0 or not 0 <= self.minutes < math.inf:
            raise ValueError("steps and minutes must not be negative")
        at_least(1, keep=self.keep)


@dataclass(frozen=True)
class Timeouts:
    """Seconds without progress after which a process is replaced: one that is slow sends heartbeats.

    Nothing that is trained depends on them. Reported after 30 s, or half of these where that is less.
    """

    evaluation: float = 600.0
    """For the process that evaluates, wherever it is: no decode step, no verdict."""
    generator: float = 600.0
    """For a generator of the placement `local`: no decode step."""
    start: float = 600.0
    """For either to start and load its model, which sends no heartbeats."""

    def __post_init__(self) -> None:
        positive(**vars(self))
