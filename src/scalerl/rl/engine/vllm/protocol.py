"""What both sides of the connection to vLLM must agree on: this process, and the one that serves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from scalerl.rl.algo.length import LengthRule, Marker

LENGTH = "scalerl_length"
"""The key of a request's `vllm_xargs` that carries its length rule, as JSON."""
WORKER = "scalerl.rl.engine.vllm.served.Worker"
LENGTH_CONTROL = "scalerl.rl.engine.vllm.served:LengthProcessor"


def rule_to_json(rule: LengthRule) -> dict[str, Any]:
    """What `rule_from_json` takes back."""
    marker = rule.end_of_thinking
    return {
        "thinking": rule.thinking,
        "answer": rule.answer,
        "phrase": rule.phrase,
        "marker": {"tokens": marker.tokens, "text": marker.text, "last": sorted(marker.last)},
    }


def rule_from_json(values: Mapping[str, Any], decode: Callable[[list[int]], str]) -> LengthRule:
    """The rule; `decode` is that of the same tokenizer. When to interrupt is drawn elsewhere."""
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
    """What tells one model from another, of a Hugging Face config."""
    return {name: getattr(config, name, None) for name in _SHAPE}


def complaints(found: Mapping[str, Any], precision: str, fp32_logits: bool, rows: int) -> Iterator[str]:
    """What is wrong with how a server was started, by what its worker extension says of it."""
    if found["dtype"] != precision:
        yield f"--dtype {precision} (it has {found['dtype']})"
    if fp32_logits and found["head_dtype"] != "float32":
        yield '--hf-overrides \'{"head_dtype": "float32"}\''
    if found["logprobs_mode"] != "processed_logprobs":
        yield "--logprobs-mode processed_logprobs"
    if found["max_num_seqs"] < rows:
        yield f"--max-num-seqs {rows} (it has {found['max_num_seqs']})"
    if found["async_scheduling"]:
        yield "--no-async-scheduling"
    if found["v2_model_runner"]:
        yield "VLLM_USE_V2_MODEL_RUNNER=0"
    if not found["length_control"]:
        yield f"--logits-processors {LENGTH_CONTROL}"
    if found["data_parallel"] > 1:
        yield "--data-parallel-size 1 (a server for each instead: an update pauses one engine)"
    if found["pipeline_parallel"] > 1:
        yield "--pipeline-parallel-size 1 (no stage but the last knows the newest token)"
    if found["speculative"]:
        yield "no --speculative-config (its drafts know neither new weights nor forced tokens)"
