"""Which actor of a cluster gets which GPU."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from ray.exceptions import RayError
from ray_nodes import simulated

from scalerl.errors import InputError
from scalerl.rl.config.cluster import Cluster, ClusterTimeouts, Fsdp2, Resources, Transport
from scalerl.rl.config.devices import HeldDevices
from scalerl.rl.config.engine import BUILT_IN, AnyEngine, Vllm
from scalerl.rl.config.recipe import load_recipe
from scalerl.rl.placement.ray.vllm import place_on_ray
from scalerl.rl.workers.ray.backend import RayActors
from scalerl.rl.workers.ray.session import Session, connected, requests_of

SHARDED = Cluster(generators=8, trainers=4, learner=Fsdp2())


def gpus_of(cluster, there, engine: AnyEngine = BUILT_IN):
    """GPUs of each actor, by role."""
    return {role: [one.gpus for one in each] for role, each in requests_of(cluster, there, engine).items()}


@pytest.mark.parametrize(
    ("there", "generators", "evaluation"),
    [(13, [1] * 8, [1]), (12, [1] * 7 + [0.5], [0.5]), (0, [0] * 8, [0])],
)
def test_generators_trainers_and_the_evaluation_have_a_gpu_each(there, generators, evaluation):
    trainers = [min(there, 1)] * 4
    assert gpus_of(SHARDED, there) == {
        "trainers": trainers,
        "generators": generators,
        "evaluation": evaluation,
    }


def test_numbers_in_the_table_stand_as_they_are():
    cluster = replace(SHARDED, generator=Resources(gpus=0.5), verifiers=1)
    assert gpus_of(cluster, 8) == {
        "trainers": [1] * 4,
        "generators": [0.5] * 8,
        "verifiers": [0],
        "evaluation": [0.5],
    }


def test_nccl_needs_a_cluster_with_gpus():
    cluster = replace(SHARDED, transport=Transport("nccl"))
    assert gpus_of(cluster, 12) == gpus_of(SHARDED, 12)
    with pytest.raises(InputError, match=r'this cluster has none .*"nccl" needs a GPU for each'):
        requests_of(cluster, 0)


def test_workers_of_vllm_have_their_tensor_parallelism_and_evaluate():
    cluster, engine = replace(SHARDED, generators=2), Vllm(tensor_parallel=2)
    assert gpus_of(cluster, 8, engine) == {"trainers": [1] * 4, "generators": [2] * 2}
    assert gpus_of(cluster, 0, engine) == {"trainers": [0] * 4, "generators": [0] * 2}
    on_cpus = replace(cluster, generator=Resources(gpus=0))
    assert gpus_of(on_cpus, 4, engine) == {"trainers": [1] * 4, "generators": [0] * 2}
    at_urls = replace(engine, urls=("http://there:8000",))
    assert gpus_of(cluster, 4, at_urls) == {"trainers": [1] * 4}
    held = HeldDevices.on_cluster(cluster, engine, there=8)
    assert (held.generator, held.trainer, held.evaluator, held.apart) == (2, 1, 4, 0)


@pytest.mark.parametrize(
    ("cluster", "engine", "complaint"),
    [
        (Cluster(), Vllm(transport="ipc"), "needs workers on this machine, and Ray places them on any node"),
        (Cluster(generator=Resources(gpus=1)), Vllm(tensor_parallel=2), "vLLM's workers have engine.tensor_"),
    ],
)
def test_what_workers_of_vllm_on_any_node_cannot_have_is_refused(cluster, engine, complaint):
    with pytest.raises(ValueError, match=complaint):
        replace(load_recipe("demo"), cluster=cluster, engine=engine)


ONE, IPC = Cluster(address="local"), Vllm(transport="ipc")


def test_a_server_and_the_learner_share_a_single_gpu_which_is_counted_once():
    assert ONE.shares_gpu(IPC, 1)
    held = HeldDevices.on_cluster(ONE, IPC, 1)
    assert (held.trainer, held.generator, held.evaluator) == (0.5, 0.5, 0.5)
    apart = HeldDevices.on_cluster(ONE, IPC, 2)
    assert (apart.trainer, apart.generator, apart.evaluator) == (1, 1, 1)
    assert not replace(ONE, generators=2).shares_gpu(IPC, 1)
    assert not ONE.shares_gpu(Vllm(transport="nccl"), 1)
    assert not replace(ONE, learner=Fsdp2()).shares_gpu(IPC, 1)  # whose GPU is one that Ray gives
    assert not replace(ONE, address="auto").shares_gpu(IPC, 1)  # the worker is on another node


@pytest.mark.parametrize(
    ("generators", "engine", "complaint"),
    [
        (2, IPC, r"^2 workers .* 1 GPU each, beside 1 trainer, take 3, .* has 1: lower generators"),
        (1, Vllm(tensor_parallel=2), "lower generators, trainers or engine.tensor_parallel"),
        (1, Vllm(transport="nccl"), '.* has 1: they share one with engine.transport "auto", "file" or "ipc"'),
    ],
)
def test_what_cannot_share_a_single_gpu_is_refused_in_a_line(monkeypatch, generators, engine, complaint):
    monkeypatch.setenv("SCALERL_GPUS", "1x80")
    with pytest.raises(InputError, match=complaint), connected(replace(ONE, generators=generators), engine):
        pass


@pytest.mark.slow
def test_the_learner_shares_a_single_gpu_with_a_worker_of_vllm(monkeypatch, own_modules):
    monkeypatch.setenv("SCALERL_GPUS", "1x80")
    with connected(ONE, IPC):
        session = Session(ONE, IPC)
        assert devices(session, {"generators": 1}) == {"generators": ["0"]}
        servers = place_on_ray(session, Vllm(), "model", Path("logs"), [], Path("files"))
        session.close()
    # As with workers that are started without Ray, the weights stay in the memory of the GPU.
    assert (servers.settings.transport, servers.gpus, servers.transport) == ("ipc", ["0"], None)
    assert servers.states[0].arguments[-2:] == ["--weight-transfer-config", '{"backend": "ipc"}']


@pytest.mark.slow
def test_workers_of_vllm_have_gpus_of_one_node_each_and_weights_from_the_store(own_modules):
    cluster = replace(SHARDED, generators=3, trainers=1)
    engine = Vllm(tensor_parallel=2)
    with simulated(2, 2, 2, gpus=(2, 3, 2)):
        session = Session(cluster, engine)
        backend = RayActors(session, "generators", 60.0)
        workers = [backend.spawn(f"worker {i}", i, say_device) for i in range(3)]
        seen = [(said(worker), worker.node) for worker in workers]
        servers = place_on_ray(session, engine, "model", Path("logs"), [], Path("files"))
        session.close()
    assert len({node for _, node in seen}) == 3
    assert all(len(gpus.split(",")) == 2 for gpus, _ in seen)
    assert (servers.settings.transport, servers.gpus) == ("file", [])
    assert servers.transport is not None  # a worker's actor fetches them
    assert servers.states[2].arguments[-2:] == ["--gpu-memory-utilization", "0.85"]


@pytest.fixture
def own_modules(monkeypatch):
    """Has actors import what a test imports."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))


def say_device(channel):
    """Send the GPUs that this process sees."""
    channel.send("device", os.environ.get("CUDA_VISIBLE_DEVICES"))


def devices(session, roles):
    """The GPUs that an actor of each role sees, in order."""
    found = {}
    for role, n in roles.items():
        backend = RayActors(session, role, 60.0)
        found[role] = [backend.spawn(f"{role} {i}", i, say_device) for i in range(n)]
    return {role: [said(process) for process in processes] for role, processes in found.items()}


def said(process):
    """The first that a worker sends."""
    messages = []
    while not messages:
        messages = process.receive()
    return messages[0].value


@pytest.mark.slow
def test_actors_of_a_local_cluster_have_gpus_of_their_own(monkeypatch, own_modules):
    monkeypatch.setenv("SCALERL_GPUS", "5x80")
    cluster = Cluster(generators=3, trainers=2, learner=Fsdp2(), address="local", verifiers=1)
    with connected(cluster):
        session = Session(cluster)
        assert ray.cluster_resources()["GPU"] == 5
        roles = {"trainers": 2, "generators": 3, "evaluation": 1, "verifiers": 1}
        seen = devices(session, roles)
        session.close()
    assert sorted(seen["trainers"] + seen["generators"]) == ["0", "1", "2", "3", "4"]
    assert seen["evaluation"] == seen["generators"][-1:]
    assert seen["verifiers"] == [""]  # it has requested none, and must not use those of others
    assert not ray.is_initialized()
    with pytest.raises(RayError, match="has not been started"):
        ray.cluster_resources()  # nor does a call that comes too late start another
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


@pytest.mark.slow
def test_actors_have_no_gpu_of_the_learner_in_the_driver_and_of_vllm_their_own(monkeypatch, own_modules):
    monkeypatch.setenv("SCALERL_GPUS", "4x80")
    cluster = Cluster(address="local", verifiers=1, verifier=Resources(gpus=1))
    engine = Vllm(tensor_parallel=2)
    with connected(cluster, engine):
        session = Session(cluster, engine)
        seen = devices(session, {"verifiers": 1, "generators": 1})
        session.close()
    of_all = seen["verifiers"] + seen["generators"][0].split(",")
    assert sorted(of_all) == ["1", "2", "3"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cluster", "engine", "complaint"),
    [
        (
            SHARDED,
            BUILT_IN,
            r"asks for 4 trainers of 1 CPU and 1 GPU, 8 generators of .*12 GPUs; there are .* "
            r"8 GPUs .*; lower cluster.generators or cluster.trainers, or have actors share a GPU",
        ),
        (Cluster(generators=4), Vllm(tensor_parallel=2), r"beside 1 trainer, take 9, .* has 8: lower"),
    ],
)
def test_too_few_gpus_is_a_line_with_the_keys_to_change(monkeypatch, cluster, engine, complaint):
    monkeypatch.setenv("SCALERL_GPUS", "8x80")
    with pytest.raises(InputError, match=complaint), connected(replace(cluster, address="local"), engine):
        pass


@pytest.mark.slow
def test_gpus_that_the_driver_needs_must_not_be_rays(monkeypatch):
    monkeypatch.setenv("SCALERL_GPUS", "4x80")
    with simulated(2):
        nodes = ray.nodes()
        own = ray.get_runtime_context().get_node_id()
        for node in nodes:  # the driver's is the head, which is started without GPUs
            node["Resources"] |= {"GPU": 4.0} if node["NodeID"] == own else {}
        monkeypatch.setattr(ray, "nodes", lambda: nodes)
        timeouts = ClusterTimeouts(start=1)
        with pytest.raises(InputError, match=r'learner in the driver .*cluster.learner.kind to "fsdp2"'):
            Session(Cluster(timeouts=timeouts))
