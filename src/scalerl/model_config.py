"""The config.json of a model in Hugging Face format, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalerl.errors import InputError, brief
from scalerl.jsonl import read_object

MOST_LAYERS = 512
"""More layers than any model has, and few enough to construct: one takes milliseconds."""
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
    """Return the config.json at or in `path`, with the `text_config` of a vision model merged into it.

    Every count in it is a whole number within bounds, or absent.

    Raises:
        InputError: there is no such file, it is not a JSON object, or one of its counts is out of bounds.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(
            f"{path}: no such file; expected the folder or config.json of a model on this machine"
        )
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


_DENSE = frozenset(("llama", "mistral", "qwen2", "qwen3"))
"""Model types whose blocks `ModelShape` can count."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a dense Llama-like causal LM, from which its memory follows."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    tied: bool
    """Whether the LM head is the embedding."""
    biases: int = 0
    """Parameters of biases and per-head norms in a block."""
    normed: bool = False
    """Whether queries and keys have norms of their own."""

    @classmethod
    def of(cls, config: Mapping[str, Any], source: str | Path) -> ModelShape:
        """Return the shape of the model that a config.json, as returned by `read_model_config`, describes.

        Raises:
            InputError: the model has another architecture, or one of the sizes is missing.
        """
        kind = str(config.get("model_type"))
        if kind not in _DENSE:
            known = ", ".join(sorted(_DENSE))
            raise InputError(
                f"{source}: the memory of a model of type {brief(kind)} is not known: {known} are"
            )
        wanted = (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "vocab_size",
        )
        if missing := [name for name in wanted if name not in config]:
            raise InputError(f"{source}: no {missing[0]!r}: expected the config.json of a model")
        hidden, layers, heads, inner, vocabulary = (int(config[name]) for name in wanted)
        kv_heads, head_dim = int(config.get("num_key_value_heads", heads)), config.get("head_dim")
        head_dim = int(head_dim or hidden // heads)
        biased = kind == "qwen2" or config.get("attention_bias") is True
        normed = kind == "qwen3"
        biases = (heads + 2 * kv_heads) * head_dim * biased + 2 * head_dim * normed
        tied = bool(config.get("tie_word_embeddings", False))
        return cls(hidden, layers, heads, kv_heads, head_dim, inner, vocabulary, tied, biases, normed)

    @property
    def block(self) -> int:
        """Parameters of a block."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.inner + 2 * self.hidden + self.biases

    @property
    def embedding(self) -> int:
        """Parameters of the embedding; the LM head has as many."""
        return self.vocabulary * self.hidden

    @property
    def outside(self) -> int:
        """Parameters outside the blocks: embedding, last norm, and the LM head unless it is tied."""
        return self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        """All parameters, counting tied ones once."""
        return self.layers * self.block + self.outside

    def cache_per_position(self, size: int) -> int:
        """Bytes of the KV cache per position, with numbers of `size` bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * size
