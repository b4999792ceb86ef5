"""A Ray cluster of simulated nodes on this machine."""

import logging
import os
import time
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import psutil
import ray
from ray.cluster_utils import Cluster

from scalerl.rl.loop.pipeline import Pipeline
from scalerl.rl.loop.prompt_pool import PromptPool
from scalerl.rl.model.causal_lm import load_tokenizer
from scalerl.rl.placement.ray.parts import RayParts


class Nodes:
    """Nodes of one Ray cluster; the head has no room."""

    def __init__(self, cpus, gpus=()):
        self._cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
        )
        self.address = self._cluster.address
        gpus = gpus or (0,) * len(cpus)
        self.nodes = [self._cluster.add_node(num_cpus=n, num_gpus=m) for n, m in zip(cpus, gpus, strict=True)]
        ray.init(address=self.address, log_to_driver=False, logging_level=logging.ERROR)

    def add(self, cpus):
        self.nodes.append(self._cluster.add_node(num_cpus=cpus))

    def kill_node_of(self, words):
        """Kill the node that a message calls so: "node ADDRESS (ID)"."""
        (node,) = [node for node in self.nodes if node.node_id[:8] in words]
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def kill_head(self, *kinds):
        """Kill processes of the head ("gcs_server", "raylet"), after leaving the cluster; when that was."""
        ray.shutdown()  # it would end this process too
        for kind in kinds:
            for info in self._cluster.head_node.all_processes[kind]:
                info.process.kill()
        return time.monotonic()

    def ended(self, processes):
        """Whether all of these have; and see to it that nodes which have ended are no zombies, which their
        actors take for alive."""
        for node in (self._cluster.head_node, *self.nodes):
            for infos in node.all_processes.values():
                for info in infos:
                    info.process.poll()
        return not psutil.wait_procs(processes, timeout=0)[1]

    def close(self):
        ray.shutdown()
        self._cluster.shutdown()


@contextmanager
def simulated(*cpus, gpus=()):
    nodes = Nodes(cpus, gpus)
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


class Run:
    """The loop of a recipe over parts on a cluster."""

    def __init__(self, recipe, model, closing, folder="."):
        parts = RayParts(recipe, str(model), closing, folder)
        self.timeline = parts.timeline
        self.learner: Any = parts.learner()
        self.generator: Any = parts.generator(self.learner, 0)
        self.pool = PromptPool(recipe.task.prompts("train"), recipe.curriculum, recipe.seed)
        self.verifier = parts.verifier(load_tokenizer(model))
        self.pipeline = Pipeline(recipe, self.pool, self.generator, self.learner, self.verifier.start)
