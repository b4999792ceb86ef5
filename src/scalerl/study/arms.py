"""The arms of a study: what each changes of the base recipe, made from a few lines of TOML.

    kind            arms
    arms            as listed
    leave_one_out   the base, and for every part in which another recipe differs the base with that part of it
    axis            one field, or several that move together, over their values
    sensitivity     the bound of a loss over its values, for one loss or several
    systems         whole recipes, on the task, model, lengths and budget of the base
    grid            every combination of the values of several fields

An arm is a name, and changes as `scalerl.rl.config.recipe.changed` takes them. The first one is what the
others are compared with.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from scalerl.errors import InputError
from scalerl.kinds import kind_of, label
from scalerl.rl.config.recipe import Recipe, changed, from_dict, read_toml

Changes = dict[str, Any]
Named = tuple[str, Changes]

PARTS = (
    *("schedule", "loss", "fp32_logits", "averaging", "advantage", "zero_variance"),
    *("truncated", "curriculum", "length", "kl"),
)
"""Parts of a recipe that the paper leaves out one at a time, and a few more."""
SHARED = (
    *("model", "task", "budget", "context", "end_of_thinking", "precision", "decode_slots", "placement"),
    *("evaluation", "checkpoint", "seed", "temperature", "optimiser"),
)
"""What systems are compared on: the base has its say."""
MOST_ARMS = 256
"""A study with more tells nothing apart."""


@dataclass(frozen=True)
class Listed:
    """Arms by name, each with its changes of the base; the base itself is the first arm."""

    arms: dict[str, Changes]
    kind: Literal["arms"] = "arms"

    def changes(self, base: Recipe) -> list[Named]:
        """The arms by name, and what each changes."""
        return [("base", {}), *self.arms.items()]


@dataclass(frozen=True)
class LeaveOneOutArms:
    """The base, and the base less one part at a time, which another recipe then provides."""

    without: str | Changes
    """That recipe: a file, a name, or a table with the parts."""
    parts: tuple[str, ...] = ()
    """Only these."""
    kind: Literal["leave_one_out"] = "leave_one_out"

    def changes(self, base: Recipe) -> list[Named]:
        """The arms by name, and what each changes.

        Raises:
            InputError: a part is none, or the two recipes do not differ.
        """
        return [("base", {}), *_differing_parts(base, self.without, self.parts).items()]


@dataclass(frozen=True)
class Axis:
    """One field over its values; with several fields, each value is a list with one for each of them."""

    fields: str | tuple[str, ...]
    values: tuple[Any, ...]
    kind: Literal["axis"] = "axis"

    def changes(self, base: Recipe) -> list[Named]:
        """The arms by name, and what each changes.

        Raises:
            InputError: a value that is not one for each field.
        """
        if isinstance(self.fields, str):
            return [(f"{self.fields}={value}", _nested({self.fields: value})) for value in self.values]
        arms = []
        for value in self.values:
            if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != len(self.fields):
                raise InputError(
                    f"arms.values: {value!r} is not one value for each of {len(self.fields)} fields"
                )
            pairs = dict(zip(self.fields, value, strict=True))
            arms.append((" ".join(f"{name}={v}" for name, v in pairs.items()), _nested(pairs)))
        return arms


@dataclass(frozen=True)
class SweepArms:
    """A loss, as the table of a recipe, and the values of one of its bounds."""

    loss: Changes
    bound: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class SensitivityArms:
    """How much depends on a loss's bound."""

    sweeps: tuple[SweepArms, ...]
    kind: Literal["sensitivity"] = "sensitivity"

    def changes(self, base: Recipe) -> list[Named]:
        """The arms by name, and what each changes."""
        swept = [(sweep.loss.get("kind", kind_of(base.loss)), sweep.bound) for sweep in self.sweeps]
        arms = []
        for sweep, (kind, bound) in zip(self.sweeps, swept, strict=True):
            # Two sweeps of one bound of one loss differ in what they leave it beside.
            apart = (
                {k: v for k, v in sweep.loss.items() if k != "kind"} if swept.count((kind, bound)) > 1 else {}
            )
            name = " ".join([label(str(kind)), *(f"{k}={v}" for k, v in apart.items())])
            arms += [(f"{name} {bound}={v}", {"loss": {**sweep.loss, bound: v}}) for v in sweep.values]
        return arms


@dataclass(frozen=True)
class Systems:
    """Whole recipes, by file or name, on what `SHARED` names of the base."""

    recipes: tuple[str, ...]
    kind: Literal["systems"] = "systems"

    def changes(self, base: Recipe) -> list[Named]:
        """The arms by name, and what each changes: everything that is not shared."""
        arms = []
        for source in self.recipes:
            values = read_toml(source)
            recipe = from_dict(changed(values, _shared(base.to_dict())), source)
            own = {key: value for key, value in recipe.to_dict().items() if key not in (*SHARED, "name")}
            arms.append((str(values.get("name") or Path(source).stem), own))
        return arms


@dataclass(frozen=True)
class Grid:
    """Every combination of the values of several fields."""

    values: dict[str, tuple[Any, ...]]
    kind: Literal["grid"] = "grid"

    def changes(self, base: Recipe) -> list[Named]:
        """The arms by name, and what each changes."""
        arms = []
        for combination in itertools.product(*self.values.values()):
            pairs = dict(zip(self.values, combination, strict=True))
            arms.append((" ".join(f"{name}={value}" for name, value in pairs.items()), _nested(pairs)))
        return arms


AnyArms = Listed | LeaveOneOutArms | Axis | SensitivityArms | Systems | Grid
"""The kinds of studies."""


@dataclass(frozen=True)
class Arm:
    """A recipe of a study, its seed apart, and what it changes of the base."""

    name: str
    recipe: Recipe
    changes: Changes

    def to_json(self) -> dict[str, Any]:
        """As study.json has it."""
        return {"name": self.name, "changes": self.changes, "recipe": self.recipe.to_json()}


def expand(base: Recipe, arms: AnyArms) -> list[Arm]:
    """The arms of a study, every recipe checked.

    Raises:
        InputError: a recipe that is refused (the arm is named), an arm but the first that changes nothing,
            two arms alike, or fewer than two.
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
    """The changes of several arms in one, "a + b", of which nothing is known together.

    Raises:
        InputError: two of them change the same, or what they are together is refused.
    """
    changes = _merged({arm.name: arm.changes for arm in chosen})
    return _arm(base, " + ".join(arm.name for arm in chosen), changes)


def _merged(changes: Mapping[str, Changes]) -> Changes:
    """The changes of several arms, by the names of these, in one table."""
    out: Changes = {}
    for name, own in changes.items():
        for other, others in changes.items():
            if other == name:
                break
            if key := _conflict(others, own):
                raise InputError(f"{other!r} and {name!r} both change {key}: one of them at a time")
        out = _joined(out, own)
    return out


def _conflict(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """What both change; empty where nothing. To change the kind of a table is to change all of it."""
    for key in (key for key in one if key in other):
        inner, also = one[key], other[key]
        if not isinstance(inner, Mapping) or not isinstance(also, Mapping) or "kind" in {*inner, *also}:
            return key
        if below := _conflict(inner, also):
            return f"{key}.{below}"
    return ""


def _joined(one: Changes, other: Changes) -> Changes:
    """Two tables in one, of what has no conflict."""
    both = {key: _joined(one[key], other[key]) for key in one if key in other}
    return {**one, **other, **both}


def _differing_parts(base: Recipe, without: str | Changes, parts: Sequence[str]) -> dict[str, Changes]:
    """The parts of another recipe that differ from those of the base, each as one change, by its label.

    Raises:
        InputError: a part is none, or the two recipes do not differ.
    """
    own = base.to_dict()
    if isinstance(without, str):
        found = from_dict(changed(read_toml(without), _shared(own)), without).to_dict()
    else:
        found = without
    asked = parts or tuple(part for part in PARTS if part in found)
    if unknown := [part for part in asked if part not in found or part not in own]:
        raise InputError(f"arms.parts: {unknown[0]!r} is no part of the two recipes")
    different = [part for part in asked if changed(own, {part: found[part]})[part] != own[part]]
    if not different:
        raise InputError("arms.without: that recipe does not differ from the base")
    return {_label(part, found[part]): {part: found[part]} for part in different}


def _arm(base: Recipe, name: str, changes: Changes) -> Arm:
    values = changed(base.to_dict(), changes) | {"name": name}
    return Arm(name, from_dict(values, f"arm {name}"), changes)


def _shared(base: Mapping[str, Any]) -> Changes:
    return {key: base[key] for key in SHARED}


def _nested(pairs: Mapping[str, Any]) -> Changes:
    """Dotted keys as tables."""
    out: Changes = {}
    for name, value in pairs.items():
        *parents, last = name.split(".")
        inner = out
        for parent in parents:
            inner = inner.setdefault(parent, {})
            if not isinstance(inner, dict):
                raise InputError(f"arms: {name} is within {parent!r}, which has a value of its own")
        inner[last] = value
    return out


def _label(part: str, value: Any) -> str:
    return f"{part}={label(value['kind']) if isinstance(value, Mapping) and 'kind' in value else value}"
