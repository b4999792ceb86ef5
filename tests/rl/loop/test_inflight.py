"""Completions sampled across updates of the weights, against a replay that knows nothing of the generator."""

import numpy as np
import pytest
import torch
from replayed_rollouts import TEMPERATURE, difference, models_of, perturbed, replay, replay_afresh
from weight_arrays import arrays

from scalerl.rl.model.causal_lm import load_model
from scalerl.rl.model.weights import weights_of
from scalerl.rl.sync.shared_weights import hold


@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt2"])
def replayed(request, save_model, make_generator, uneven_prompts):
    """The models of nine versions, and the completions of a generator that went through them in flight."""
    folder = save_model(request.param)
    base = weights_of(load_model(folder))
    versions = [base, *(perturbed(base, seed) for seed in range(1, 9))]
    generator = make_generator(folder, rows=4, temperature=TEMPERATURE)
    for prompt in uneven_prompts:
        generator.submit(prompt, 0, 2)
    for version, weights in enumerate(versions):
        generator.update(weights, version)
        for _ in range(4):
            generator.tick()
    rollouts = [rollout for group in generator.collect(6) for rollout in group]
    return models_of(folder, versions), [r for r in rollouts if len(set(r.version_T.tolist())) > 1]


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


def test_weights_that_are_held_are_copies_that_training_cannot_change(llama_folder):
    model = load_model(llama_folder, torch.bfloat16)
    held, before = hold(weights_of(model)), arrays(weights_of(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert {str(w.dtype) for _, w in held} == {"torch.bfloat16"}
    assert {spec.dtype for spec in held.plan} == {"bfloat16"}
    assert all(np.array_equal(weight, before[name]) for name, weight in arrays(held).items())
    assert hold(held) is held
