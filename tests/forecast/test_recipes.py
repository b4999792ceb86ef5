"""Which runs are seeds of one recipe, by their config.json."""

from pathlib import Path

import pytest

from scalerl.curve.seeds import MODEL_PRIOR, SEED_PRIOR
from scalerl.forecast.recipes import by_recipe, seed_prior
from scalerl.record.reader import RunRecord


def groups(*recipes):
    """The names of the recipes of runs arm/seed0, arm/seed1, ..., and how many runs each has."""
    found = by_recipe(runs_of(*recipes), lambda run: run, lambda run: str(run.path))
    return {name: len(runs) for name, runs in found.items()}


def runs_of(*recipes):
    return [
        RunRecord(Path(f"arm/seed{seed}"), {"name": "arm", "recipe": recipe | {"seed": seed}}, ())
        for seed, recipe in enumerate(recipes)
    ]


@pytest.mark.parametrize(
    ("models", "found"),
    [
        (("chain-base", "chain-base:seed=0", "chain-base:seed=12"), {"arm": 3}),
        (("chain-base:seed=0,thinking=16", "chain-base:thinking=16,seed=1"), {"arm": 2}),
        (("chain-base:layers=3,seed=0,heads=2", "chain-base:layers=3,seed=1,heads=2"), {"arm": 2}),
        (("chain-base:seed=0", "chain-base:seed=1,hidden_size=128"), {"arm": 1, "arm (seed1)": 1}),
        (("chain-base:hidden_size=64", "chain-base:hidden_size=128"), {"arm": 1, "arm (seed1)": 1}),
        (("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B"), {"arm": 1, "arm (seed1)": 1}),
    ],
)
def test_base_models_that_differ_in_their_seed_alone_are_of_one_recipe(models, found):
    assert groups(*({"model": model, "lr": 1e-5} for model in models)) == found


def test_other_settings_that_train_make_another_recipe():
    assert groups({"lr": 1e-5, "health": {"probe": 1}}, {"lr": 1e-5}, {"lr": 2e-5}) == {
        "arm": 2,
        "arm (seed2)": 1,
    }


@pytest.mark.parametrize(
    ("models", "prior"),
    [
        (("chain-base:seed=0", "chain-base:seed=1", "chain-base:seed=0"), MODEL_PRIOR),
        (("chain-base:seed=0", "chain-base:seed=0"), SEED_PRIOR),
        (("chain-base", "chain-base:seed=0"), SEED_PRIOR),
        (("chain-base", "chain-base:seed=1"), MODEL_PRIOR),
        ((3, {}, [], None, "chain-base"), SEED_PRIOR),  # a damaged config.json
        (("chain-base:hidden_size=64", "chain-base:hidden_size=128"), SEED_PRIOR),
        ((), SEED_PRIOR),
    ],
)
def test_runs_from_base_models_of_several_seeds_are_expected_to_be_farther_apart(models, prior):
    assert seed_prior([None, *runs_of(*({"model": model} for model in models))]) is prior
