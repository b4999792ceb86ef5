"""Completions sampled across updates of the weights, against a replay that knows nothing of the generator."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from scalerl.rl.model import copy_weights, load_model

TEMPERATURE = 0.9


def perturbed(weights, seed):
    rng = np.random.default_rng(seed)
    return {n: w + rng.normal(0, 0.1, w.shape).astype(np.float32) for n, w in weights.items()}


@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt2"])
def replayed(request, save_model, make_generator, uneven_prompts):
    """The models of nine versions, and the completions of a generator that went through them in flight."""
    folder = save_model(request.param)
    base = copy_weights(load_model(folder))
    versions = [base, *(perturbed(base, seed) for seed in range(1, 9))]
    generator = make_generator(folder, rows=4, temperature=TEMPERATURE)
    for prompt in uneven_prompts:
        generator.submit(prompt, 0, 2)
    for version, weights in enumerate(versions):
        generator.update(weights, version)
        for _ in range(4):
            generator.tick()
    rollouts = [rollout for group in generator.collect(6) for rollout in group]
    models: list[Any] = []
    for weights in versions:
        model: Any = load_model(folder).eval()
        model.load_state_dict({n: torch.from_numpy(w) for n, w in weights.items()}, strict=False)
        models.append(model)
    return models, [r for r in rollouts if len(set(r.version_T.tolist())) > 1]


@torch.no_grad()
def replay(models, rollout, version_T):
    """Log-probability of every token with one cache: the prompt by the first version, then token by token."""
    cache = DynamicCache()
    if len(rollout.prompt_T) > 1:
        prompt_1T = torch.from_numpy(rollout.prompt_T[None, :-1])
        models[rollout.first_version](input_ids=prompt_1T, past_key_values=cache, use_cache=True)
    previous, found = int(rollout.prompt_T[-1]), []
    for token, version in zip(rollout.token_T.tolist(), version_T.tolist(), strict=True):
        out = models[version](input_ids=torch.tensor([[previous]]), past_key_values=cache, use_cache=True)
        found.append(torch.log_softmax(out.logits[0, -1] / TEMPERATURE, -1)[token].item())
        previous = token
    return np.array(found)


@torch.no_grad()
def replay_afresh(models, rollout):
    """The same, but the cache of everything before is recomputed with the version that samples."""
    tokens_1T = torch.from_numpy(np.concatenate([rollout.prompt_T, rollout.token_T]))[None]
    found = []
    for t, (token, version) in enumerate(zip(rollout.token_T, rollout.version_T, strict=True)):
        logits_V = models[version](input_ids=tokens_1T[:, : len(rollout.prompt_T) + t]).logits[0, -1]
        found.append(torch.log_softmax(logits_V / TEMPERATURE, -1)[token].item())
    return np.array(found)


def difference(rollout, logp_T):
    """Largest difference over the sampled tokens."""
    return np.abs(logp_T - rollout.logp_T)[rollout.sampled_T].max()


def test_a_completion_across_updates_is_reproduced_by_its_versions_and_a_stale_cache(replayed):
    models, rollouts = replayed
    assert len(rollouts) >= 6
    assert max(len(set(r.version_T.tolist())) for r in rollouts) >= 4
    for rollout in rollouts:
        assert rollout.first_version == rollout.version_T[0]
        assert difference(rollout, replay(models, rollout, rollout.version_T)) < 1e-4


def test_versions_recorded_one_token_off_are_noticed(replayed):
    models, rollouts = replayed
    for rollout in rollouts:
        late = np.concatenate([rollout.version_T[:1], rollout.version_T[:-1]])
        early = np.concatenate([rollout.version_T[1:], rollout.version_T[-1:]])
        assert difference(rollout, replay(models, rollout, late)) > 1e-2
        assert difference(rollout, replay(models, rollout, early)) > 1e-2


def test_the_cache_is_stale_indeed(replayed):
    models, rollouts = replayed
    for rollout in rollouts:
        assert difference(rollout, replay_afresh(models, rollout)) > 1e-2


def test_published_weights_are_copies_that_training_cannot_change(llama_folder):
    model = load_model(llama_folder)
    weights = copy_weights(model)
    before = {n: w.copy() for n, w in weights.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert all(np.array_equal(weights[n], before[n]) for n in weights)
