"""Small runs on a cluster."""

from contextlib import ExitStack
from dataclasses import replace

import pytest
from cluster_runs import SMALL
from ray_nodes import Run

from scalerl.rl.config.cluster import Cluster, ClusterTimeouts
from scalerl.rl.config.recipe import load_recipe

PATIENT = ClusterTimeouts(start=240, heartbeat=60)
"""Of tests in which nothing hangs, on a machine that may be busy."""


@pytest.fixture(scope="session")
def recipe():
    """The demonstration, small: 4 groups of 8 a step."""
    return replace(load_recipe("demo", SMALL), cluster=Cluster(generators=2, timeouts=PATIENT))


@pytest.fixture
def start(small_base):
    """A function that starts the loop of a recipe on the cluster that is connected to."""
    with ExitStack() as closing:
        yield lambda recipe: Run(recipe, small_base, closing)
