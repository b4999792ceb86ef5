"""Runs with trackers and without, which the tests of this folder share; nothing goes outside."""

from dataclasses import replace

import pytest
from tracked_runs import SETS, TO, lines_so_far, tracked_by, wait_until
from trackers_of_tests import Keeps
from wandb_files import keep_wandb_home

from scalerl.forecast.freeze import freeze
from scalerl.rl.config.recipe import load_recipe
from scalerl.rl.train import train


@pytest.fixture(scope="module")
def recipe():
    return load_recipe("demo", SETS)


@pytest.fixture(scope="module")
def short(recipe):
    """For what needs no forecast."""
    budget, evaluation = replace(recipe.budget, amount=12), replace(recipe.evaluation, count=4)
    return replace(recipe, budget=budget, evaluation=evaluation)


@pytest.fixture(scope="module", autouse=True)
def nobody_outside(tmp_path_factory):
    """W&B is offline and keeps its settings here; MLflow's store is a folder."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        keep_wandb_home(patch, home)
        patch.setenv("MLFLOW_TRACKING_URI", f"file:{home / 'mlruns'}")
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        yield home


@pytest.fixture(scope="module")
def plain(recipe, small_base, tmp_path_factory):
    """The run without any tracker."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    return train(recipe, folder, small_base, forecaster=freeze, evaluate_aside=False)


@pytest.fixture(scope="module")
def short_plain(short, small_base, tmp_path_factory):
    """The short run without any tracker."""
    return train(short, tmp_path_factory.mktemp("short") / "run", small_base, evaluate_aside=False)


@pytest.fixture(scope="module")
def run(recipe, small_base, tmp_path_factory):
    """The same with trackers of three kinds, and one that keeps everything."""
    folder = tmp_path_factory.mktemp("tracked") / "run"
    keeps = Keeps(folder.with_name("kept.jsonl"))
    followed = tracked_by(recipe, *TO)

    def wait(progress):
        """At the end, until nothing waits for a forecast: on a busy machine some would be left out."""
        if progress.share >= 1 and not progress.evaluated:
            wait_until(lambda: "eval/pass_rate" in last(36))

    def last(step):
        rows = [row for row in lines_so_far(keeps.file) if row.get("step") == step]
        return {name for row in rows for name in row["metrics"]}

    options = {"forecaster": freeze, "evaluate_aside": False, "progress": wait}
    return train(followed, folder, small_base, **options, trackers=[keeps])
