"""Floating-point operations of a causal LM, from only the config.json of its Hugging Face folder.

The definition is that of a run's own counters (docs/reference/definitions.md): a forward pass costs 2 per
weight of a matrix product and token, and 4 D L per token and attended position; a backward pass costs twice
that. Embedding look-ups are free, the head is not; of the experts only those count that a token uses.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalerl.errors import InputError, brief
from scalerl.model_config import read_model_config

_UNGATED = frozenset(
    (
        *("apertus", "arcee", "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj"),
        *("nanochat", "nemotron", "opt", "persimmon", "phi", "starcoder2"),
    )
)
"""Types of models whose feed-forward part has two matrices; all others have a third, for the gate."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_UNCOUNTED = {
    "kv_lora_rank": "latent attention is",
    "multi_query": "multi-query attention is",
    "interleave_moe_layer_step": "experts in some layers alone, as of Llama 4, are",
}
_ATTENTION = frozenset(("full_attention", "sliding_attention", "chunked_attention", "attention"))


@dataclass(frozen=True)
class ModelCost:
    """The cost of a token in one forward pass."""

    matrix_weights: int
    attention_per_position: int
    model: str

    def forward(self, tokens: float, mean_length: float) -> float:
        """Return the FLOPs of `tokens` tokens, each attending to half of a sequence of `mean_length`."""
        return tokens * (2.0 * self.matrix_weights + self.attention_per_position * (mean_length + 1) / 2)


def model_cost(path: str | Path) -> ModelCost:
    """Return the cost of the model whose config.json is `path`, or in the folder `path`.

    Raises:
        InputError: there is no such file, or a value that the cost depends on is missing or not a count.
    """
    path = Path(path)
    config, file = read_model_config(path), path / "config.json" if path.is_dir() else path

    def whole(*names: str, default: int | None = None) -> int:
        for name in names:
            if value := config.get(name):
                return value
        if default is None:
            raise InputError(f"{file}: no '{names[0]}': expected the config.json of a model")
        return default

    hidden, layers = whole("hidden_size", "n_embd", "d_model"), whole("num_hidden_layers", "n_layer")
    heads = whole("num_attention_heads", "n_head")
    if heads > hidden:
        raise InputError(f"{file}: more attention heads ({heads}) than hidden_size ({hidden})")
    head_dim = whole("head_dim", default=hidden // heads)
    kv_heads = whole("num_key_value_heads", default=heads)
    if what := _uncounted(config):
        raise InputError(f"{file}: {what} not supported by --model yet: use --x tokens or --x gpu_hours")
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    dense = whole("intermediate_size", "n_inner", default=4 * hidden)
    gated = 2 if config.get("n_inner") or str(config.get("model_type")) in _UNGATED else 3
    experts = whole(*_EXPERTS, default=0)
    mlp_per_layer = gated * hidden * dense
    dense_layers = layers
    sparse_per_layer = 0
    if experts:
        width = whole("moe_intermediate_size", default=dense)
        met = whole("num_experts_per_tok", "moe_topk")
        shared = config.get("shared_expert_intermediate_size") or 0
        shared += width * (config.get("n_shared_experts") or 0)
        router = hidden * experts
        sparse_per_layer = (
            3 * hidden * (met * width + shared)
            + router
            + (hidden if shared and not config.get("n_shared_experts") else 0)
        )
        dense_layers = _dense_layers(config, layers)
    weights = layers * attention + dense_layers * mlp_per_layer + (layers - dense_layers) * sparse_per_layer
    weights += hidden * whole("vocab_size")
    named = (config.get(key) for key in ("_name_or_path", "model_type"))
    name = next((one for one in named if isinstance(one, str) and one), file.parent.name)
    return ModelCost(weights, 4 * layers * heads * head_dim, name)


def _uncounted(config: Mapping[str, Any]) -> str:
    """Name a part of the model that is not counted above; empty where everything is."""
    for key, what in _UNCOUNTED.items():
        if config.get(key):
            return what
    kinds = config.get("layer_types")
    for kind in kinds if isinstance(kinds, list) else ():
        if str(kind) not in _ATTENTION:
            return f"layers of {brief(kind)} are"
    if any(key.startswith("mamba_") for key in config):
        return "layers with a state (mamba) are"
    named = [key for key in config if "num_experts" in key and config[key]]
    if named and not any(config.get(name) for name in _EXPERTS):
        return f"experts by the name {brief(named[0])} are"
    return ""


def _dense_layers(config: Mapping[str, Any], layers: int) -> int:
    """Count the layers of a mixture-of-experts model with one feed-forward part for all tokens."""
    if first := config.get("first_k_dense_replace"):
        return min(first, layers)
    only, step = config.get("mlp_only_layers"), config.get("decoder_sparse_step", 1)
    listed = [one for one in only if isinstance(one, int)] if isinstance(only, list) else []
    return sum(bool((layer + 1) % step) or layer in listed for layer in range(layers))
