"""The arms of a study: the changes of each to the base recipe, made from a few lines of TOML.

    kind            arms
    arms            as listed
    leave_one_out   the base, and the base with one part of another recipe, for every part that differs
    axis            one field, or several that move together, over their values
    sensitivity     the bound of a loss over its values, for one loss or several
    systems         whole recipes, on the task, model, lengths and budget of the base
    grid            every combination of the values of several fields

An arm is a name, and changes in the form of `scalerl.rl.config.recipe.changed`. The others are compared with
the first arm.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from scalerl.errors import InputError, brief
from scalerl.kinds import InFiles, kind_of, tables_of
from scalerl.own_code import label
from scalerl.rl.algo.loss import Loss
from scalerl.rl.config.recipe import Recipe, changed, from_dict, read_toml

Changes = dict[str, Any]
"""Changes by the keys of a recipe, as its tables; in Python, also as objects instead of tables."""
Named = tuple[str, Changes]

PARTS = (
    *("schedule", "loss", "fp32_logits", "averaging", "advantage", "zero_variance"),
    *("truncated", "curriculum", "length", "kl"),
)
"""The parts of a recipe that the paper leaves out one at a time, and a few more."""
SHARED = (
    *("model", "task", "budget", "context", "end_of_thinking", "precision", "decode_slots", "placement"),
    *("evaluation", "checkpoint", "seed", "temperature", "top_p", "top_k", "optimiser"),
)
"""Keys that all systems take from the base, so that they can be compared."""
MOST_ARMS = 256
"""Most arms of a study: with more, the correction for multiple questions leaves no verdict."""


@dataclass(frozen=True)
class Listed:
    """Arms by name, each with its changes to the base; the base itself is the first arm."""

    arms: dict[str, Changes]
    kind: Literal["arms"] = "arms"

    def changes(self, base: Recipe) -> list[Named]:
        """Return the base, and the arms in the listed order."""
        return [("base", {}), *self.arms.items()]


@dataclass(frozen=True)
class LeaveOneOutArms:
    """The base, and for each part in which another recipe differs the base with that recipe's part."""

    without: Annotated[str | Changes | Recipe, InFiles(str | Changes)]
    """The other recipe: a file, a name, or a table with the parts."""
    parts: tuple[str, ...] = ()
    """The parts to leave out; empty for all that differ."""
    kind: Literal["leave_one_out"] = "leave_one_out"

    def changes(self, base: Recipe) -> list[Named]:
        """Return the base, and an arm for every part that differs.

        Raises:
            InputError: one of `parts` is not a part of both recipes, or the two recipes do not differ.
        """
        own = base.to_dict()
        found = tables_of(self.without)
        if isinstance(self.without, str | Recipe):
            found = from_dict(changed(sparse(self.without), _shared(own)), source_of(self.without)).to_dict()
        parts = self.parts or tuple(part for part in PARTS if part in found)
        if unknown := [part for part in parts if part not in found or part not in own]:
            raise InputError(f"arms.parts: {unknown[0]!r} is no part of the two recipes")
        different = {
            part: found[part] for part in parts if changed(own, {part: found[part]})[part] != own[part]
        }
        if not different:
            raise InputError("arms.without: that recipe does not differ from the base")
        arms: list[Named] = [("base", {})]
        for part, value in different.items():
            shown = label(value["kind"]) if isinstance(value, Mapping) and "kind" in value else value
            arms.append((f"{part}={shown}", {part: value}))
        return arms


@dataclass(frozen=True)
class Axis:
    """One field over its values; with several fields, each value is a list with one entry per field."""

    fields: str | tuple[str, ...]
    values: tuple[Any, ...]
    kind: Literal["axis"] = "axis"

    def changes(self, base: Recipe) -> list[Named]:
        """Return an arm for each value.

        Raises:
            InputError: there are several fields, and a value is not a list with one entry per field.
        """
        if isinstance(self.fields, str):
            return [_fields_arm({self.fields: value}) for value in self.values]
        for value in self.values:
            if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != len(self.fields):
                raise InputError(
                    f"arms.values: {value!r} is not one value for each of {len(self.fields)} fields"
                )
        return [_fields_arm(dict(zip(self.fields, value, strict=True))) for value in self.values]


@dataclass(frozen=True)
class SweepArms:
    """A loss, as the table of a recipe, and the values of one of its bounds."""

    loss: Annotated[Changes | Loss, InFiles(Changes)]
    bound: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class SensitivityArms:
    """The bounds of one loss or several, each over its values."""

    sweeps: tuple[SweepArms, ...]
    kind: Literal["sensitivity"] = "sensitivity"

    def changes(self, base: Recipe) -> list[Named]:
        """Return an arm for each value of each bound."""
        losses = [tables_of(sweep.loss) for sweep in self.sweeps]
        kinds = [loss.get("kind", kind_of(base.loss)) for loss in losses]
        swept = [(kind, sweep.bound) for kind, sweep in zip(kinds, self.sweeps, strict=True)]
        arms = []
        for sweep, loss, (kind, bound) in zip(self.sweeps, losses, swept, strict=True):
            # Two sweeps over one bound of one loss differ in the loss's other parameters: name these.
            apart = {k: v for k, v in loss.items() if k != "kind"} if swept.count((kind, bound)) > 1 else {}
            name = " ".join([label(str(kind)), *(f"{k}={v}" for k, v in apart.items())])
            arms += [(f"{name} {bound}={v}", {"loss": {**loss, bound: v}}) for v in sweep.values]
        return arms


@dataclass(frozen=True)
class Systems:
    """Whole recipes, by file or name, except for the keys in `SHARED`, which are the base's."""

    recipes: Annotated[tuple[str | Recipe, ...], InFiles(tuple[str, ...])]
    kind: Literal["systems"] = "systems"

    def changes(self, base: Recipe) -> list[Named]:
        """Return an arm for each recipe, with all of its keys that are not in `SHARED`."""
        arms = []
        for source in self.recipes:
            values = sparse(source)
            recipe = from_dict(changed(values, _shared(base.to_dict())), source_of(source))
            own = {key: value for key, value in recipe.to_dict().items() if key not in (*SHARED, "name")}
            arms.append((str(values.get("name") or Path(source_of(source)).stem), own))
        return arms


@dataclass(frozen=True)
class Grid:
    """Every combination of the values of several fields."""

    values: dict[str, tuple[Any, ...]]
    kind: Literal["grid"] = "grid"

    def changes(self, base: Recipe) -> list[Named]:
        """Return an arm for each combination."""
        rows = itertools.product(*self.values.values())
        return [_fields_arm(dict(zip(self.values, row, strict=True))) for row in rows]


AnyArms = Listed | LeaveOneOutArms | Axis | SensitivityArms | Systems | Grid
"""Every rule that makes arms."""


@dataclass(frozen=True)
class Arm:
    """A recipe of a study except for its seed, and its changes to the base."""

    name: str
    recipe: Recipe
    changes: Changes

    def to_json(self) -> dict[str, Any]:
        """Return the entry of study.json."""
        return {"name": self.name, "changes": self.changes, "recipe": self.recipe.to_json()}


def expand(base: Recipe, arms: AnyArms) -> list[Arm]:
    """Make the arms of a study, and check every recipe.

    Raises:
        InputError: a recipe is invalid (the arm is named), two arms are the same, or there is only one.
    """
    wanted = arms.changes(base)
    if len(wanted) > MOST_ARMS:
        raise InputError(f"arms: {len(wanted)} are more than a study tells apart; {MOST_ARMS} at most")
    made: list[Arm] = []
    seen: dict[str, str] = {}
    for name, changes in wanted:
        if not name.strip() or not name.isprintable():
            raise InputError(f"arm {name!r}: no name that can be printed")
        if name in seen.values():
            raise InputError(
                f"arms: two are named {name!r}; give each value once, and recipes names of their own"
            )
        arm = _arm(base, name, changes)
        recipe = repr(sorted((arm.recipe.to_dict() | {"name": ""}).items()))
        if (other := seen.setdefault(recipe, name)) != name:
            raise InputError(f"arms {other!r} and {name!r} are the same recipe")
        made.append(arm)
    if len(made) < 2:
        raise InputError("arms: a study compares two recipes at least")
    return made


def combine(base: Recipe, chosen: Sequence[Arm]) -> Arm:
    """Make one arm, "a + b", from the changes of several.

    Raises:
        InputError: two of them change the same key, or the recipe with all changes is invalid.
    """
    for one, other in itertools.combinations(chosen, 2):
        if key := _conflict(one.changes, other.changes):
            raise InputError(f"{one.name!r} and {other.name!r} both change {key}: one of them at a time")
    changes: Changes = functools.reduce(changed, (arm.changes for arm in chosen), {})
    return _arm(base, " + ".join(arm.name for arm in chosen), changes)


def _conflict(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return a key that both change; empty if none. A change of a table's kind changes all of the table."""
    for key in (key for key in one if key in other):
        inner, also = one[key], other[key]
        if not isinstance(inner, Mapping) or not isinstance(also, Mapping) or "kind" in {*inner, *also}:
            return key
        if below := _conflict(inner, also):
            return f"{key}.{below}"
    return ""


def sparse(source: str | Recipe) -> Changes:
    """Return the values of a recipe given as an object, a file or a name.

    Raises:
        InputError: there is no such recipe.
    """
    return source.to_dict() if isinstance(source, Recipe) else read_toml(source)


def source_of(source: str | Recipe) -> str:
    """Return the name of a recipe for messages."""
    return source.name if isinstance(source, Recipe) else source


def _arm(base: Recipe, name: str, changes: Any) -> Arm:
    changes = tables_of(changes)
    if not isinstance(changes, dict):
        raise InputError(f"arm {name}: expected its changes by the keys of a recipe, found {brief(changes)}")
    values = changed(base.to_dict(), changes) | {"name": name}
    return Arm(name, from_dict(values, f"arm {name}"), changes)


def _shared(base: Mapping[str, Any]) -> Changes:
    return {key: base[key] for key in SHARED}


def _fields_arm(pairs: Mapping[str, Any]) -> Named:
    """Return the arm "key=value key=value", with its dotted keys as nested tables."""
    out: Changes = {}
    for name, value in pairs.items():
        *parents, last = name.split(".")
        inner = out
        for parent in parents:
            inner = inner.setdefault(parent, {})
            if not isinstance(inner, dict):
                raise InputError(f"arms: {name} is within {parent!r}, which has a value of its own")
        inner[last] = value
    return " ".join(f"{name}={_shown(value)}" for name, value in pairs.items()), out


def _shown(value: Any) -> Any:
    """Return a value as in an arm's name: of an object its kind, of a custom kind only the class."""
    if is_dataclass(value):
        value = tables_of(value).get("kind", value)
    return label(value) if isinstance(value, str) and ".py:" in value else value
