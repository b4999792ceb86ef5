"""Curricula: which prompts are never drawn again."""

from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass
class History:
    """Correct completions and completions of a prompt: over all of its groups, and of the latest group."""

    correct: int = 0
    n: int = 0
    latest: tuple[int, int] = (0, 0)

    def add(self, correct: int, n: int) -> None:
        """Add a group of `n` completions."""
        self.correct, self.n, self.latest = self.correct + correct, self.n + n, (correct, n)


class Curriculum(Protocol):
    """Decides which prompts are never drawn again."""

    def retires(self, history: History) -> bool:
        """Whether to retire a prompt with this history; called after each of its groups."""
        ...


@dataclass(frozen=True)
class NoPositiveResampling:
    """A prompt whose pass rate has reached `threshold` is never drawn again (arXiv 2510.13786, section 2).

    The pass rate is that of the `latest` group (one epoch), or over `all` completions of the prompt so far.
    Truncated completions count as failures.
    """

    threshold: float = 0.9
    # `all` never forgets the failures of early epochs: after one epoch at 40 %, a prompt needs five perfect
    # epochs to be retired.
    history: Literal["latest", "all"] = "latest"
    kind: Literal["no_positive_resampling"] = "no_positive_resampling"

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ValueError("threshold must be in (0, 1]")

    def retires(self, history: History) -> bool:
        """Whether to retire a prompt with this history."""
        correct, n = history.latest if self.history == "latest" else (history.correct, history.n)
        return n > 0 and correct / n >= self.threshold  # not correct >= threshold * n, as .55 * 100 > 55


@dataclass(frozen=True)
class Uniform:
    """Every prompt is drawn in every epoch, whatever its pass rate."""

    kind: Literal["uniform"] = "uniform"

    def retires(self, history: History) -> bool:
        """Return false."""
        return False


AnyCurriculum = NoPositiveResampling | Uniform
"""The curricula that a recipe can name."""
