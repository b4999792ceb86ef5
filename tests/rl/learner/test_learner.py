from dataclasses import replace

import numpy as np
import pytest
import torch
from small_runs import learner_recipe
from torch import nn
from weight_arrays import arrays

from scalerl.errors import DivergedError, InputError
from scalerl.rl.algo.advantage import BatchStd
from scalerl.rl.algo.averaging import PromptAverage
from scalerl.rl.algo.loss import Cispo, Decoupled, Kl
from scalerl.rl.config.optimiser import AdamW
from scalerl.rl.config.settings import BatchSize, Steps, TokensBudget
from scalerl.rl.learner import load
from scalerl.rl.learner.batch import make_batch
from scalerl.rl.learner.learner import Learner
from scalerl.rl.learner.optimiser import new_adamw
from scalerl.rl.model.causal_lm import checkpoint_activations, load_model
from scalerl.rl.model.packed_attention import NAME
from scalerl.rl.types import Group, Reward

UNCLIPPED = AdamW(lr=1e-3, max_grad_norm=1e9)


def learner_of(folder, micro_batch=64, temperature=0.8, settings=UNCLIPPED, loss=None):
    recipe = learner_recipe(
        loss=loss or Cispo(),
        optimiser=settings,
        temperature=temperature,
        batch=BatchSize(micro=micro_batch),
    )
    return Learner(load_model(folder), recipe)


@pytest.fixture(scope="module")
def batch(llama_folder, make_generator, uneven_prompts):
    """Sampled by the very weights that the learner begins with; some completions were interrupted."""
    generator = make_generator(llama_folder, temperature=0.8)
    for prompt in uneven_prompts:
        generator.submit(prompt, 0, 4)
    groups = [
        Group.of(rollouts, [Reward(1.0 if r.token_T.sum() % 2 else -1.0, True) for r in rollouts])
        for rollouts in generator.collect(6)
    ]
    assert any(r.interrupted for g in groups for r in g.rollouts)
    batch = make_batch(groups, BatchStd(), PromptAverage(), 100)
    assert len(batch) >= 8
    return batch


def gradient_of_step(learner, batch):
    """The gradient that the optimiser of one step sees."""
    found = []

    def look(optimiser, args, kwargs):
        found.extend(p.grad.clone() for p in learner.model.parameters())

    handle = learner._optimiser.adamw.register_step_pre_hook(look)
    learner.step(batch)
    handle.remove()
    return found


def reinforce_gradient(model, batch, temperature):
    """-A grad log pi, weighed alike, one completion at a time through the model's own forward pass."""
    for token_T, weight_T, advantage, length in zip(
        batch.token_NT, batch.weight_NT, batch.advantage_N, batch.length_N, strict=True
    ):
        token_T = torch.from_numpy(token_T[:length])
        logits_TV = model(input_ids=token_T[None]).logits[0, :-1] / temperature
        nll_T = nn.functional.cross_entropy(logits_TV, token_T[1:], reduction="none")
        (advantage * nll_T * torch.from_numpy(weight_T[1:length])).sum().backward()
    return [p.grad for p in model.parameters()]


def test_on_policy_gradient_is_that_of_reinforce(llama_folder, batch):
    expected = reinforce_gradient(load_model(llama_folder), batch, temperature=0.8)
    found = gradient_of_step(learner_of(llama_folder), batch)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)
    assert max(g.abs().max() for g in found) > 1e-2  # not a comparison of zeros


@pytest.mark.parametrize("micro_batch", [1, 3, 7])
def test_the_micro_batch_does_not_change_the_gradient(llama_folder, batch, micro_batch):
    off_policy = replace(
        batch, behaviour_logp_NT=batch.behaviour_logp_NT - batch.sampled_NT * np.float32(0.5)
    )
    expected = torch.cat([g.flatten() for g in gradient_of_step(learner_of(llama_folder, 64), off_policy)])
    found = gradient_of_step(learner_of(llama_folder, micro_batch), off_policy)
    difference = torch.cat([g.flatten() for g in found]) - expected
    assert difference.abs().max() < 1e-6 * expected.norm()


@pytest.fixture
def decoupled(llama_folder, batch):
    """A function that returns a learner with a proximal policy, after one of its two steps."""

    def make(micro_batch=64):
        settings = replace(UNCLIPPED, lr=0.01, warmup_steps=1)
        learner = learner_of(llama_folder, micro_batch, settings=settings, loss=Decoupled(updates=2))
        learner.step(batch)
        return learner

    return make


def log_probs_of(model, token_T):
    logits_TV = model(input_ids=token_T[None]).logits[0, :-1] / 0.8
    return torch.log_softmax(logits_TV, -1).gather(-1, token_T[1:, None])[:, 0]


@pytest.mark.parametrize("micro_batch", [64, 3])
def test_the_proximal_policy_is_that_before_the_first_of_its_steps(
    llama_folder, batch, decoupled, micro_batch
):
    learner, before = decoupled(micro_batch), load_model(llama_folder)
    now = load_model(llama_folder)
    now.load_state_dict(learner.model.state_dict())
    clipped = 0
    for i, length in enumerate(batch.length_N):
        token_T, advantage = torch.from_numpy(batch.token_NT[i, :length]), batch.advantage_N[i]
        with torch.no_grad():
            proximal_T = log_probs_of(before, token_T)
        logp_T = log_probs_of(now, token_T)
        w_T = (proximal_T - torch.from_numpy(batch.behaviour_logp_NT[i, 1:length])).exp()
        r_T = (logp_T - proximal_T).exp()
        value_T = -w_T * torch.minimum(r_T * advantage, r_T.clamp(0.8, 1.2) * advantage)
        clipped += int((r_T > 1.2).sum() + (r_T < 0.8).sum())
        (value_T * torch.from_numpy(batch.weight_NT[i, 1:length])).sum().backward()
    assert clipped > 10
    for a, b in zip(gradient_of_step(learner, batch), now.parameters(), strict=True):
        torch.testing.assert_close(a, b.grad, atol=1e-6, rtol=1e-3)


def test_a_proximal_policy_is_resumed_and_then_replaced(llama_folder, batch, decoupled, tmp_path):
    learner, resumed = decoupled(), learner_of(llama_folder, loss=Decoupled(updates=2))
    learner.saver(tmp_path)(tmp_path)
    resumed.restore(tmp_path)
    for a, b in zip(*(gradient_of_step(one, batch) for one in (learner, resumed)), strict=True):
        assert torch.equal(a, b)
    assert learner.version == resumed.version == 2
    # From here on the policy is the proximal one, and the ratio to it 1, however far it has moved.
    alone = learner_of(llama_folder, loss=Decoupled(updates=1))
    alone.model.load_state_dict(learner.model.state_dict())
    for a, b in zip(*(gradient_of_step(one, batch) for one in (learner, alone)), strict=True):
        assert torch.equal(a, b)


def test_stats_of_a_step_on_policy_and_off(llama_folder, batch):
    stats = learner_of(llama_folder).step(batch)
    assert stats.ratio_mean == pytest.approx(1, abs=1e-5)
    assert stats.ratio_clipped == 0
    assert stats.tokens == batch.sampled_NT.sum()
    # At ratio 1 the loss is -sum of weight * A * logp.
    logp_NT = batch.behaviour_logp_NT.astype(float)
    expected = -(batch.weight_NT * batch.advantage_N[:, None] * logp_NT).sum()
    assert stats.loss == pytest.approx(expected, abs=1e-5)
    assert 0 < stats.entropy < np.log(19)
    # Behaviour half as likely: every ratio is 2, above a cap of 1.5 and below one of 3.
    twice = replace(batch, behaviour_logp_NT=batch.behaviour_logp_NT - np.float32(np.log(2)))
    for cap, clipped in [(1.5, 1), (3.0, 0)]:
        stats = learner_of(llama_folder, loss=Cispo(max_ratio=cap)).step(twice)
        assert stats.ratio_mean == pytest.approx(2, abs=1e-4)
        assert stats.ratio_clipped == clipped


def test_the_gradient_norm_is_clipped_and_recorded_unclipped(llama_folder, batch):
    norm = learner_of(llama_folder).step(batch).grad_norm
    clipped = learner_of(llama_folder, settings=replace(UNCLIPPED, max_grad_norm=norm / 4))
    gradient = gradient_of_step(clipped, batch)
    assert sum(float((g**2).sum()) for g in gradient) ** 0.5 == pytest.approx(norm / 4, rel=1e-4)


def test_the_learning_rate_warms_up_to_its_constant():
    # Warm-up over 4 steps: 1/4, 2/4, 3/4, 1, 1 of the rate.
    settings = AdamW(lr=0.8, warmup_steps=4)
    assert [settings.lr_at(step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])
    assert AdamW(lr=0.8, warmup_steps=0).lr_at(0) == 0.8


def test_a_decay_by_hand():
    # 2 steps of warm-up, then 4 from the rate to a quarter of it: by 3/16 of it a step.
    linear = AdamW(lr=1.6, warmup_steps=2, lr_scheduler="linear", min_lr_ratio=0.25)
    assert [linear.lr_at(step, 6) for step in range(9)] == pytest.approx(
        [0.8, 1.6, 1.6, 1.3, 1.0, 0.7, 0.4, 0.4, 0.4]
    )
    # cos(0), cos(60), cos(120), cos(180 degrees) = 1, 1/2, -1/2, -1
    cosine = AdamW(lr=0.8, warmup_steps=0, lr_scheduler="cosine")
    assert [cosine.lr_at(step, 3) for step in range(5)] == pytest.approx([0.8, 0.6, 0.2, 0, 0])


@pytest.mark.parametrize(
    ("kind", "floor", "name", "more"),
    [
        ("linear", 0.0, "linear", None),
        ("cosine", 0.0, "cosine", None),
        ("cosine", 0.1, "cosine_with_min_lr", {"min_lr_rate": 0.1}),
    ],
)
def test_decays_are_those_of_transformers_after_the_warm_up(kind, floor, name, more):
    from transformers import get_scheduler

    weight = nn.Parameter(torch.zeros(1))
    optimiser = torch.optim.SGD([weight], lr=0.3)
    scheduler = get_scheduler(name, optimiser, 5, 20, scheduler_specific_kwargs=more)
    found = []
    for _ in range(20):
        found.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        scheduler.step()
    settings = AdamW(lr=0.3, warmup_steps=5, lr_scheduler=kind, min_lr_ratio=floor)
    ours = [settings.lr_at(step, 20) for step in range(20)]
    # Theirs begins the warm-up at 0, and so is a step behind in it.
    assert ours[5:] == pytest.approx(found[5:])
    assert ours[:4] == pytest.approx(found[1:5])


def test_a_decay_ends_with_a_budget_in_steps_or_at_a_step_of_its_own():
    linear = AdamW(lr=1.0, warmup_steps=0, lr_scheduler="linear")
    recipe = replace(learner_recipe(), budget=Steps(4), optimiser=linear)
    assert [recipe.lr_at(step) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    own = replace(recipe, budget=TokensBudget(1e6), optimiser=replace(linear, decay_steps=2))
    assert [own.lr_at(step) for step in range(4)] == [1.0, 0.5, 0.0, 0.0]
    for changes, message in (
        ({"budget": TokensBudget(1e6)}, "a linear decay ends at a step, and a budget in tokens names none"),
        ({"optimiser": replace(linear, warmup_steps=4)}, "warmup_steps: 4 leave nothing of the 4 steps"),
        ({"optimiser": replace(linear, decay_steps=3)}, "learning rate is 0 from step 3 on"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(recipe, **changes)


def test_norms_and_biases_do_not_decay(save_model):
    model = load_model(save_model("gpt2"))
    decay = {
        id(p): group["weight_decay"]
        for group in new_adamw(AdamW(weight_decay=0.1), model.parameters()).param_groups
        for p in group["params"]
    }
    assert len(decay) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        expected = 0.0 if "bias" in name or "ln_" in name else 0.1
        assert decay[id(parameter)] == expected, name


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_model_with_dropout_is_trained_without(save_model, architecture):
    dropout = {
        "llama": {"attention_dropout": 0.5},
        "gpt2": {"attn_pdrop": 0.5, "embd_pdrop": 0.5, "resid_pdrop": 0.5},
    }[architecture]
    learner = learner_of(save_model(architecture, **dropout))
    token_MT = torch.arange(12)[None] + 3
    wanted_MT = torch.ones(1, 11, dtype=torch.bool)
    first, _ = learner.score(token_MT.numpy(), wanted_MT.numpy())
    second, _ = learner.score(token_MT.numpy(), wanted_MT.numpy())
    assert torch.equal(first, second)


def test_a_gradient_that_is_not_finite_ends_the_run_with_the_weights_as_they_were(llama_folder, batch):
    learner = learner_of(llama_folder)
    before = arrays(learner.weights())
    advantage_N = batch.advantage_N.copy()
    advantage_N[0] = np.nan
    with pytest.raises(DivergedError, match=r"step 1: the gradient is not finite"):
        learner.step(replace(batch, advantage_N=advantage_N))
    for name, weight in arrays(learner.weights()).items():
        assert np.array_equal(weight, before[name]), name


def test_steps_of_a_small_rate_are_not_lost_to_a_low_precision(save_model, batch):
    """lr 1e-5 moves no bf16 weight of size .3 by itself; the masters add the steps up."""
    folder = save_model("llama", dtype=torch.bfloat16)
    learner = learner_of(folder, settings=AdamW(lr=1e-5, warmup_steps=0, max_grad_norm=1e9))
    before = [p.detach().clone() for p in learner.model.parameters()]
    learner.step(batch)
    moved_once = sum(int((a != b).sum()) for a, b in zip(before, learner.model.parameters(), strict=True))
    for _ in range(60):
        learner.step(batch)
    moved = sum(int((a != b).sum()) for a, b in zip(before, learner.model.parameters(), strict=True))
    total = sum(p.numel() for p in before)
    assert moved_once < 0.2 * total
    assert moved > 0.5 * total
    assert {p.dtype for p in learner.model.parameters()} == {torch.bfloat16}


def test_a_bf16_gradient_does_not_depend_on_the_micro_batch(save_model, batch):
    folder = save_model("llama", dtype=torch.bfloat16)
    norms = [learner_of(folder, micro_batch=micro).step(batch).grad_norm for micro in (64, 3)]
    assert norms[0] == pytest.approx(norms[1], rel=0.02)


def test_the_divergence_from_the_base_model_is_recorded_and_held_down(llama_folder, batch):
    settings = AdamW(lr=3e-3, warmup_steps=0, max_grad_norm=1e9)

    def run(coefficient):
        base = load_model(llama_folder).requires_grad_(False)
        kl = Kl(coefficient=coefficient)
        recipe = learner_recipe(optimiser=settings, temperature=0.8, kl=kl)
        learner = Learner(load_model(llama_folder), recipe, base)
        return [learner.step(batch).kl for _ in range(6)]

    free, held = run(0.0), run(10.0)
    assert free[0] == pytest.approx(0, abs=1e-6)  # the base model itself
    assert free[-1] > 0.01
    assert held[-1] < 0.5 * free[-1]
    assert np.isnan(learner_of(llama_folder).step(batch).kl)


def test_activation_checkpointing_changes_no_gradient(llama_folder, batch):
    expected = gradient_of_step(learner_of(llama_folder), batch)
    learner = learner_of(llama_folder)
    checkpoint_activations(learner.model)
    calls = []
    first = dict(learner.model.named_modules())["model.layers.0.self_attn"]
    first.register_forward_hook(lambda *_: calls.append(1))
    found = gradient_of_step(learner, batch)
    assert len(calls) == 2  # once more in the backward pass
    expected = torch.cat([g.flatten() for g in expected])
    assert (torch.cat([g.flatten() for g in found]) - expected).abs().max() < 1e-6 * expected.norm()


def test_groups_stay_whole_in_micro_batches_where_they_fit(llama_folder, batch):
    learner = learner_of(llama_folder, micro_batch=5)
    # Groups of 4, 3, 7, 2 and 5 rows; that of 7 is too large and is cut.
    group_N = np.repeat(np.arange(5), [4, 3, 7, 2, 5])
    many = replace(batch, group_N=group_N, advantage_N=np.zeros(21))
    found = [rows.tolist() for rows in learner._micro_batches(many)]
    assert found == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19, 20]]


def test_a_step_of_the_optimiser_is_adamw_by_hand():
    """Two steps with gradient 2, then -1, in numbers; decay of a matrix, none of a vector."""
    matrix, vector = (torch.full(shape, 3.0, requires_grad=True) for shape in [(1, 1), (1,)])
    settings = AdamW(lr=0.1, betas=(0.9, 0.95), eps=1e-15, weight_decay=0.5)
    optimiser = new_adamw(settings, [matrix, vector])
    m = v = 0.0
    expected = [3.0, 3.0]
    for step, g in enumerate((2.0, -1.0), start=1):
        for p in (matrix, vector):
            p.grad = torch.full(p.shape, g)
        optimiser.step()
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        move = 0.1 * (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)) ** 0.5 + 1e-15)
        expected = [expected[0] * (1 - 0.1 * 0.5) - move, expected[1] - move]
        assert [matrix.item(), vector.item()] == pytest.approx(expected, rel=1e-6)


def test_no_micro_batch_is_larger_than_asked_for(llama_folder, batch):
    """Also where a group is a multiple of it."""
    many = replace(batch, group_N=np.repeat(np.arange(3), 16), advantage_N=np.zeros(48))
    for size in (1, 4, 5, 8, 16, 20):
        learner = learner_of(llama_folder, size)
        found = learner._micro_batches(many)
        assert max(map(len, found)) <= size
        assert np.concatenate(found).tolist() == list(range(48))


@pytest.mark.parametrize(
    ("capability", "precision", "attention"),
    [
        ((9, 0), "bfloat16", NAME),
        ((8, 0), "bfloat16", NAME),
        ((7, 5), "bfloat16", "sdpa"),
        ((9, 0), "float32", "sdpa"),
    ],
)
def test_packed_attention_is_chosen_where_the_gpu_has_its_kernel(
    monkeypatch, capability, precision, attention
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    of = learner_recipe(precision=precision)
    assert load._attention(of, torch.device("cuda")) == attention
    assert load._attention(of, torch.device("cpu")) == "sdpa"


def test_no_packed_attention_without_its_kernel(monkeypatch):
    """PyTorch before 2.11."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(load, "HAS_KERNEL", False)
    gpu, of = torch.device("cuda"), learner_recipe(precision="bfloat16")
    assert load._attention(of, gpu) == "sdpa"
    packed = replace(of, learner=replace(of.learner, attention="varlen"))
    with pytest.raises(InputError, match=r"2\.11 or later"):
        load._attention(packed, gpu)
    assert load._attention(replace(packed, precision="float32"), gpu) == NAME
