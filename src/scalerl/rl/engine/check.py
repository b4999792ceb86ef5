"""Checks before a run: a few sampled tokens against the model's own forward pass, also while training.

Models differ in what they do between the last hidden state and the logits (a scale, a soft cap), in how they
find positions, in what they keep in a cache, and in what is random in training. Where generator or trainer
compute something else, the run would train another model than the one that is saved, with no sign of it.

Shapes in names: T tokens of prompt and completion, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from scalerl.errors import InputError, first_line
from scalerl.rl.algo.length import LengthRule
from scalerl.rl.engine.generator import TorchGenerator
from scalerl.rl.engine.sampling import Sampling
from scalerl.rl.model.causal_lm import compute_device, head_dim, hidden_states
from scalerl.rl.types import Prompt, Rollout

_SAMPLES, _TOKENS = 4, 3  # completions, and tokens of thinking and of answer each
_TOLERANCE = {torch.float32: 1e-3}
_TOLERANCE_LOW = 0.5  # nats, on average: a missing scale or cap is off by more, rounding to 16 bits by less


def check_sampling(model: nn.Module, tokenizer: Any, sampling: Sampling, name: str) -> None:
    """Sample a few tokens, and compare their log-probabilities with those of the model itself.

    Raises:
        InputError: they differ, or the model does not run with the generator's cache.
    """
    rule = sampling.length
    short = LengthRule(min(rule.thinking, _TOKENS), min(rule.answer, _TOKENS), rule.end_of_thinking)
    text = tokenizer.decode(list(rule.end_of_thinking.tokens))  # a text that it can write
    longest = len(tokenizer(text)["input_ids"])
    generator = TorchGenerator(
        model, tokenizer, replace(sampling, length=short, max_prompt_tokens=longest), n_slots=2
    )
    try:
        generator.submit(Prompt("probe", text, ""), 0, _SAMPLES)
        ((*rollouts,),) = generator.collect(1)
        gap = float(np.mean([_gap(model, rollout, sampling.temperature) for rollout in rollouts]))
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(f"model {name} does not run in the generator ({first_line(error)})") from error
    allowed = _TOLERANCE.get(next(model.parameters()).dtype, _TOLERANCE_LOW) / min(sampling.temperature, 1.0)
    # `not <=`, as NaN must be refused too.
    if not gap <= allowed:
        raise InputError(
            f"model {name} is sampled wrongly: log-probabilities are {gap:.2g} off those of its own forward "
            "pass (logits that are scaled or capped after the LM head are not supported yet)"
        )


def cache_bytes(model: Any, n_slots: int, n_positions: int) -> int:
    """Return the bytes of the KV cache of `n_slots` decode slots of `n_positions` tokens."""
    config, size = model.config, next(model.parameters()).element_size()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return n_slots * n_positions * 2 * config.num_hidden_layers * heads * head_dim(config) * size


def check_cache(model: Any, slots: Mapping[str, int], n_positions: int) -> None:
    """Check that the KV cache fits the memory: `slots` of `n_positions` tokens, by the keys of the recipe.

    Raises:
        InputError: it is larger than the memory of the device.
    """
    device = compute_device()
    if device.type == "cuda":
        memory = torch.cuda.mem_get_info(device)[0]
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for key, n_slots in slots.items():
        if (needed := cache_bytes(model, n_slots, n_positions)) > memory:
            raise InputError(
                f"{key}: the KV cache of {n_slots} decode slots of {n_positions} tokens takes "
                f"{needed / 2**30:,.0f} GiB, and {device} has {memory / 2**30:,.0f}: "
                "fewer decode slots, or a shorter context"
            )


@torch.no_grad()
def check_training(model: Any, name: str) -> None:
    """Check that the model computes the same while it is trained as while it is sampled from.

    Raises:
        InputError: it does not (dropout that cannot be turned off, a router with noise).
    """
    token_1T = torch.arange(8, device=next(model.parameters()).device)[None] % model.config.vocab_size
    sampled_1TD = hidden_states(model.eval(), input_ids=token_1T, use_cache=False)
    trained_1TD = hidden_states(model.train(), input_ids=token_1T, use_cache=False)
    if not torch.allclose(sampled_1TD, trained_1TD, rtol=1e-3, atol=1e-3):
        raise InputError(
            f"model {name} computes something else while it is trained (dropout or router noise): set that "
            "to 0 in its config.json"
        )


@torch.no_grad()
def _gap(model: Any, rollout: Rollout, temperature: float) -> float:
    """Return the mean difference of the recorded log-probabilities from the model's own."""
    token_T = torch.from_numpy(np.concatenate([rollout.prompt_T, rollout.token_T]))
    token_T = token_T.to(next(model.parameters()).device)
    logits_TV = model(input_ids=token_T[None], use_cache=False).logits[0, :-1].float() / temperature
    logp_T = torch.log_softmax(logits_TV, -1).gather(-1, token_T[1:, None])[:, 0].cpu().numpy()
    return float(np.abs(logp_T[len(rollout.prompt_T) - 1 :] - rollout.logp_T).mean())
