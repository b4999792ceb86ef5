"""Groups of runs by recipe, and the names of recipes and runs.

Runs are of one recipe if their config.json agrees in everything but the seed, the seed of a base model made
for the run (`chain-base:seed=1`), the name, and settings that do not affect the training.
"""

import json
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from scalerl.curve.seeds import MODEL_PRIOR, SEED_PRIOR, SeedPrior
from scalerl.errors import InputError, printable
from scalerl.numbers import as_mapping
from scalerl.record.folder import name_of_path
from scalerl.record.reader import UNTRAINED, RunRecord

Run = TypeVar("Run")


def by_recipe(
    runs: Sequence[Run],
    record: Callable[[Run], RunRecord | None],
    path: Callable[[Run], str],
    named: Mapping[str, list[Run]] | None = None,
) -> dict[str, list[Run]]:
    """Return the groups that are `named`, then runs by recipe; a run without a recipe is one by itself.

    A recipe has the name of its first run; if that is taken, `distinct` adds a part of the path. `record`
    returns the record of a run, if it has one, and `path` the place where it was read.

    Raises:
        InputError: two groups would have one name.
    """
    records = [record(run) for run in runs]
    names = [run_name(one, path(run)) for one, run in zip(records, runs, strict=True)]
    apart = distinct(names, [path(run) for run in runs])
    groups: dict[str, list[int]] = {}
    for place, one in enumerate(records):
        groups.setdefault(recipe_key(one, apart[place]), []).append(place)
    recipes = dict(named or {})
    for key, places in groups.items():
        name = apart[places[0]]
        if key != name:  # it is not by itself
            name = names[places[0]]
        if named and name in named:
            raise InputError(f"--group {name} has the name of a run that is not in it: call it otherwise")
        if name in recipes:
            name = apart[places[0]]
        if name in recipes:
            raise InputError(f"{name}: two recipes have this name; name them apart with --group NAME=RUN,RUN")
        recipes[name] = [runs[place] for place in places]
    return recipes


def recipe_key(record: RunRecord | None, alone: str) -> str:
    """Return the key of a run's recipe, from its config.json; `alone` if that has no recipe."""
    recipe = record.config.get("recipe") if record else None
    if not isinstance(recipe, dict):
        return alone
    trained = {key: value for key, value in recipe.items() if key not in ("seed", "name", *UNTRAINED)}
    trained["model"] = _without_seed(recipe.get("model"))
    return json.dumps(trained, sort_keys=True)


def seed_prior(records: Iterable[RunRecord | None]) -> SeedPrior:
    """Return the prior of seed effects: wider if some runs also differ by the seed of their base model."""
    models = [as_mapping(one.config.get("recipe")).get("model") for one in records if one]
    made = {_without_seed(model, seed="0") for model in models}  # `chain-base` is `chain-base:seed=0`
    return MODEL_PRIOR if len(made) > len({_without_seed(model) for model in models}) else SEED_PRIOR


def _without_seed(model: object, seed: str = r"\d+") -> str:
    # Other options, above all its size, make another recipe. A config.json may hold anything.
    return re.sub(rf"(?<=[:,])seed={seed}(,|$)", "", str(model)).rstrip(":,")


def run_name(record: RunRecord | None, path: str) -> str:
    """Return the name of a run, or of its file for a table, which has no record."""
    return record.name if record is not None else name_of_path(path)


def distinct(names: Sequence[str], paths: Sequence[str]) -> list[str]:
    """Return the names, equal ones with as much of their paths as makes them distinct: a/evals, or name (a).

    One that is named after its file or folder has the names of those above it before its own.
    """
    found = list(names)
    for name in {name for name in names if names.count(name) > 1}:
        places = [place for place, other in enumerate(names) if other == name]
        parts = [Path(paths[place]).parts for place in places]
        # One log may hold two runs of one name: then numbers tell them apart.
        for depth in range(1, max(map(len, parts)) + 1):
            ends = [printable("/".join(part[-depth:])) for part in parts]
            if len(set(ends)) == len(ends):
                break
        else:
            ends = [f"{number}" for number in range(1, len(places) + 1)]
        for place, end in zip(places, ends, strict=True):
            named = (one for one in (end, end.rpartition(".")[0]) if one.endswith(f"/{name}"))
            found[place] = next(named, f"{name} ({end})")
    if len(set(found)) < len(found):  # a name made distinct is already that of another run
        return [f"{name} ({number})" for number, name in enumerate(names, 1)]
    return found


def seeds_of(recipes: Mapping[str, Sequence[tuple[str, RunRecord | None]]]) -> dict[str, list[Hashable]]:
    """Return the seed of every run from its config.json, with its base model if there are several.

    Runs are pairs of a path, which errors name, and a record.

    Raises:
        InputError: a run has no seed, or two runs of a recipe have the same.
    """
    configs = {path: record.config if record else {} for of in recipes.values() for path, record in of}
    models = {path: as_mapping(config.get("model")).get("path") for path, config in configs.items()}
    grouped = len(set(models.values())) > 1
    blocks: dict[str, list[Hashable]] = {}
    for name, runs in recipes.items():
        of_recipe = blocks.setdefault(name, [])
        for path, _ in runs:
            seed = configs[path].get("seed")
            if isinstance(seed, bool) or not isinstance(seed, int):
                raise InputError(f"{path}: has no seed in a config.json, so --paired cannot pair it")
            block = (models[path], seed) if grouped else seed
            if block in of_recipe:
                raise InputError(f"{path}: is the second run of {name} with seed {seed}; --paired needs one")
            of_recipe.append(block)
    return blocks


def seeds_if_known(
    recipes: Mapping[str, Sequence[tuple[str, RunRecord | None]]],
) -> dict[str, list[Hashable]] | None:
    """Return `seeds_of`, or None if a run has no seed of its own."""
    try:
        return seeds_of(recipes)
    except InputError:
        return None
