"""What is trained on a cluster of simulated nodes, with everybody there."""

import time
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch

from ray_nodes import simulated
from scalerl.errors import InputError
from scalerl.rl.cluster.settings import Cluster, Patience, Transport
from scalerl.rl.fsdp.settings import Fsdp2
from scalerl.rl.random import stream_keys, uniform
from scalerl.rl.schedule import PipelineRL
from scalerl.rl.setup import load_generator, load_learner

pytestmark = pytest.mark.slow
EDGE = 1e-5
"""How near to an edge of the distribution a draw may fall on either side of it by rounding alone."""


@pytest.fixture(scope="module")
def nodes():
    with simulated(2, 2, 2) as three:
        yield three


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
    spans = {role: [x for x in lines if x.get("role") == role] for role in ("generate", "train")}
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
    assert len({seat.member.node for seat in run.generator._seats}) == 2
    steps, lines = [], []
    for step in islice(run.pipeline.steps(), 20):
        steps.append(step)
        lines += run.timeline.lines(step.index, step.trained_at, step.train_seconds)
    found = [(step.stats.loss, step.stats.grad_norm) for step in steps]
    np.testing.assert_allclose(found, by_learner_alone(recipe, small_base, steps), rtol=1e-5, atol=1e-5)
    assert overlap(lines) > 0
    who = {line["who"] for line in lines if line.get("role") == "generate"}
    assert who == {"generator 0", "generator 1"}
    ages = [s.index - 1 - r.version_T for s in steps for g in s.groups for r in g.rollouts]
    assert min(a.min() for a in ages) >= 0
    assert 0 < max(a.max() for a in ages) <= recipe.schedule.max_age
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
            n = min(len(rollout.token_T), len(twin.token_T))
            differ = np.flatnonzero(rollout.token_T[:n] != twin.token_T[:n])
            if len(differ):
                at = int(differ[0])
                away = distance_from_edge(recipe, small_base, weights, twin, at)
                with capsys.disabled():
                    print(
                        f"\nfirst other token: step {step.index}, {twin.prompt.id} at {at}, {away:.1e} away"
                    )
                assert away < EDGE
                return
            n_tokens += n
    with capsys.disabled():
        print(f"\n{n_tokens} tokens of 12 steps, all of them equal")
    assert n_tokens > 1000


def inline(recipe, model):
    """The steps of the same recipe in one process, and the weights that sampled each."""
    from scalerl.rl.model import load_tokenizer
    from scalerl.rl.pipeline import Pipeline
    from scalerl.rl.pool import PromptPool
    from scalerl.rl.setup import load_verifier

    learner = load_learner(recipe, model)
    generator = load_generator(recipe, model, recipe.seed, recipe.rows)
    pool = PromptPool(recipe.task.prompts("train"), recipe.curriculum, recipe.seed)
    judge = load_verifier(recipe, load_tokenizer(model)).begin
    loop = Pipeline(recipe, pool, generator, learner, judge).steps()
    steps, weights = [], []
    for _ in range(12):
        weights.append(learner.weights())
        steps.append(next(loop))
    return steps, weights


def pairs(step, like):
    for group, twins in zip(step.groups, like.groups, strict=True):
        yield from zip(group.rollouts, twins.rollouts, strict=True)


@torch.no_grad()
def distance_from_edge(recipe, model, weights, rollout, at):
    """How far the number that decided token `at` lies from an edge of the cumulative distribution."""
    generator = load_generator(recipe, model, recipe.seed, 1)
    generator.update(weights, 0)
    tokens = torch.from_numpy(np.concatenate([rollout.prompt_T, rollout.token_T[:at]]))[None]
    logits_V = generator.model(input_ids=tokens).logits[0, -1].double()
    cdf_V = torch.softmax(logits_V / recipe.temperature, -1).cumsum(-1).numpy()
    key = stream_keys(recipe.seed, rollout.prompt.id, rollout.draw, last=[rollout.sample])
    u = float(uniform(key, np.array([at]))[0])
    return float(np.abs(cdf_V - u).min())


def test_no_room_is_a_line(nodes, recipe, start):
    small = replace(recipe, cluster=Cluster(generators=50, patience=Patience(start=3)))
    began = time.monotonic()
    with pytest.raises(InputError, match=r"asks for 50 generators of 1 CPU, .*; there are 6"):
        start(small)
    assert time.monotonic() - began < 60
