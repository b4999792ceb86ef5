"""What is trained on a cluster of simulated nodes, with everybody there."""

import time
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import ray
from lockstep import first_difference
from ray_nodes import simulated, until
from weight_arrays import arrays, stream

from scalerl.errors import InputError
from scalerl.rl.algo.schedule import PipelineRL
from scalerl.rl.config.cluster import Cluster, ClusterTimeouts, Fsdp2, Transport
from scalerl.rl.engine.build import load_generator
from scalerl.rl.learner.load import load_learner

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def three_nodes():
    with simulated(2, 2, 2) as three:
        yield three


@pytest.fixture
def nodes(three_nodes):
    """With all of their room: what a test gave back is free a little later."""
    until(lambda: ray.available_resources().get("CPU") == 6)
    return three_nodes


@pytest.fixture
def sharded(recipe):
    cluster = replace(recipe.cluster, trainers=2, learner=Fsdp2())
    return replace(recipe, cluster=cluster)


def by_learner_alone(recipe, model, steps):
    """Loss and gradient norm of a learner of one process on the recorded batches."""
    learner = load_learner(recipe, model)
    return [(stats.loss, stats.grad_norm) for stats in (learner.step(step.batch) for step in steps)]


def overlap(lines):
    """Seconds in which a generator decoded while the learner trained."""
    spans = {role: [x for x in lines if x["role"] == role and "busy" in x] for role in ("generate", "train")}
    shared = 0.0
    for g in spans["generate"]:
        for t in spans["train"]:
            both = min(g["ended"], t["ended"]) - max(g["began"], t["began"])
            shared += max(both, 0.0) * g["busy"] / max(g["ended"] - g["began"], 1e-9)
    return shared


@pytest.mark.parametrize("transport", ["object_store", "gloo"])
def test_two_generators_and_two_ranks_on_three_nodes(nodes, sharded, small_base, start, transport):
    """They train side by side, and what they train is what one process makes of the same rollouts."""
    moving = replace(sharded.cluster, transport=Transport(transport, bucket_mib=0.05))
    recipe = replace(sharded, cluster=moving)
    run = start(recipe)
    assert len({worker.process.node for worker in run.generator._workers}) == 2
    steps, lines = [], []
    for step in islice(run.pipeline.steps(), 20):
        steps.append(step)
        lines += run.timeline.lines(step.index, step.trained_at, step.train_seconds)
    found = [(step.stats.loss, step.stats.grad_norm) for step in steps]
    np.testing.assert_allclose(found, by_learner_alone(recipe, small_base, steps), rtol=1e-5, atol=1e-5)
    assert overlap(lines) > 0
    who = {line["who"] for line in lines if line["role"] == "generate" and "busy" in line}
    came = {(line["role"], line["who"]) for line in lines if line.get("kind") == "arrived"}
    assert {("train", "trainer 0"), ("train", "trainer 1"), ("generate", "generator 0")} < came
    assert who == {"generator 0", "generator 1"}
    ages = [s.index - 1 - r.version_T for s in steps for g in s.groups for r in g.rollouts]
    assert min(a.min() for a in ages) >= 0
    assert 0 < max(a.max() for a in ages) <= recipe.schedule.max_staleness
    if transport == "gloo":
        assert run.generator._transport._group is not None
        assert "was not broadcast" not in str(run.generator.lost)
    assert not run.generator.lost


def test_in_lockstep_the_tokens_are_those_of_one_process(nodes, recipe, small_base, start, capsys):
    """Until a draw falls so near to an edge of its distribution that rounding decides."""
    recipe = replace(recipe, schedule=PipelineRL(k=0), model=str(small_base))
    run = start(recipe)
    live = run.pipeline.steps()
    alone = inline(recipe, small_base)
    n_tokens = 0
    for step, like, weights in islice(zip(live, *alone, strict=False), 12):
        for rollout, twin in pairs(step, like):
            if different := first_difference(recipe, weights, rollout, twin):
                with capsys.disabled():
                    print(f"\n{n_tokens} tokens are equal; then, in step {step.index}, {different}")
                return
            n_tokens += len(twin.token_T)
    with capsys.disabled():
        print(f"\n{n_tokens} tokens of 12 steps, all of them equal")
    assert n_tokens > 1000


def inline(recipe, model):
    """The steps of the same recipe in one process, and the weights that sampled each."""
    from scalerl.rl.loop.pipeline import Pipeline
    from scalerl.rl.loop.prompt_pool import PromptPool
    from scalerl.rl.model.causal_lm import load_tokenizer
    from scalerl.rl.verify.verifier import load_verifier

    learner = load_learner(recipe, model)
    generator = load_generator(recipe, model, recipe.seed, recipe.decode_slots)
    pool = PromptPool(recipe.task.prompts("train"), recipe.curriculum, recipe.seed)
    judge = load_verifier(recipe, load_tokenizer(model)).start
    loop = Pipeline(recipe, pool, generator, learner, judge).steps()
    steps, weights = [], []
    for _ in range(12):
        weights.append(stream(arrays(learner.weights())))
        steps.append(next(loop))
    return steps, weights


def pairs(step, like):
    for group, twins in zip(step.groups, like.groups, strict=True):
        yield from zip(group.rollouts, twins.rollouts, strict=True)


def test_no_room_is_a_line(nodes, recipe, start):
    small = replace(recipe, cluster=Cluster(generators=50, timeouts=ClusterTimeouts(start=3)))
    began = time.monotonic()
    complaint = r"asks for 50 generators of 1 CPU, .*; there are 6 .*; lower cluster.generators;"
    with pytest.raises(InputError, match=complaint):
        start(small)
    assert time.monotonic() - began < 60
