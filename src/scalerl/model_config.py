"""The config.json of a model in Hugging Face format, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scalerl.errors import InputError, brief
from scalerl.jsonl import read_object

MOST_LAYERS = 512
"""More than any model has, and few enough to construct: a layer takes milliseconds."""
_MOST = 10**9
_MOST_BYTES = 2**22
_AT_LEAST_1 = (
    *("hidden_size", "n_embd", "d_model", "num_attention_heads", "n_head", "num_key_value_heads"),
    *("head_dim", "intermediate_size", "n_inner", "ffn_dim", "vocab_size", "word_embed_proj_dim"),
    *("max_position_embeddings", "n_positions", "decoder_sparse_step"),
)
_AT_LEAST_0 = (
    *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "moe_topk"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "n_shared_experts"),
    *("first_k_dense_replace", "kv_lora_rank"),
)
_BOUNDS = {
    **dict.fromkeys(_AT_LEAST_1, (1, _MOST)),
    **dict.fromkeys(_AT_LEAST_0, (0, _MOST)),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), (1, MOST_LAYERS)),
}


def read_model_config(path: str | Path) -> dict[str, Any]:
    """Return the config.json `path`, or that in the folder `path`, with the `text_config` of vision models.

    Every count in it is a whole number within bounds, or is absent.

    Raises:
        InputError: there is no such file, it is not a JSON object, or one of its counts is out of bounds.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file() and file.stat().st_size > _MOST_BYTES:
        raise InputError(
            f"{file}: larger than {_MOST_BYTES // 2**20} MiB: expected the config.json of a model"
        )
    config = read_object(file)
    text = config.get("text_config")
    found = {**config, **text} if isinstance(text, Mapping) else config
    for key, (least, most) in _BOUNDS.items():
        value = found.get(key)
        if value is None:
            found.pop(key, None)
        elif not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise InputError(f"{file}: {key} is {brief(value)}: expected a whole number, {least} to {most}")
    return found
