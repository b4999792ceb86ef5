"""How to read the log of another trainer, as far as the user specifies it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scalerl.errors import InputError, number_of
from scalerl.ingest.flops import ModelCost, model_cost
from scalerl.record.reader import PASS_RATE_OF

_DEVICES = "the number of devices"
_RIGHT, _WRONG = "what a right answer earns", "what a wrong answer earns"


@dataclass(frozen=True)
class ReadOptions:
    """How to read the log of another trainer; None leaves it to the log."""

    metric: str | None = None
    """The metric that is the pass rate, in which `*` is any text, or the column of a table."""
    format: str | None = None
    trainer: str | None = None
    run: str | None = None
    """The name of the run to read; the others need not hold anything that could be a pass rate."""
    devices: float | None = None
    training_log: str | Path | None = None
    """The log of the training whose checkpoints were evaluated: its compute is taken."""
    model: Path | ModelCost | None = None
    """The model's folder or config.json, or the cost of a token."""
    max_reward: float | None = None
    """What a correct answer earns: values are divided by it. 100 for percentages."""
    min_reward: float | None = None
    """What a wrong answer earns, if not 0."""
    pooled: bool = False
    """Whether to take the mean over data sets, weighted by their prompts."""
    each: bool = False
    """Whether to read every held-out metric as a run of its own."""
    prompts: Mapping[str, int] = field(default_factory=dict)
    """The number of held-out prompts by data set or metric; the key "" is for all."""
    in_python: bool = False
    """Whether they are arguments of a function rather than options of a command, for messages."""

    def __post_init__(self) -> None:
        if self.devices is not None and not 0 < number_of(self.devices, _DEVICES) < math.inf:
            raise InputError(f"{_DEVICES} is a number above 0, found {self.devices}")
        wrong, right = self.rewards or (0.0, 1.0)
        if not (math.isfinite(number_of(wrong, _WRONG)) and wrong < number_of(right, _RIGHT) < math.inf):
            raise InputError(f"{_RIGHT} is a number above {_WRONG}, found {right} and {wrong}")

    def naming(self, value: str = "", name: str = "metric") -> str:
        """Return how the user sets one of these: `--y VALUE`, or `metric='VALUE'` in Python."""
        if self.in_python:
            return f"{name}={value and repr(value)}"
        option = "--y" if name == "metric" else f"--{name.replace('_', '-')}"
        return f"{option} {value}".rstrip()

    @property
    def rewards(self) -> tuple[float, float] | None:
        """What a wrong and a correct answer earn, if the user gave either."""
        if self.max_reward is None and self.min_reward is None:
            return None
        return self.min_reward or 0.0, 1.0 if self.max_reward is None else self.max_reward

    def cost(self) -> ModelCost | None:
        """Return the cost of a token, if FLOPs are to be counted.

        Raises:
            InputError: the model's config.json cannot be read.
        """
        return model_cost(self.model) if isinstance(self.model, Path) else self.model

    def n_prompts(self, name: str, dataset: str) -> int:
        """Return the prompts behind a metric, if the user gave them; else 0."""
        return next((self.prompts[key] for key in (name, dataset, "") if key in self.prompts), 0)

    @property
    def task(self) -> str | None:
        """The task of a mixture whose pass rates are wanted from a run folder."""
        metric = self.metric or ""
        return metric.removeprefix(PASS_RATE_OF) if metric.startswith(PASS_RATE_OF) else None

    def check_used(self, paths: Sequence[str | Path], foreign: bool, is_table: bool = False) -> None:
        """Raise an InputError if an option was set that applies to none of `paths`.

        Args:
            paths: the paths that were read.
            foreign: whether any of them is the log of another trainer.
            is_table: whether any of them is a table, which has a column of pass rates.
        """
        is_set = (self.metric is not None and self.task is None) or self.rewards is not None
        if is_set and paths and not (foreign or is_table):
            raise InputError(
                f"{paths[0]}: a run folder has its own pass rates; {self.naming()} is for logs and tables"
            )
        names = ["format", "trainer", "run", "devices", "training_log", "model", "pooled", "each", "prompts"]
        names = [name for name in names if getattr(self, name) not in (None, False, {})]
        given = [self.naming(name=name) for name in names]
        if given and not foreign:
            which = f"{paths[0]} is not" if len(paths) == 1 else f"none of {', '.join(map(str, paths))} is"
            raise InputError(f"{', '.join(given)}: only for the log of another trainer, which {which}")
