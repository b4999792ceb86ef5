"""Small runs on a cluster."""

from contextlib import ExitStack
from dataclasses import replace

import pytest

from ray_nodes import Run
from scalerl.rl.cluster.settings import Cluster, Patience
from scalerl.rl.recipe import load_recipe

PATIENT = Patience(start=240, silence=60)
"""Of tests in which nothing hangs, on a machine that may be busy."""


@pytest.fixture(scope="session")
def recipe():
    """The demonstration, small: 4 groups of 8 a step."""
    small = [
        *("task.k_max=2", "task.heldout_per_length=40", "context.prompt=6", "context.thinking=4"),
        *("length.low=3", "length.high=4", "batch.prompts=4", "batch.samples=8", "rows=96"),
        *("optimiser.lr=3e-4", "budget.kind=steps", "budget.amount=20", "evaluation.count=4"),
        *("evaluation.samples=2", "schedule.k=4", "checkpoint.steps=5"),
    ]
    return replace(load_recipe("demo", small), cluster=Cluster(generators=2, patience=PATIENT))


@pytest.fixture
def start(small_base):
    """A function that starts the loop of a recipe on the cluster that is connected to."""
    with ExitStack() as closing:
        yield lambda recipe: Run(recipe, small_base, closing)
