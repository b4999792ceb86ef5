"""The formulas of memory against traces of the package's own functions, for the recipes that ship.

    python benchmarks/memory.py [RECIPE ...]

The shapes are real and the tensors have none of their data (device `meta`): every storage that an operation
makes is counted from its first to its last reference, and the peak is compared with the formula of
`scalerl.rl.config.memory`. Attention counts as a fused kernel does: its result and one number a query. A
recipe without a model of Qwen3's has the shape of 0.6B. What a device needs beside tensors (its context, the
allocator's gaps) is in neither, and no trainer is sharded.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scalerl.model_config import ModelShape
from scalerl.rl.config.memory import generator_memory, pass_tokens, positions_of, trainer_memory
from scalerl.rl.config.recipe import Recipe, load_recipe
from scalerl.rl.engine.engine import SlotCache
from scalerl.rl.learner.learner import Learner
from scalerl.rl.learner.vocabulary import chunked_log_probs
from scalerl.rl.model import causal_lm
from scalerl.rl.model.causal_lm import checkpoint_activations, dtype_of, hidden_states, log_probs_TV

RECIPES = resources.files("scalerl") / "recipes"
_NO_MASK = {"full_attention": None}
"""Without it transformers would read the positions, of which there is no data."""


class Counted(TorchDispatchMode):
    """Counts the bytes of live storages, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: dict[int, Any] = {}

    def count(self, tensor: Tensor) -> None:
        """Count a tensor's storage until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if tensor.device.type != "meta" or key in self._seen:
            return
        n_bytes = storage.nbytes()
        self._seen[key] = weakref.finalize(storage, self._freed, key, n_bytes)
        self.live += n_bytes
        self.peak = max(self.peak, self.live)

    def _freed(self, key: int, n_bytes: int) -> None:
        del self._seen[key]
        self.live -= n_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count what an operation returns."""
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor):
                self.count(leaf)
        return found


class _Attention(torch.autograd.Function):
    """Attention of a fused kernel: keeps its inputs, its result and a float32 a query."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return a result of the right shape."""
        out, log_sum = torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, ...]:
        """Return gradients of the right shapes."""
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _Attention.apply(query, key, value)  # pyright: ignore[reportReturnType]


def _float32_product(a: Tensor, b: Tensor) -> Tensor:
    """Allocate as `torch.mm(a, b, out_dtype=torch.float32)` does, which there is on a GPU alone."""
    return a.new_empty((a.shape[0], b.shape[1]), dtype=torch.float32)


def _head_of(model: Any, fp32: bool) -> tuple[Tensor, Tensor | None]:
    head = model.get_output_embeddings()
    return head.weight, head.bias  # as on a GPU, without a copy in float32


@contextmanager
def counted(model: nn.Module) -> Iterator[Counted]:
    """Count what is allocated within, and the parameters of `model`, as it would be on a GPU."""
    with (
        Counted() as mode,
        patch.object(nn.functional, "scaled_dot_product_attention", _attention),
        patch.object(causal_lm, "_float32_product", _float32_product),
        patch.object(causal_lm, "head_of", _head_of),
    ):
        for parameter in model.parameters():
            mode.count(parameter)
        yield mode


def empty(config: Any, recipe: Recipe) -> Any:
    """Return a model without data in the recipe's precision."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        how = {"dtype": dtype_of(recipe.precision), "attn_implementation": "sdpa"}
        return AutoModelForCausalLM.from_config(config, **how)


def zeros(*shape: int) -> Tensor:
    """Return indices without data."""
    return torch.zeros(shape, dtype=torch.long, device="meta")


def trace_trainer(recipe: Recipe, config: Any) -> int:
    """Return the peak of a step of two passes of the largest size: forward, loss, backward, gather, AdamW."""
    model = empty(config, recipe).train()
    if recipe.learner.activation_checkpointing:
        checkpoint_activations(model)
    tokens = pass_tokens(recipe)
    with counted(model) as mode:
        learner = Learner(model, recipe)
        for _ in range(2):
            hidden_RD = hidden_states(
                model, input_ids=zeros(1, tokens), use_cache=False, attention_mask=_NO_MASK
            )[0]
            hidden_RD = hidden_RD[zeros(tokens)]  # those that predict something, of which there may be all
            weight_VD, bias_V = _head_of(model, learner.fp32_logits)
            how = recipe.temperature, recipe.learner.chunk, learner.fp32_logits
            row_W = torch.arange(tokens)
            logp_W, _ = chunked_log_probs(hidden_RD, weight_VD, bias_V, row_W, row_W, *how)
            del hidden_RD
            logp_W.sum().backward()
            del logp_W
            learner._gather_gradients()
        learner._optimiser.step(1e-6)
    return mode.peak


def trace_generator(recipe: Recipe, config: Any, slots: int) -> int:
    """Return the peak of the built-in engine: the prompts of all slots, and a decode step at the longest."""
    model, positions = empty(config, recipe).eval(), positions_of(recipe)
    groups = -(-slots // recipe.batch.samples)
    with torch.no_grad(), counted(model) as mode:
        cache = SlotCache(config.num_hidden_layers, slots, positions, torch.device("meta"))
        # Prompts are read while other slots are full, too.
        cache.table.hold(np.arange(slots), np.full(slots, positions))
        for rows, width, prefilling in ((groups, recipe.context.prompt, True), (slots, 1, False)):
            if prefilling:
                cache.at_prompts(np.arange(rows), np.full(rows, width))
            else:
                cache.at_next(np.arange(rows), np.full(rows, positions - 1))
            mask = torch.ones(rows, 1, width, cache.extent if not prefilling else width, device="meta").bool()
            hidden_BTD = hidden_states(
                model,
                input_ids=zeros(rows, width),
                position_ids=zeros(rows, width),
                attention_mask={"full_attention": mask},
                cache=cache,
            )
            logp_BV = log_probs_TV(model, hidden_BTD[:, -1], recipe.temperature, recipe.fp32_logits == "both")
            logp_BV.double().exp_().cumsum(-1)  # as a token is drawn
            del hidden_BTD, mask, logp_BV
    return mode.peak


_SHAPES = {
    # hidden, layers, heads, inner, tied: the config.json of Qwen3, with 8 heads of keys and values of 128
    "0.6B": (1024, 28, 16, 3072, True),
    "1.7B": (2048, 28, 16, 6144, True),
    "8B": (4096, 36, 32, 12288, False),
}


def _config(size: str) -> Any:
    from transformers import AutoConfig

    hidden, layers, heads, inner, tied = _SHAPES[size]
    return AutoConfig.for_model(
        "qwen3",
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=inner,
        vocab_size=151936,
        tie_word_embeddings=tied,
    )


def main() -> None:
    """Print a table of formulas and traces, one process of each role of every recipe."""
    names = sys.argv[1:] or sorted(f.name[:-5] for f in RECIPES.iterdir() if f.name.endswith(".toml"))
    print("| recipe | shape | role | formula, GiB | trace, GiB | difference |\n|---|---|---|---|---|---|")
    for name in names:
        recipe = load_recipe(name)
        size = next((size for size in _SHAPES if size in recipe.model), "0.6B")
        config = _config(size)
        shape = ModelShape.of(config.to_dict(), name)
        found = {
            "trainer, unsharded": (trainer_memory(recipe, shape).total, trace_trainer(recipe, config)),
            "generator": (
                generator_memory(recipe, shape, recipe.decode_slots).total,
                trace_generator(recipe, config, recipe.decode_slots),
            ),
        }
        for role, (formula, trace) in found.items():
            both = f"{formula / 2**30:.2f} | {trace / 2**30:.2f}"
            print(f"| {name} | Qwen3-{size} | {role} | {both} | {formula / trace - 1:+.1%} |", flush=True)


if __name__ == "__main__":
    main()
