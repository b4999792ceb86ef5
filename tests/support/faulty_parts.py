"""Choices of a recipe that raise an error from one of their calls on, and before are those of the package."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from scalerl.rl.algo.advantage import BatchStd
from scalerl.rl.algo.averaging import PromptAverage
from scalerl.rl.algo.curriculum import Uniform
from scalerl.rl.algo.length import ForcedInterruption, LengthControl
from scalerl.rl.algo.loss import Cispo


class Fault:
    """Calls of each choice so far, and the first call that fails, where one does; all after it do, too."""

    calls: ClassVar[dict[str, int]] = {}
    at: ClassVar[dict[str, int]] = {}

    @classmethod
    def passed(cls, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a call returns, unless that is to fail."""
        cls.calls[name] = cls.calls.get(name, 0) + 1
        if cls.calls[name] >= cls.at.get(name, math.inf):
            raise KeyError("mine")
        return call(*arguments)


@dataclass(frozen=True)
class FaultyLoss:
    """CISPO."""

    def __call__(self, logp_NT: Any, behaviour_NT: Any, advantage_N: Any, sampled_NT: Any) -> Any:
        """See `scalerl.rl.algo.loss.Loss`."""
        return Fault.passed("loss", Cispo(), logp_NT, behaviour_NT, advantage_N, sampled_NT)


@dataclass(frozen=True)
class FaultyAdvantage:
    """The package's default."""

    def __call__(self, centred: Any) -> Any:
        """See `scalerl.rl.algo.advantage.Advantage`."""
        return Fault.passed("advantage", BatchStd(), centred)


@dataclass(frozen=True)
class FaultyAveraging:
    """The package's default."""

    def __call__(self, length_N: Any, group_N: Any, budget: int) -> Any:
        """See `scalerl.rl.algo.averaging.Averaging`."""
        return Fault.passed("averaging", PromptAverage(), length_N, group_N, budget)


@dataclass(frozen=True)
class FaultyCurriculum:
    """No prompt is retired."""

    def retires(self, history: Any) -> bool:
        """See `scalerl.rl.algo.curriculum.Curriculum`."""
        return Fault.passed("curriculum", Uniform().retires, history)


@dataclass(frozen=True)
class FaultyLength(LengthControl):
    """Interruptions, as in small runs."""

    def penalty(self, length: int, correct: bool) -> float:
        """See `scalerl.rl.algo.length.LengthControl`."""
        return Fault.passed("length", lambda: 0.0)

    def interruption(self) -> ForcedInterruption:
        """See `scalerl.rl.algo.length.LengthControl`."""
        return ForcedInterruption(phrase="! </think>", low=2, high=6)


PARTS = {
    "loss": FaultyLoss(),
    "advantage": FaultyAdvantage(),
    "averaging": FaultyAveraging(),
    "curriculum": FaultyCurriculum(),
    "length": FaultyLength(),
}
