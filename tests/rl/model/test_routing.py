"""Mixtures of experts: the load of their routers, its loss, and experts of the generator in the trainer."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import TASK, small_recipe
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from scalerl.errors import InputError
from scalerl.rl.algo.advantage import BatchStd
from scalerl.rl.algo.averaging import TokenAverage
from scalerl.rl.config.engine import Vllm
from scalerl.rl.config.settings import Inline, Local, Steps
from scalerl.rl.engine.build import load_generator
from scalerl.rl.engine.ordered import pack_rollouts, unpack_rollouts
from scalerl.rl.learner.batch import Batch, make_batch
from scalerl.rl.learner.load import load_learner
from scalerl.rl.learner.score import Scorer, packs
from scalerl.rl.model.demo_base import BaseModel, build_base
from scalerl.rl.model.packed_attention import register
from scalerl.rl.model.routing import balance_of
from scalerl.rl.tasks.chain import Demonstrations
from scalerl.rl.train import train
from scalerl.rl.types import Group

EXPERTS, MET = 4, 2


@pytest.fixture(scope="module")
def folder(save_model):
    return save_model("qwen3_moe", norm_topk_prob=True)


@pytest.fixture(scope="module")
def recipe(tiny_recipe, folder):
    return replace(tiny_recipe, model=folder, routing_replay=True)


@pytest.fixture(scope="module")
def rollouts(recipe):
    """Completions of two groups of six, in fewer slots than that, with the experts that read them."""
    generator = load_generator(recipe, recipe.model, 0, 5)
    for prompt in recipe.task.prompts("train")[:2]:
        generator.submit(prompt, 0, 6)
    return [rollout for group in generator.collect(2) for rollout in group]


def batch_of(rollouts) -> Batch:
    """All completions, each second one of them right."""
    groups = [
        Group(tuple(part), np.array([1.0, -1.0] * 3), np.array([True, False] * 3))
        for part in (rollouts[:6], rollouts[6:])
    ]
    return make_batch(groups, BatchStd(), TokenAverage(), 45, keep_truncated=True)


def test_the_load_of_experts_is_what_a_count_by_hand_gives(recipe, rollouts):
    learner = load_learner(replace(recipe, routing_replay=False), recipe.model)
    batch = batch_of([replace(rollout, expert_PLK=None) for rollout in rollouts])
    model: Any = learner.model
    counts = [[0] * EXPERTS for _ in range(2)]
    with torch.no_grad():
        for tokens, length, sampled in zip(batch.token_NT, batch.length_N, batch.sampled_NT, strict=True):
            out = model(input_ids=torch.from_numpy(tokens[None, :length]), output_router_logits=True)
            for layer, logits_TE in enumerate(out.router_logits):
                for place, logits_E in enumerate(logits_TE[:-1].tolist()):
                    if sampled[place + 1]:  # the token that is predicted there is trained
                        for expert in sorted(range(EXPERTS), key=lambda e: -logits_E[e])[:MET]:
                            counts[layer][expert] += 1
    stats = learner.step(batch)
    assert sum(counts[0]) == MET * stats.tokens
    even = MET * stats.tokens / EXPERTS
    assert stats.router_load_max == pytest.approx(max(max(count) for count in counts) / even)
    entropies = [-sum(n / sum(count) * math.log(n / sum(count)) for n in count if n) for count in counts]
    assert stats.router_load_entropy == pytest.approx(min(entropies) / math.log(EXPERTS))


def test_the_figures_of_an_even_load_are_one_and_of_a_collapsed_one_as_many_as_there_are_experts():
    assert balance_of(np.array([[3, 3, 3, 3]])) == (1.0, 1.0)
    assert balance_of(np.array([[3, 3, 3, 3], [0, 12, 0, 0]])) == (4.0, 0.0)
    assert math.isnan(balance_of(np.zeros((2, 4)))[0])


def test_recorded_experts_are_those_of_the_models_own_pass(recipe, rollouts):
    model: Any = load_learner(recipe, recipe.model).model
    for rollout in rollouts:
        token_T = torch.from_numpy(np.concatenate([rollout.prompt_T, rollout.token_T]))[None, :-1]
        with torch.no_grad():
            logits = model(input_ids=token_T, output_router_logits=True).router_logits
        expected = torch.stack([logits_TE.topk(MET).indices for logits_TE in logits], 1)
        assert rollout.expert_PLK.dtype == np.uint8
        assert np.array_equal(rollout.expert_PLK, expected.numpy())


def plant_ties(part, seed):
    """Give all experts of a layer the same score, but for a noise that decides."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in part.model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                weight.copy_(weight[:1] + 1e-5 * torch.randn_like(weight))


def test_with_the_generators_experts_the_trainer_has_its_log_probabilities(recipe):
    """Router noise: all experts score the same but for 1e-5, by which generator and trainer differ."""
    generator = load_generator(recipe, recipe.model, 0, 5)
    plant_ties(generator, 1)
    for prompt in recipe.task.prompts("train")[:2]:
        generator.submit(prompt, 0, 6)
    batch = batch_of([rollout for group in generator.collect(2) for rollout in group])
    shifts = {}
    for given in (batch, replace(batch, expert_NTLK=None)):
        learner = load_learner(recipe, recipe.model)
        plant_ties(learner, 2)
        shifts[given is batch] = learner.step(given).logp_shift
    assert shifts[True] < 1e-3
    assert shifts[False] > 0.05


@pytest.mark.parametrize("checkpointed", [False, True])
def test_replay_is_the_same_packed_and_with_blocks_computed_again(recipe, rollouts, checkpointed):
    """The gradient of given experts that no router would choose, padded in one pass, and otherwise."""
    batch = batch_of(rollouts)
    batch = replace(batch, expert_NTLK=(batch.expert_NTLK + np.uint8(1)) % EXPERTS)
    settings = replace(recipe.learner, activation_checkpointing=checkpointed)
    found = []
    for one in (recipe, replace(recipe, learner=settings, batch=replace(recipe.batch, micro=3))):
        learner = load_learner(one, recipe.model)
        if one is not recipe and not checkpointed:
            assert packs(learner.model, register())
            learner.score = Scorer(learner.model, 1.0, True, packed=True, kernels=False)
        found.append(learner.step(batch))
    for name, value in vars(found[0]).items():
        assert getattr(found[1], name) == pytest.approx(value, rel=1e-4, nan_ok=True), name


def test_a_balance_loss_is_added_where_the_models_config_asks_for_it(save_model, recipe, rollouts):
    asking = save_model("qwen3_moe", norm_topk_prob=True, output_router_logits=True, router_aux_loss_coef=0.5)
    batch = replace(batch_of(rollouts), expert_NTLK=None)
    off = replace(recipe, routing_replay=False, batch=replace(recipe.batch, micro=12))
    with_it, without = load_learner(off, asking), load_learner(off, recipe.model)
    model: Any = with_it.model
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(batch.token_NT[:, :-1]), use_cache=False).router_logits
    mask = torch.from_numpy(batch.sampled_NT[:, 1:])
    expected: Any = load_balancing_loss_func(logits, EXPERTS, MET, mask)
    stats = with_it.step(batch), without.step(batch)
    assert stats[0].loss - stats[1].loss == pytest.approx(0.5 * float(expected), rel=1e-4)
    assert stats[0].grad_norm != pytest.approx(stats[1].grad_norm, rel=1e-3)


def test_experts_are_kept_with_the_rollouts_of_a_checkpoint(rollouts):
    for before, after in zip(rollouts, unpack_rollouts(pack_rollouts(rollouts)), strict=True):
        assert after.expert_PLK is not None
        assert np.array_equal(before.expert_PLK, after.expert_PLK)


@pytest.fixture(scope="module")
def small_mixture(tmp_path_factory):
    spec = BaseModel(
        Demonstrations(TASK, 6), hidden_size=32, experts=8, max_careful_steps=80, imperfect_steps=20
    )
    return build_base(spec, tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize(("steps", "placement"), [(50, Inline()), (2, Local())])
def test_a_small_mixture_trains(small_mixture, tmp_path, steps, placement):
    recipe = small_recipe(
        small_mixture, budget=Steps(steps), routing_replay=True, placement=placement, zero_variance="keep"
    )
    how = {"model": str(small_mixture), "evaluate_aside": False}
    if placement == Inline():  # go on in the middle, with what was in flight, experts included
        train(recipe, tmp_path / "run", until=steps // 2, **how)
    record = train(recipe, tmp_path / "run", resume=True, **how)
    rows = record.steps()
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    for row in rows:
        assert 1 <= row["router_load_max"] <= 8 / MET
        assert 0 < row["router_load_entropy"] <= 1
    probed = [row["logp_gap"] for row in rows if "logp_gap" in row]
    assert probed
    assert max(probed) < 1e-4


def test_replay_is_refused_where_there_is_nothing_to_replay(tiny_recipe, tmp_path):
    recipe = replace(tiny_recipe, routing_replay=True)
    with pytest.raises(
        InputError, match=r"^routing_replay: .* has no routers that can be replayed"
    ) as caught:
        train(recipe, tmp_path / "run", recipe.model, evaluate_aside=False)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="routing_replay: vLLM does not return the experts"):
        replace(recipe, placement=Local(), engine=Vllm())
