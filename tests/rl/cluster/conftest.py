"""A cluster of simulated nodes on this machine, and small runs on it."""

import logging
import os
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

from scalerl.rl.cluster.settings import Cluster, Patience
from scalerl.rl.recipe import load_recipe

PATIENT = Patience(start=240, silence=60)
"""Of tests in which nothing hangs, on a machine that may be busy."""


class Nodes:
    """Nodes of one Ray cluster; the head has no room."""

    def __init__(self, cpus):
        import ray
        from ray.cluster_utils import Cluster as Simulated

        self._cluster = Simulated(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
        )
        self.address = self._cluster.address
        self.nodes = [self._cluster.add_node(num_cpus=n) for n in cpus]
        ray.init(address=self.address, log_to_driver=False, logging_level=logging.ERROR)

    def add(self, cpus):
        self.nodes.append(self._cluster.add_node(num_cpus=cpus))

    def kill_node_of(self, words):
        """Kill the node that a message calls so: "node ADDRESS (ID)"."""
        (node,) = [node for node in self.nodes if node.node_id[:8] in words]
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self):
        import ray

        ray.shutdown()
        self._cluster.shutdown()


@contextmanager
def simulated(*cpus):
    nodes = Nodes(cpus)
    try:
        yield nodes
    finally:
        nodes.close()


def until(condition, seconds=180.0, what="it"):
    """Poll for `condition`, which is returned once it holds."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"{what} did not happen within {seconds:g} s")


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


class Run:
    """The loop of a recipe over parts on a cluster."""

    def __init__(self, recipe, model, closing):
        from scalerl.rl.cluster.parts import RayParts
        from scalerl.rl.model import load_tokenizer
        from scalerl.rl.pipeline import Pipeline
        from scalerl.rl.pool import PromptPool
        from scalerl.rl.setup import load_verifier

        parts = RayParts(recipe, str(model), closing)
        self.timeline = parts.timeline
        self.learner = parts.learner()
        self.generator = parts.generator(self.learner, 0)
        self.pool = PromptPool(recipe.task.prompts("train"), recipe.curriculum, recipe.seed)
        judge = load_verifier(recipe, load_tokenizer(model)).judge
        self.pipeline = Pipeline(recipe, self.pool, self.generator, self.learner, judge)


@pytest.fixture
def start(small_base):
    """A function that starts the loop of a recipe on the cluster that is connected to."""
    with ExitStack() as closing:
        yield lambda recipe: Run(recipe, small_base, closing)
