"""Which runs are of one recipe: those whose config.json has one, less the seed and the name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from scalerl.errors import InputError
from scalerl.record import RunRecord

Run = TypeVar("Run")


def by_recipe(
    runs: Sequence[Run],
    record: Callable[[Run], RunRecord | None],
    path: Callable[[Run], str],
    named: Mapping[str, list[Run]] | None = None,
) -> dict[str, list[Run]]:
    """The groups that are `named`, then runs by their recipes; a run without one is a recipe by itself.

    `record` is that of a run, where it has one, and `path` tells runs apart.

    Raises:
        InputError: two groups would have one name.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(recipe_key(record(run), path(run)), []).append(run)
    recipes = dict(named or {})
    for members in groups.values():
        name = _name(record(members[0]), path(members[0]))
        if name in recipes:  # another recipe of the same name
            name = path(members[0])
        if name in recipes:
            raise InputError(f"{name}: given twice; name the groups apart with --group NAME=RUN,RUN")
        recipes[name] = members
    return recipes


def recipe_key(record: RunRecord | None, alone: str) -> str:
    """What runs of one recipe have in common, by their config.json; `alone` where that does not say."""
    recipe = record.config.get("recipe") if record else None
    if not isinstance(recipe, dict):
        return alone
    return json.dumps(
        {key: value for key, value in recipe.items() if key not in ("seed", "name")}, sort_keys=True
    )


def _name(record: RunRecord | None, path: str) -> str:
    name = record.config.get("name") if record else None
    return name if isinstance(name, str) and name else Path(path).stem
