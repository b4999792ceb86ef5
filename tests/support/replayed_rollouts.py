"""Rollouts sampled again by what is on record: the weights of every token's version, and one KV cache."""

from typing import Any

import numpy as np
import torch
from transformers import DynamicCache
from weight_arrays import arrays, stream

from scalerl.rl.model.causal_lm import cache_argument, load_model

TEMPERATURE = 0.9


def perturbed(weights, seed, scale=0.1):
    """Other weights, by noise large enough to see in the log-probabilities."""
    rng = np.random.default_rng(seed)
    return stream(
        {n: w + rng.normal(0, scale, w.shape).astype(np.float32) for n, w in arrays(weights).items()}
    )


@torch.no_grad()
def replay(models, rollout, version_T):
    """Log-probability of every token with one cache: the prompt by the first version, then token by token."""
    kept = {cache_argument(): DynamicCache(), "use_cache": True}
    if len(rollout.prompt_T) > 1:
        prompt_1T = torch.from_numpy(rollout.prompt_T[None, :-1])
        models[rollout.first_version](input_ids=prompt_1T, **kept)
    previous, found = int(rollout.prompt_T[-1]), []
    for token, version in zip(rollout.token_T.tolist(), version_T.tolist(), strict=True):
        out = models[version](input_ids=torch.tensor([[previous]]), **kept)
        found.append(torch.log_softmax(out.logits[0, -1] / TEMPERATURE, -1)[token].item())
        previous = token
    return np.array(found)


@torch.no_grad()
def replay_turns(models, prompt_T, turns):
    """Log-probability of every sampled token: a turn keeps what it found in the cache, reads the rest by its
    first version, and goes on token by token."""
    cache, before_T, found = DynamicCache(), prompt_T, []
    kept = {cache_argument(): cache, "use_cache": True}
    for turn in turns:
        if (behind := cache.get_seq_length() - turn.cached) > 0:
            cache.crop(-behind)
        if len(unread_T := before_T[cache.get_seq_length() : -1]):
            models[turn.first_version](input_ids=torch.from_numpy(unread_T[None]), **kept)
        previous, n = int(before_T[-1]), int(turn.sampled_T.sum())
        for token, version in zip(turn.token_T[:n].tolist(), turn.version_T[:n].tolist(), strict=True):
            out = models[version](input_ids=torch.tensor([[previous]]), **kept)
            found.append(torch.log_softmax(out.logits[0, -1] / TEMPERATURE, -1)[token].item())
            previous = token
        before_T = np.concatenate([before_T, turn.token_T])
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


def models_of(folder, versions):
    """A model for each version of the weights."""
    models: list[Any] = []
    for weights in versions:
        model: Any = load_model(folder).eval()
        model.load_state_dict(dict(weights), strict=False)
        models.append(model)
    return models
