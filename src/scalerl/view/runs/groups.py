"""Runs of a chart in groups: by recipe, and by every key in which their recipes differ, with mean curves.

The mean curve of a group is that of its recipe over seeds, their variance included, as `compare` draws it.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scalerl.errors import InputError
from scalerl.forecast.recipes import recipe_key, seed_prior
from scalerl.forecast.sides import all_described, draw_recipe, given_family
from scalerl.jsonl import flat
from scalerl.numbers import DASH, as_mapping
from scalerl.record.reader import UNTRAINED, RunRecord
from scalerl.view.facts.shown import RunGroup, ShownRun

_MOST_KEYS = 40
"""Keys of recipes that are kept of every run, to filter by."""
_MOST_DRAWN = 300
"""Runs times groupings up to which groups have mean curves, which take 20 ms a run."""


def recipe_groups(
    runs: Sequence[ShownRun], names: Mapping[str, Sequence[str]] | None = None
) -> list[RunGroup]:
    """Return runs by recipe, with mean curves; a recipe has the name of its first run.

    Args:
        runs: the runs of a chart.
        names: names of runs by the name of their group, instead of the recipes of config.json; a run in none
            of them is a group of its own.
    """
    if names is None:
        keys = [recipe_key(run.record, run.name) for run in runs]
        first = {key: run.name for key, run in reversed(list(zip(keys, runs, strict=True)))}
        return _grouped(runs, [first[key] for key in keys])
    of = {member: name for name, members in names.items() for member in members}
    return _grouped(runs, [of.get(run.name, run.name) for run in runs])


def groupings(
    runs: Sequence[ShownRun], first: Sequence[RunGroup]
) -> Iterator[tuple[str, Sequence[RunGroup]]]:
    """Yield every way to group the runs of a chart, by its name; the one by recipe, `first`, comes first.

    A key of the recipe is left out where it groups the runs as one before it does, or has another value for
    every run.
    """
    yield "recipe", first
    of = {run.name: group.name for group in first for run in group.runs}
    seen = {_partition(runs, [of[run.name] for run in runs])}
    for key, text_R in recipe_values(runs).items():
        partition = _partition(runs, text_R)
        if key != "seed" and partition not in seen and len(set(text_R)) < len(runs):
            seen.add(partition)
            yield key, _grouped(runs, text_R, len(runs) * len(seen) <= _MOST_DRAWN)


def recipe_values(runs: Sequence[ShownRun]) -> dict[str, list[str]]:
    """Return the values of every key in which the recipes of runs differ, one for each run."""
    recipes = [recipe_of(run.record) for run in runs]
    keys = list(dict.fromkeys(key for recipe in recipes for key in recipe))
    found = {key: [recipe.get(key, DASH) for recipe in recipes] for key in keys}
    varying = {key: text_R for key, text_R in found.items() if len(set(text_R)) > 1}
    return dict(list(varying.items())[:_MOST_KEYS])


def recipe_of(record: RunRecord | None) -> dict[str, str]:
    """Return the recipe of a run as dotted keys and texts; of a foreign run its trainer's configuration."""
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


def names_by(texts: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the names that come with every text, from pairs of (name, text)."""
    found: dict[str, list[str]] = {}
    for name, text in texts:
        found.setdefault(text, []).append(name)
    return found


def _partition(runs: Sequence[ShownRun], text_R: Sequence[str]) -> frozenset[frozenset[str]]:
    members = names_by((run.name, text) for run, text in zip(runs, text_R, strict=True))
    return frozenset(map(frozenset, members.values()))


def _grouped(runs: Sequence[ShownRun], name_R: Sequence[str], drawn: bool = True) -> list[RunGroup]:
    of = {run.name: run for run in runs}
    members = names_by(zip(of, name_R, strict=True))
    groups = [RunGroup(name, tuple(of[one] for one in names)) for name, names in members.items()]
    return _with_draws(groups) if drawn else groups


def _with_draws(groups: Sequence[RunGroup]) -> list[RunGroup]:
    """Return the groups with the mean curves of those of several runs, all of which a curve describes."""
    fits = {group.name: group.fits for group in groups if group.fits}
    prior = seed_prior(run.record for group in groups for run in group.runs)
    given: Any = functools.cache(lambda family: given_family(fits, prior, family))
    found = []
    for group in groups:
        own = group.fits
        sound = len(own) > 1 and all_described(own) and len(group.compute_N) > 0
        found.append(RunGroup(group.name, group.runs, draw_recipe(own, group.name, given) if sound else None))
    return found
