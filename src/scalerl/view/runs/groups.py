"""Runs of a chart in groups: by recipe, and by every key in which their recipes differ, with mean curves.

The mean curve of a group is that of its recipe over seeds, including their variance, as in `compare`.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from scalerl.errors import InputError
from scalerl.forecast.recipes import recipe_key, seed_prior
from scalerl.forecast.sides import all_described, draw_recipe, given_family
from scalerl.jsonl import flat
from scalerl.numbers import DASH, as_mapping
from scalerl.record.reader import UNTRAINED, RunRecord
from scalerl.view.facts.shown import RunGroup, ShownRun

T = TypeVar("T")
_MOST_KEYS = 40
"""Most keys of recipes that are kept for every run, for filters."""
_MOST_DRAWN = 300
"""Most runs times groupings for which groups have mean curves, which take 20 ms per run."""


def recipe_groups(runs: Sequence[ShownRun]) -> list[RunGroup]:
    """Return runs by the recipe in config.json, with mean curves; a recipe has the name of its first run."""
    recipes = grouped((run, recipe_key(run.record, run.name)) for run in runs)
    return with_draws({members[0].name: members for members in recipes.values()})


def groupings(
    runs: Sequence[ShownRun], first: Sequence[RunGroup]
) -> Iterator[tuple[str, Sequence[RunGroup]]]:
    """Yield every way to group the runs of a chart, with its name; that by recipe, `first`, comes first.

    A key of the recipe is left out if it groups the runs like an earlier one, or has a different value for
    every run.
    """
    yield "recipe", first
    seen = {frozenset(frozenset(group.runs) for group in first)}
    for key, text_R in recipe_values(runs).items():
        members = grouped(zip(runs, text_R, strict=True))
        partition = frozenset(map(frozenset, members.values()))
        if key != "seed" and partition not in seen and len(members) < len(runs):
            seen.add(partition)
            yield key, with_draws(members, len(runs) * len(seen) <= _MOST_DRAWN)


def recipe_values(runs: Sequence[ShownRun]) -> dict[str, list[str]]:
    """Return the values of every key in which the recipes of runs differ, one for each run."""
    recipes = [recipe_of(run.record) for run in runs]
    keys = list(dict.fromkeys(key for recipe in recipes for key in recipe))
    found = {key: [recipe.get(key, DASH) for recipe in recipes] for key in keys}
    varying = {key: text_R for key, text_R in found.items() if len(set(text_R)) > 1}
    return dict(list(varying.items())[:_MOST_KEYS])


def recipe_of(record: RunRecord | None) -> dict[str, str]:
    """Return the recipe of a run as dotted keys and texts; for a foreign run, its trainer's configuration."""
    config = record.config if record is not None else {}
    tree = as_mapping(config.get("recipe")) or as_mapping(config.get("trainer_config"))
    try:
        leaves = flat({key: value for key, value in tree.items() if key not in ("name", *UNTRAINED)})
    except InputError:  # too many to choose from
        leaves = {}
    found = {key: str(value) for key, value in leaves.items()}
    if path := as_mapping(config.get("model")).get("path"):
        found["model"] = Path(str(path)).name
    return found


def grouped(pairs: Iterable[tuple[T, str]]) -> dict[str, list[T]]:
    """Group pairs of (value, text) by text."""
    found: dict[str, list[T]] = {}
    for value, text in pairs:
        found.setdefault(text, []).append(value)
    return found


def with_draws(recipes: Mapping[str, Sequence[ShownRun]], drawn: bool = True) -> list[RunGroup]:
    """Return groups by name, with mean curves for groups of several runs that are all described by a curve.

    With `drawn` off, no group has one.
    """
    groups = [RunGroup(name, tuple(members)) for name, members in recipes.items()]
    fits = {group.name: group.fits for group in groups if group.fits}
    prior = seed_prior(run.record for group in groups for run in group.runs)
    given: Any = functools.cache(lambda family: given_family(fits, prior, family))
    found = []
    for group in groups:
        own = group.fits
        sound = drawn and len(own) > 1 and all_described(own) and len(group.compute_N) > 0
        found.append(replace(group, draws=draw_recipe(own, group.name, given)) if sound else group)
    return found
