"""Definitions that the client and vLLM's own processes share.

This module is imported in vLLM's environment, and may import no more than `served`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from scalerl.rl.algo.length import LengthRule, Marker

LENGTH = "scalerl_length"
"""The key of a request's `vllm_xargs` that carries its length rule, as JSON."""


def rule_to_json(rule: LengthRule) -> dict[str, Any]:
    """Return the rule as JSON, for `rule_from_json`."""
    marker = rule.end_of_thinking
    # Sorted: JSON has no sets, and equal rules must give equal text.
    return {
        "thinking": rule.thinking,
        "answer": rule.answer,
        "phrase": rule.phrase,
        "marker": {"tokens": marker.tokens, "text": marker.text, "last": sorted(marker.last)},
    }


def rule_from_json(values: Mapping[str, Any], decode: Callable[[list[int]], str]) -> LengthRule:
    """Return the rule; `decode` must be of the same tokenizer. The client draws when to interrupt."""
    tokens, text, last = (values["marker"][key] for key in ("tokens", "text", "last"))
    marker = Marker(tuple(tokens), text, frozenset(last), decode if text else None)
    return LengthRule(values["thinking"], values["answer"], marker, tuple(values["phrase"]))


_SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


def shape_of(config: Any) -> dict[str, Any]:
    """Return the sizes of a Hugging Face config that distinguish one model from another."""
    return {name: getattr(config, name, None) for name in _SHAPE}
