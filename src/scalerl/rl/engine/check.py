"""Checks before a run: a few sampled tokens against the model's own forward pass, also while training.

Models differ in what they do between the last hidden state and the logits (a scale, a soft cap), in how they
find positions, in what they keep in a cache, and in what is random in training. Where generator or trainer
compute something else, the run would train another model than the one that is saved, with no sign of it.

Shapes in names: T tokens of prompt and completion, V vocabulary.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from scalerl.errors import InputError, first_line
from scalerl.rl.algo.length import LengthRule
from scalerl.rl.engine.generator import TorchGenerator
from scalerl.rl.engine.sampling import Sampling
from scalerl.rl.model.causal_lm import hidden_states
from scalerl.rl.model.memory import is_out_of_memory
from scalerl.rl.types import Prompt, Rollout

_SAMPLES, _TOKENS = 4, 3  # completions, and tokens of thinking and of answer each
_TOLERANCE = {torch.float32: 1e-3}
_TOLERANCE_LOW = 0.5  # nats, on average: a missing scale or cap is off by more, rounding to 16 bits by less


def check_sampling(model: nn.Module, tokenizer: Any, sampling: Sampling, name: str) -> None:
    """Sample a few tokens; raise an InputError where their log-probabilities are not those of the model
    itself, or where the model does not run with the generator's cache.
    """
    rule = sampling.length
    short = LengthRule(min(rule.thinking, _TOKENS), min(rule.answer, _TOKENS), rule.end_of_thinking)
    text = tokenizer.decode(list(rule.end_of_thinking.tokens))  # a text that it can write
    longest = len(tokenizer(text)["input_ids"])
    generator = TorchGenerator(
        model,
        tokenizer,
        replace(sampling, length=short, max_prompt_tokens=longest, experts=False),
        n_slots=2,
    )
    try:
        generator.submit(Prompt("probe", text, ""), 0, _SAMPLES)
        ((*rollouts,),) = generator.collect(1)
        gap = float(np.mean([_gap(model, rollout, sampling.temperature) for rollout in rollouts]))
    except (ValueError, TypeError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise InputError(f"model {name} does not run in the generator ({first_line(error)})") from error
    allowed = _TOLERANCE.get(next(model.parameters()).dtype, _TOLERANCE_LOW) / min(sampling.temperature, 1.0)
    # `not <=`, as NaN must be refused too.
    if not gap <= allowed:
        raise InputError(
            f"model {name} is sampled wrongly: log-probabilities are {gap:.2g} off those of its own forward "
            "pass (logits that are scaled or capped after the LM head are not supported yet)"
        )


@torch.no_grad()
def check_training(model: Any, name: str) -> None:
    """Raise an InputError unless the model computes the same while it is trained as while it is sampled from
    (dropout that cannot be turned off, a router with noise).
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
