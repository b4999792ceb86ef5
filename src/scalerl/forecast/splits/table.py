"""The answer of an allocation: the best split at every budget, as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from scalerl.curve.answers import span
from scalerl.curve.quantiles import Interval
from scalerl.jsonl import plain


@dataclass(frozen=True)
class Best:
    """The best value on one axis of the grid, `grid` being its ends.

    `at_low` and `at_high`: the interval reaches that end, and what is beyond it is not known.
    """

    median: float
    interval: Interval
    grid: Interval
    at_low: bool
    at_high: bool

    @property
    def tells(self) -> bool:
        """Whether the runs say anything at all."""
        return not (self.at_low and self.at_high)

    def __str__(self) -> str:
        low, high = self.interval
        if not self.tells:
            return f"cannot tell: anything on the grid {span(self.grid, '.3g')}"
        if self.at_high:
            return f"at least {low:.3g}"
        if self.at_low:
            return f"at most {high:.3g}"
        return f"{self.median:.3g} {span(self.interval, '.3g')}"


@dataclass(frozen=True)
class AtBudget:
    """The best split of one budget. `prompts` or `samples` is None where the grid has one value of it."""

    budget: float
    prompts: Best | None
    samples: Best | None
    steps: tuple[float, Interval]
    """Median and interval of the steps that this leaves: the budget by the cost of a batch."""
    pass_rate: tuple[float, Interval]
    """Of the surface at the best."""
    cells: tuple[tuple[int, int], ...]
    """Cells (P, n) of the grid that may be the best of it: the fewest that hold it at the level."""


@dataclass(frozen=True)
class Growth:
    """How the best grows with the budget: the slope of its log against log C. None where that is not told."""

    of: str
    slope: float | None
    interval: Interval | None
    why: str

    def __str__(self) -> str:
        if self.slope is None or self.interval is None:
            return f"{self.of}: growth with the budget is not told, {self.why}"
        return f"best {self.of} grow as C^{self.slope:.2f}, exponent {span(self.interval, '.2f')}"


@dataclass(frozen=True)
class Allocation:
    """The answer of a grid of batches. Made by `allocate`."""

    cells: tuple[tuple[int, int], ...]
    cost: float
    level: float
    budgets: tuple[AtBudget, ...]
    growth: tuple[Growth, ...]
    cautions: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Everything, in what JSON has."""
        return plain(asdict(self))

    def __str__(self) -> str:
        blocks = []
        for at in self.budgets:
            rows = [f"budget {at.budget:.3g}"]
            axes = {"prompts per batch": at.prompts, "completions per prompt": at.samples}
            rows += [f"  {name}: {best}" for name, best in axes.items() if best is not None]
            rows.append(f"  steps: {at.steps[0]:.4g} {span(at.steps[1], '.4g')}")
            rows.append(f"  pass rate: {at.pass_rate[0]:.3f} {span(at.pass_rate[1])}")
            among = ", ".join(f"{p}x{n}" for p, n in at.cells)
            rows.append(f"  the best of the grid is among: {among}")
            blocks.append("\n".join(rows))
        return "\n".join([*blocks, *map(str, self.growth), *self.cautions])
