"""The study file: a base recipe, its arms, seeds and budgets, in a few lines of TOML.

    base = "demo"              # a recipe of the package, a TOML file (beside this one), or a run folder
    seeds = 3                  # 0, 1 and 2; or a list

    [arm.dapo]                 # arms by name, each a recipe's keys ...
    loss.kind = "dapo"

    [arms]                     # ... or made by a rule (`scalerl.study.arms`)
    kind = "leave_one_out"
    without = "deepseek_grpo"

Its keys are the fields of `Study`; unknown keys are rejected.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Discriminator

from scalerl.errors import InputError
from scalerl.kinds import InFiles
from scalerl.own_code import beside
from scalerl.rl.config.form import Form, parse_toml
from scalerl.rl.config.recipe import Recipe
from scalerl.study.arms import AnyArms, Changes, Listed

MOST_SEEDS, MOST_SEED = 1000, 999_999
"""The most seeds of a study, and the largest seed; trials of learning rates have larger ones."""


@dataclass(frozen=True)
class Stop:
    """The rule by which arms are stopped at a budget."""

    below_best: float
    """An arm stops at this posterior probability that its ceiling is below that of the best arm. Both
    ceilings must be identified."""
    at_least: int = 2
    """Number of arms that run to the end in any case."""

    def __post_init__(self) -> None:
        if not 0.5 < self.below_best < 1:
            raise ValueError("below_best must be a probability between .5 and 1")
        if self.at_least < 1:
            raise ValueError("at_least must be 1 or more")


@dataclass(frozen=True)
class LearningRate:
    """One rule for all arms: each is tried with every value, and keeps the one with the highest pass rate.

    The pass rate is the mean over the last quarter of the evaluations up to `budget`, and over seeds other
    than those of the study. Without this table, the recipes set the learning rate.
    """

    values: tuple[float, ...]
    budget: float
    """Compute of every trial, in the unit of the base's budget."""
    seeds: int = 1

    def __post_init__(self) -> None:
        if len(set(self.values)) < 2 or not all(0 < value < math.inf for value in self.values):
            raise ValueError("values must be two different rates or more, all above 0 and finite")
        if self.seeds < 1 or not self.budget > 0:
            raise ValueError("seeds and budget must be above 0")


@dataclass(frozen=True)
class Study:
    """All keys of a study file."""

    base: Annotated[str | Recipe, InFiles(str)]
    """The name of a recipe in the package, a file, a run folder, or the recipe itself."""
    seeds: int | tuple[int, ...]
    """Their number, counted from 0, or a list. A seed draws the same prompts and randomness in all arms."""
    name: str = "study"
    """In a file, defaults to the name of the file."""
    set: Changes = field(default_factory=dict)
    """Changes to the base for all arms, by the keys of a recipe: tables, or objects such as `rl.Dapo()`."""
    arm: dict[str, Changes] = field(default_factory=dict)
    """Arms by name, each with its changes to the base, which is an arm itself."""
    arms: Annotated[AnyArms, Discriminator("kind")] | None = None
    """A rule that makes the arms."""
    budgets: tuple[float, ...] = ()
    """Increasing, in the unit of the base's budget. All arms reach a budget before any arm continues; the
    last one replaces the budget of the recipes."""
    models: tuple[str, ...] = ()
    """Base models: in all arms the first seed starts from the first, the next from the next, and so on."""
    target: float | None = None
    """Pass rate to which the compute is compared."""
    price: float | None = None
    """Dollars per GPU-hour."""
    retries: int = 2
    """How often a crashed run is retried."""
    combine: int = 0
    """Number of best arms whose changes are combined into one more arm after all have run; 0 for none."""
    stop: Stop | None = None
    learning_rate: LearningRate | None = None

    def __post_init__(self) -> None:
        n = self.seeds if isinstance(self.seeds, int) else len(self.seeds)
        if not 1 <= n <= MOST_SEEDS or not 0 <= min(self.seed_list) <= max(self.seed_list) <= MOST_SEED:
            raise ValueError(
                f"seeds must be a number from 1 to {MOST_SEEDS}, or a list of whole numbers up to {MOST_SEED}"
            )
        if len(set(self.seed_list)) < len(self.seed_list):
            raise ValueError("seeds: one is given twice")
        if list(self.budgets) != sorted({b for b in self.budgets if 0 < b < math.inf}):
            raise ValueError("budgets must be above 0, finite, and rise")
        if self.target is not None and not 0 < self.target < 1:
            raise ValueError("target must be a pass rate between 0 and 1")
        if self.price is not None and not 0 < self.price < math.inf:
            raise ValueError("price must be above 0")
        if "base" in self.arm:
            raise ValueError("arm.base: the base is an arm of its own already; name this one otherwise")
        if not self.name.strip(". /") or "/" in self.name or not self.name.isprintable():
            raise ValueError(f"name must be that of a folder, found {self.name!r}")
        if self.stop and len(self.budgets) < 2:
            raise ValueError("stop: there is no budget to stop at, give two or more")
        if self.retries < 0 or self.combine < 0 or self.combine == 1:
            raise ValueError("retries must be 0 or more, combine 0 or 2 or more")

    @property
    def seed_list(self) -> tuple[int, ...]:
        """The seeds as a tuple."""
        return tuple(range(self.seeds)) if isinstance(self.seeds, int) else self.seeds

    @property
    def rule(self) -> AnyArms:
        """The rule that makes the arms.

        Raises:
            InputError: the study has both arms by name and a rule, or neither.
        """
        if bool(self.arm) == bool(self.arms):
            found = "both" if self.arm else "neither"
            raise InputError(f"a study needs [arm.NAME] tables or one [arms] table; found {found}")
        return self.arms or Listed(self.arm)


_FORM = Form(Study)


def load_study(path: str | Path) -> Study:
    """Read a study file. Recipes that it names may be files or run folders beside it, and so may Python files
    of custom kinds.

    Raises:
        InputError: it cannot be read, is not TOML, or does not describe a study.
    """
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{path}: a folder; expected a study file (TOML)")
    values: dict[str, Any] = {"name": path.stem, **beside(path.parent, parse_toml(path, path))}
    arms = values.get("arms")
    for table, key in ((values, "base"), (arms, "without"), (arms, "recipes")):
        if isinstance(table, dict) and key in table:
            table[key] = _beside(path.parent, table[key])
    study = _FORM.build(values, str(path))
    study.rule  # noqa: B018  raises if there are both kinds of arms, or none
    return study


def _beside(folder: Path, named: Any) -> Any:
    """Replace the name of a recipe, or each of a list, by its path if it is a file or run in `folder`."""
    if isinstance(named, list):
        return [_beside(folder, name) for name in named]
    if not isinstance(named, str):
        return named
    path = folder / named
    return str(path) if path.is_file() or (path / "config.json").is_file() else named
