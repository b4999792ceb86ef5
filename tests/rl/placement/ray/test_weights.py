"""Weights in Ray's object store, and who fetches what from where."""

import threading
from contextlib import ExitStack
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import GetTimeoutError, OwnerDiedError
from ray.experimental import get_object_locations
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from ray_nodes import simulated

from scalerl.errors import LearnerLostError
from scalerl.rl.loop.progress import Activities
from scalerl.rl.model.weights import WeightStream
from scalerl.rl.placement.ray.parts import RayParts
from scalerl.rl.sync import ray_weights
from scalerl.rl.sync.ray_weights import ObjectStore, StoredWeights, put
from scalerl.rl.types import TensorSpec

N = 12


@ray.remote(num_cpus=0.1)
class Receiver:
    def fetch(self, parcel):
        """Names in the order in which they were fetched, and the sum of each."""
        return [(name, float(weight.double().sum()), str(weight.dtype)) for name, weight in parcel.fetch()]


@pytest.mark.slow
def test_nodes_begin_with_different_buckets_and_each_has_a_copy_to_pass_on():
    # Whole numbers up to 256 are exact in bfloat16, and a sum in float32 would round the last.
    weights = WeightStream.of(
        {f"layer.{i}": torch.full((600, 1200), i, dtype=torch.bfloat16) for i in range(N)}
    )
    with simulated(1, 1, 1, 1) as nodes:
        ids = [node.node_id for node in nodes.nodes]
        on = [NodeAffinitySchedulingStrategy(node_id, soft=False) for node_id in [*ids, ids[0]]]
        actor: Any = Receiver
        receivers = [actor.options(scheduling_strategy=strategy).remote() for strategy in on]
        transport = ObjectStore(bucket_mib=1.0, seconds=60)
        transport.publish(weights, 3)
        refs = [ref for _, ref in transport.current._buckets]
        assert len(refs) == N
        parcels = transport.for_all(range(len(receivers)), 3)
        found = ray.get([r.fetch.remote(p) for r, p in zip(receivers, parcels, strict=True)], timeout=120)
        for names in found:
            assert {name: total for name, total, _ in names} == {
                f"layer.{i}": i * 720_000.0 for i in range(N)
            }
            assert {dtype for *_, dtype in names} == {"torch.bfloat16"}
        first = [int(names[0][0].split(".")[1]) for names in found]
        assert first == [int(node_id, 16) % N for node_id in [*ids, ids[0]]]
        # Of two receivers on one node the second finds what the first has brought.
        places = [set(where["node_ids"]) for where in get_object_locations(refs).values()]
        assert all(set(ids) <= at for at in places)
        assert all(len(at) == len(ids) + 1 for at in places)


@pytest.mark.parametrize(
    "error", [OwnerDiedError("ref", None, "call site"), GetTimeoutError("not within 3 s")]
)
def test_weights_that_went_with_their_learner_say_so(monkeypatch, error):
    def get(ref, timeout):
        raise error

    monkeypatch.setattr(ray_weights.ray, "get", get)
    monkeypatch.setattr(ray_weights.ray, "put", lambda value: value)
    stored = StoredWeights([((TensorSpec("a", (2,), "float32"),), "ref")], 3.0)
    for fetch in (dict, lambda weights: list(weights.buckets())):
        with pytest.raises(LearnerLostError, match="weights do not come from the learner"):
            fetch(stored)


@pytest.mark.slow
def test_an_evaluation_of_weights_that_are_gone_is_not_tried_again(recipe, small_base):
    """Their learner is lost: the run goes back to its checkpoint."""

    @ray.remote(num_cpus=0.1)
    class Rank:
        def put(self):
            return put({"a": torch.zeros(300_000)})

    with simulated(1, 3), ExitStack() as closing:
        parts = RayParts(recipe, str(small_base), closing, ".")
        evaluate = parts.evaluate(threading.Event(), Activities())
        actor: Any = Rank
        rank = actor.remote()
        stored = StoredWeights([ray.get(rank.put.remote())], 60.0)
        ray.kill(rank)
        with pytest.raises(LearnerLostError, match="do not come from the learner"):
            evaluate(stored, 0).result(timeout=120)
        with pytest.raises(LearnerLostError, match="do not come from the learner"):
            dict(stored)
