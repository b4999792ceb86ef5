"""The tables of a recipe other than algorithms, `[cluster]`, `[engine]`, `[health]` and `[optimiser]`.

Numbers out of range raise a ValueError that names the key.
"""

import math
import os
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from scalerl.kinds import Choice, choices_of
from scalerl.rl.tasks.mix import OneTask
from scalerl.rl.tasks.task import Task


def positive(**values: float) -> None:
    """Raise a ValueError unless all `values` are above 0 and finite."""
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite")


def at_least(bound: int, **values: float) -> None:
    """Raise a ValueError unless all `values` are at least `bound` and fit in 64 bits."""
    for name, value in values.items():
        if value < bound:
            raise ValueError(f"{name} must be at least {bound}")
        if value >= 2**63:
            raise ValueError(f"{name} must be below 2**63")


def usable_cores() -> int:
    """Return the number of cores that this process may use on Linux; elsewhere, that of all cores."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


@dataclass(frozen=True)
class BatchSize:
    """Completions per trainer step: `prompts` groups of `samples` completions each."""

    prompts: int = 48
    samples: int = 16
    micro: int = 64
    """Completions per forward pass of the trainer: affects memory and speed, not the result."""
    micro_tokens: int = 0
    """Tokens per forward pass of one trainer process, padding included, but at least one completion; 0 uses
    `micro` completions."""
    max_gen_batches: int = 10
    """The most groups that a step may consume with `zero_variance = "resample"`, in batches of `prompts`
    groups; the step then trains on the groups it has."""

    def __post_init__(self) -> None:
        at_least(1, prompts=self.prompts, micro=self.micro, max_gen_batches=self.max_gen_batches)
        at_least(0, micro_tokens=self.micro_tokens)
        at_least(2, samples=self.samples)  # a group of one has no baseline


@dataclass(frozen=True)
class Context:
    """Budgets in tokens. With interruptions the answer has a budget of its own; without length control,
    thinking and answer share theirs."""

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
class _Budget:
    amount: float

    def __post_init__(self) -> None:
        positive(amount=self.amount)


@dataclass(frozen=True)
class Steps(_Budget):
    """A budget of trainer steps."""

    kind: Literal["steps"] = "steps"


@dataclass(frozen=True)
class FlopsBudget(_Budget):
    """A budget of floating-point operations, of generation and training together."""

    kind: Literal["flops"] = "flops"


@dataclass(frozen=True)
class GpuHours(_Budget):
    """A budget of device-hours: generating, training and idling, as on the axis `gpu_hours`."""

    kind: Literal["gpu_hours"] = "gpu_hours"


@dataclass(frozen=True)
class TokensBudget(_Budget):
    """A budget of generated tokens, as on the axis `tokens`."""

    kind: Literal["tokens"] = "tokens"


@dataclass(frozen=True)
class Epochs(_Budget):
    """A budget of passes over the training prompts: groups consumed / prompts, retired ones included."""

    kind: Literal["epochs"] = "epochs"


AnyBudget = Steps | FlopsBudget | GpuHours | TokensBudget | Epochs
"""The budgets that a recipe can name; docs/reference/definitions.md says what each counts."""


@dataclass(frozen=True)
class Suite:
    """A named benchmark: the held-out prompts of a task, on which no step trains.

    They are sampled like those of the run: with the recipe's temperature, context and length control.
    """

    name: str
    task: Annotated[Task, Choice("tasks", Task, OneTask)]
    samples: int = 4
    """Completions per prompt: the k of pass@k."""
    every: int = 1
    """The suite is part of every so many evaluations of the run, and of the first and the last."""

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise ValueError(f"name must not be empty, or hold a slash (found {self.name!r})")
        at_least(1, samples=self.samples, every=self.every)
        choices_of(Suite)["task"].check_object(self.task, "task")


@dataclass(frozen=True)
class Evaluation:
    """Evaluations on the held-out prompts: `count` of them evenly over the budget, or one after every `every`
    steps; also one before training and one at its end.

    All have the same seed, to minimise the noise between them.
    """

    count: int = 30
    every: int = 0
    """Steps from one evaluation to the next; if above 0, it replaces `count`."""
    samples: int = 4
    decode_slots: int = 1000
    seed: int = 20251016
    forecast_at: tuple[float, ...] = (0.25, 0.5, 0.75)
    """Shares of the budget at which a forecast of its end is frozen, before training goes on."""
    keep: Literal["last", "best"] = "last"
    """`best` also keeps the weights of the best evaluation, by the smoothed pass rate, so that a lucky
    evaluation does not win."""
    downstream: tuple[Suite, ...] = ()
    """Benchmarks beside the held-out prompts; they count neither as training compute nor in the forecast."""

    def __post_init__(self) -> None:
        at_least(1, count=self.count, samples=self.samples, decode_slots=self.decode_slots)
        at_least(0, seed=self.seed, every=self.every)
        if not all(0 < share < 1 for share in self.forecast_at):
            raise ValueError("forecast_at must be shares of the budget between 0 and 1")
        names = [suite.name for suite in self.downstream]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"downstream: two suites are called {twice[0]!r}: give each a name of its own")

    def due(self, number: int, last: bool) -> tuple[str, ...]:
        """Return the suites of the evaluation with this number (from 0); the `last` one has all suites."""
        return tuple(suite.name for suite in self.downstream if last or number % suite.every == 0)

    def slots_for(self, n_prompts: int) -> int:
        """Return how many completions are decoded at once for `n_prompts` prompts."""
        return min(self.decode_slots, n_prompts * self.samples)


@dataclass(frozen=True)
class Samples:
    """Completions that are kept as text in samples.jsonl; they have no effect on training."""

    evaluation: int = 4
    """Completions kept per evaluation: one for each of this many held-out prompts, always the same ones."""
    every: int = 50
    """Steps between those of which completions are kept; 0 for never."""
    training: int = 4
    """Completions kept of each such step: the first one of this many of its first groups."""

    def __post_init__(self) -> None:
        at_least(0, evaluation=self.evaluation, every=self.every, training=self.training)


@dataclass(frozen=True)
class Inline:
    """Generator and trainer take turns in one process; a run is a function of its seed, bit for bit."""

    generators: ClassVar[int] = 1
    trainers: ClassVar[int] = 1
    kind: Literal["inline"] = "inline"


@dataclass(frozen=True)
class Local:
    """Generators in processes of their own beside the trainers, on one machine; they never wait for trainers.

    If there are enough GPUs, each process has its own.
    """

    generators: int = 1
    trainers: int = 1
    """Two or more processes shard the model (FSDP2), each on a GPU of its own."""
    kind: Literal["local"] = "local"

    def __post_init__(self) -> None:
        at_least(1, generators=self.generators, trainers=self.trainers)


@dataclass(frozen=True)
class Checkpointing:
    """Intervals of checkpoints: after `steps` or `minutes`, whichever comes first; 0 for never."""

    steps: int = 50
    minutes: float = 30.0
    keep: int = 2
    """How many of the last checkpoints are kept."""

    def __post_init__(self) -> None:
        if self.steps < 0 or not 0 <= self.minutes < math.inf:
            raise ValueError("steps and minutes must not be negative")
        at_least(1, keep=self.keep)


@dataclass(frozen=True)
class Timeouts:
    """Seconds without progress after which a process is replaced; a slow process sends heartbeats.

    They have no effect on training. A stall is reported after 30 s, or half the timeout if that is less.
    """

    evaluation: float = 600.0
    """Seconds without a decode step or a verdict of the evaluating process, wherever it runs."""
    generator: float = 600.0
    """Seconds without a decode step of a generator with placement `local`."""
    start: float = 600.0
    """Seconds for either process to start and load its model."""

    def __post_init__(self) -> None:
        positive(**vars(self))


@dataclass(frozen=True)
class LearnerSettings:
    """How the trainer computes; these settings change the result only by rounding."""

    activation_checkpointing: bool = False
    """Keep only the inputs of every block for the backward pass: less memory, a third more time."""
    compile: bool = False
    """Compile every layer with torch.compile: 1.7 times the tokens/s of a step of a 0.6B model on an H200.
    The first steps take minutes, as varying lengths are compiled a few times before they become dynamic. Not
    for mixtures of experts, nor with `tensor_parallel`. Never run on several GPUs so far. On a CPU it
    replaces the C kernels."""
    offload_optimiser: bool = False
    """Keep the optimiser's moments in CPU memory, and those of one tensor at a time on the device: saves 8
    bytes per trained weight, which travel to the device and back once a step."""
    chunk: int = 1024
    """Tokens whose logits are in memory at once."""
    attention: Literal["auto", "sdpa", "varlen", "flash_attention_2"] = "auto"
    """`sdpa` pads the completions of a micro-batch. The others pack them: `varlen` with PyTorch's own kernel,
    `flash_attention_2` with the package flash_attn. `auto` is `varlen` for bfloat16 on a GPU, else `sdpa`. A
    model whose hidden states would change by packing is always padded."""
    reduce: Literal["micro_batch", "step"] = "micro_batch"
    """When gradients are reduced over several processes: after every micro-batch, so that each process holds
    only its shard, or once a step, so that each holds all gradients in float32 until then."""
    tensor_parallel: int = 1
    """Processes that share every matrix product; a divisor of the number of processes."""
    timeout: float = 600.0
    """Seconds that a process waits for another before it exits with an error."""

    def __post_init__(self) -> None:
        at_least(1, chunk=self.chunk, tensor_parallel=self.tensor_parallel)
        positive(timeout=self.timeout)
        if self.compile and self.tensor_parallel > 1:
            raise ValueError("compile cannot be had with tensor_parallel: leave one of them as it is")


def _listed(value: Any) -> Any:
    """Turn one name into a list of one, for `--set tracking.to=wandb`."""
    return (value,) if isinstance(value, str) else value


ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters (arXiv 2106.09685); off at rank 0.

    An adapter adds alpha / rank * B A to a weight, with B = 0 at first. There is no dropout, as the trainer's
    log-probabilities must be those of the published weights.
    """

    rank: int = 0
    alpha: int = 32
    targets: Annotated[tuple[str, ...], BeforeValidator(_listed)] = (ALL_LINEAR,)
    """The layers with adapters, by the ends of their names, as in `target_modules` of PEFT: `["q_proj",
    "v_proj"]`; `all-linear` is every linear layer but the LM head."""

    def __post_init__(self) -> None:
        if self.rank < 0 or not self.alpha > 0:
            raise ValueError("rank must not be negative, and alpha must be positive")
        if not self.targets or not all(self.targets):
            raise ValueError(f'targets must name layers, or be "{ALL_LINEAR}"')


@dataclass(frozen=True)
class Tracking:
    """Trackers that a run is logged to; they have no effect on training."""

    to: Annotated[
        tuple[Literal["wandb", "tensorboard", "mlflow", "trackio"], ...], BeforeValidator(_listed)
    ] = ()
    project: str = "scalerl"
    """Project of W&B and trackio, experiment of MLflow."""
    name: str = ""
    """Name of the run; defaults to that of its folder."""
    group: str = ""
    """Group of runs that belong together; runs of a study have the study's name."""
    close_seconds: float = 30.0
    """The most seconds that trackers get at the end of a run to log the rest."""

    def __post_init__(self) -> None:
        if not self.project:
            raise ValueError("project must not be empty")
        if not 0 <= self.close_seconds < math.inf:
            raise ValueError("close_seconds must not be negative")
