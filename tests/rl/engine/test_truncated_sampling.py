"""Top-p and top-k: what is sampled, what is recorded of it, and what a recipe may not combine with them."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch

from scalerl.errors import InputError
from scalerl.rl.algo.schedule import PipelineRL
from scalerl.rl.config.recipe import from_dict
from scalerl.rl.config.settings import AdamW
from scalerl.rl.engine.sampling import truncated_log_probs

LOGP_AV = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.97, 0.01, 0.01, 0.01]], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("top_p", "top_k", "expected"),
    [
        (1.0, 2, [[0, 4 / 7, 0, 3 / 7], None]),
        (0.65, 0, [[0, 4 / 7, 0, 3 / 7], [1, 0, 0, 0]]),
        (0.71, 0, [[0, 4 / 9, 2 / 9, 3 / 9], [1, 0, 0, 0]]),  # the token that crosses it is kept
        (0.5, 2, [[0, 1, 0, 0], [1, 0, 0, 0]]),  # of the two that top-k leaves, 4/7 is enough
        (1e-9, 0, [[0, 1, 0, 0], [1, 0, 0, 0]]),
    ],
)
def test_the_truncated_distribution_by_hand(top_p, top_k, expected):
    found_AV = truncated_log_probs(LOGP_AV.clone(), top_p, top_k).exp()
    for found, by_hand in zip(found_AV, expected, strict=True):
        if by_hand is not None:
            torch.testing.assert_close(found, torch.tensor(by_hand, dtype=torch.float64))


def test_off_they_change_no_bit():
    assert truncated_log_probs(LOGP_AV, 1.0, 0) is LOGP_AV


def off_policy_by(recipe, start_run):
    """The first steps of a run, on-policy."""
    health = replace(recipe.health, probe=0)
    recipe = replace(recipe, health=health, schedule=PipelineRL(k=0), optimiser=AdamW(lr=1e-9))
    loop, _, learner = start_run(recipe)
    return list(islice(loop, 3)), learner


@pytest.mark.parametrize(("top_p", "top_k"), [(0.7, 0), (1.0, 3)])
def test_what_is_recorded_is_the_probability_of_what_was_sampled_from(tiny_recipe, start_run, top_p, top_k):
    whole = replace(tiny_recipe, health=replace(tiny_recipe.health, probe=0))
    steps, learner = off_policy_by(replace(whole, top_p=top_p, top_k=top_k), start_run)
    n, kept = 0, []
    for rollout in (r for step in steps for group in step.groups for r in group.rollouts):
        token_T = np.concatenate([rollout.prompt_T, rollout.token_T])
        with torch.no_grad():
            logits_TV = learner.model(torch.from_numpy(token_T)[None]).logits[
                0, len(rollout.prompt_T) - 1 : -1
            ]
        logp_TV = logits_TV.log_softmax(-1)
        expected_T = truncated_log_probs(logp_TV.clone(), top_p, top_k)[
            torch.arange(len(rollout.token_T)), torch.from_numpy(rollout.token_T)
        ].numpy()
        sampled_T = rollout.sampled_T
        np.testing.assert_allclose(rollout.logp_T[sampled_T], expected_T[sampled_T], atol=1e-4)
        n += int(sampled_T.sum())
        # The ratio of unchanged weights is the mass of what was kept.
        own_T = logp_TV[torch.arange(len(rollout.token_T)), torch.from_numpy(rollout.token_T)].numpy()
        kept += np.exp(own_T - rollout.logp_T)[sampled_T].tolist()
    assert n > 100
    assert max(kept) <= 1 + 1e-4
    if top_p < 1:
        assert min(kept) >= top_p - 1e-4
    assert np.mean(kept) < 0.95
    assert steps[0].stats.ratio_mean < 0.97


@pytest.mark.parametrize("kind", ["grpo", "dapo", "gspo", "reinforce"])
@pytest.mark.parametrize("key", [{"top_p": 0.9}, {"top_k": 20}])
def test_losses_for_which_the_ratio_would_be_wrong_are_refused(tiny_recipe, kind, key):
    values = tiny_recipe.to_dict() | {"loss": {"kind": kind}, "health": {"probe": 0}} | key
    with pytest.raises(InputError, match=f"top_p, top_k: the ratio is then below 1.*'{kind}'.*use 'cispo'"):
        from_dict(values)
    assert from_dict(values | {"loss": {"kind": "cispo"}}).health.probe == 0
    with pytest.raises(InputError, match=r"set health\.probe = 0"):
        from_dict(values | {"loss": {"kind": "cispo"}, "health": {}})


@pytest.mark.parametrize("key", [{"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}])
def test_values_that_mean_nothing_are_refused(tiny_recipe, key):
    with pytest.raises(InputError, match=next(iter(key))):
        from_dict(tiny_recipe.to_dict() | key)
