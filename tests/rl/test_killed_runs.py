"""Runs of every placement, killed at random moments and resumed: their records are what
docs/reference/run-folder.md says, at their end and after each kill."""

import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest
from killed_runs import killed_and_resumed, steps_of, trains
from record_checker import check
from small_runs import small_recipe

from scalerl.forecast.freeze import freeze
from scalerl.rl.algo.schedule import OffPolicy
from scalerl.rl.config.settings import Evaluation, Local, Steps

STEPS = 40


@pytest.fixture(scope="module")
def recipe(guesser):
    evaluation = Evaluation(count=20, samples=2, forecast_at=(0.5, 0.75))
    return small_recipe(guesser, budget=Steps(STEPS), evaluation=evaluation)


def is_sound(start, folder, kills, seed, steps=STEPS):
    """Kill and resume a run, and check its record after each kill and at its end."""

    def check_what_is_there():
        if (folder / "config.json").exists():
            assert check(folder, killed=True) == []

    killed_at = killed_and_resumed(start, folder, steps, kills, random.Random(seed), check_what_is_there)
    assert check(folder) == []
    assert steps_of(folder) == steps
    assert len(killed_at) == kills
    assert any(killed_at)


def test_an_inline_run(recipe, tmp_path):
    folder = tmp_path / "run"
    is_sound(lambda: trains(recipe, folder, evaluate_aside=False, forecaster=freeze), folder, 2, seed=0)


PLACEMENTS = {
    "inline": lambda recipe: recipe,
    "off-policy": lambda recipe: replace(recipe, schedule=OffPolicy(k=3)),
    "one generator": lambda recipe: replace(recipe, placement=Local(generators=1)),
    "two generators": lambda recipe: replace(recipe, placement=Local(generators=2), decode_slots=5),
}


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_run_with_its_processes(recipe, tmp_path, placement):
    there, folder = PLACEMENTS[placement](recipe), tmp_path / "run"
    is_sound(lambda: trains(there, folder, forecaster=freeze), folder, 6, seed=1)


@pytest.mark.slow
def test_a_run_on_the_ranks_of_torchrun(recipe, tmp_path):
    folder, steps = tmp_path / "run", 30
    settings = [
        *(f"model={recipe.model}", "task.k_max=2", "task.heldout_per_length=10", "task.train_per_length=20"),
        *("context.prompt=8", "context.thinking=6", "context.answer=4", "length.low=2", "length.high=6"),
        *("batch.prompts=3", "batch.samples=6", "batch.micro=7", "schedule.k=2", "decode_slots=20"),
        *("budget.kind=steps", f"budget.amount={steps}", "evaluation.count=10", "evaluation.samples=2"),
        *("checkpoint.steps=3", "optimiser.lr=1e-3"),
    ]
    options = [word for setting in settings for word in ("--set", setting)]
    ranks = [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:0",
        "--nnodes",
        "1",
        "--nproc-per-node",
        "2",
    ]
    begin = [sys.executable, "-m", "torch.distributed.run", *ranks, "-m", "scalerl", "train"]
    command = [*begin, "demo", "-o", str(folder), "--resume", *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

    def start():
        return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    is_sound(start, folder, 2, seed=2, steps=steps)
