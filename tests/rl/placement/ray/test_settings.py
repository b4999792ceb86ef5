"""The table [cluster], and the options that set it."""

import pytest

from scalerl.errors import InputError
from scalerl.rl.config.cluster import Cluster, Fsdp2, Resources
from scalerl.rl.config.recipe import from_dict, load_recipe
from scalerl.rl.config.settings import Inline
from scalerl.rl.workers.ray.session import connected


def test_a_recipe_without_a_cluster_says_nothing_of_one():
    recipe = load_recipe("demo")
    assert recipe.cluster is None
    assert recipe.placement == Inline()
    assert "cluster" not in recipe.to_dict()


def test_a_table_of_a_recipe_and_back():
    values = ["cluster.trainers=4", "cluster.learner.kind=fsdp2", "cluster.generators=8"]
    recipe = load_recipe("demo", [*values, "cluster.verifiers=2", "cluster.verifier.cpus=4"])
    given = Cluster(generators=8, trainers=4, learner=Fsdp2(), verifiers=2, verifier=Resources(cpus=4))
    assert recipe.cluster == given
    assert (recipe.processes, recipe.devices) == (8, 12)
    assert from_dict(recipe.to_json()) == recipe


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("cluster.generators=0", "at least 1"),
        ("cluster.trainers=2", 'learner.kind "one" is one trainer'),
        ("cluster.transport.kind=pigeon", "found 'pigeon'"),
        ("cluster.timeouts.heartbeat=0", "must be positive"),
        ("cluster.generatos=3", "did you mean 'cluster.generators'"),
        ("cluster.generator.cpus=0", "one of them positive"),
        ("cluster.verifiers=-1", "must not be negative"),
        ("cluster.transport.kind=nccl cluster.generator.gpus=0", "generator.gpus = 1, or another kind"),
        (
            "cluster.transport.kind=nccl cluster.trainer.gpus=0.5 cluster.learner.kind=fsdp2",
            "trainer.gpus = 1, or another kind",
        ),
        ("cluster.transport.kind=nccl cluster.generator.gpus=0.5", "a GPU for each: generator"),
        (
            "cluster.trainers=2 cluster.learner.kind=fsdp2 cluster.trainer.gpus=0.5",
            "trainer.gpus must be 1 for several trainers",
        ),
        (
            'engine.kind=vllm engine.urls=["http://a"] cluster.generators=2',
            "generators: engine.urls names all servers",
        ),
        ("engine.kind=vllm cluster.transport.kind=gloo", "vLLM has engine.transport"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(override, complaint):
    with pytest.raises(InputError, match=complaint):
        load_recipe("demo", override.split())


def test_a_cluster_and_another_placement_contradict_each_other():
    with pytest.raises(InputError, match="leave placement out"):
        load_recipe("demo", ["cluster.generators=2", "placement.kind=local"])


def test_no_cluster_there_is_a_line():
    cluster = Cluster(address="127.0.0.1:1")
    complaint = r"no Ray cluster answers at 127.0.0.1:1 .*ray start --head"
    with pytest.raises(InputError, match=complaint), connected(cluster):
        pass


@pytest.mark.slow
def test_a_local_cluster_that_can_never_have_room_is_refused_at_once():
    cluster = Cluster(generators=60, address="local", generator=Resources(gpus=1.0))
    complaint = (
        "asks for 60 generators of 1 CPU and 1 GPU, 1 evaluation of 1 CPU and 1 GPU: 61 CPUs and 61 GPUs; "
        "there are 61 CPUs and 0 GPUs on 1 node, .*; lower cluster.generators, or have actors share a GPU "
        r"\(cluster.generator.gpus=0.5\): no other machine joins"
    )
    with pytest.raises(InputError, match=complaint), connected(cluster):
        pass
