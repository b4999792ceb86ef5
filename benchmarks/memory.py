"""The formulas of memory against traces of the package's own functions, for the recipes that ship.

    python benchmarks/memory.py [RECIPE ...]

The shapes are real and the tensors have none of their data (device `meta`): every storage that an operation
makes is counted from its first to its last reference, and the peak is compared with the formula of
`scalerl.rl.config.memory`. Attention counts as a fused kernel does: its result and one number a query. Other
models than Qwen3's have their own sizes in blocks of Qwen3's form. What a device needs beside tensors (its
context, the allocator's gaps) is in neither. Of a sharded trainer it is one rank's: FSDP2 itself on fake
tensors, with collectives that do nothing.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import resources
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scalerl.model_config import ModelShape
from scalerl.rl.config.memory import generator_memory, pass_tokens, positions_of, trainer_memory
from scalerl.rl.config.recipe import Recipe, load_recipe
from scalerl.rl.engine.engine import SlotCache
from scalerl.rl.learner.learner import Learner
from scalerl.rl.learner.score import _Chunked
from scalerl.rl.learner.sharding import Whole, group_of, shard
from scalerl.rl.model import causal_lm
from scalerl.rl.model.causal_lm import checkpoint_activations, dtype_of, hidden_states, log_probs_TV
from scalerl.rl.model.named import model_shape

RECIPES = resources.files("scalerl") / "recipes"
_NO_MASK = {"full_attention": None}
"""Without a mask transformers would read the positions, which have no data here."""


class Counted(TorchDispatchMode):
    """Counts the bytes of live storages, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: dict[int, int] = {}

    def count(self, tensor: Tensor) -> None:
        """Count a tensor's storage until it is freed; count it again if it was resized."""
        tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
        if tensor.device.type != "meta" and not isinstance(tensor, FakeTensor):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._seen:
            self._seen[key] = 0
            weakref.finalize(storage, self._freed, key)
        self.live += storage.nbytes() - self._seen[key]
        self._seen[key] = storage.nbytes()
        self.peak = max(self.peak, self.live)

    def _freed(self, key: int) -> None:
        self.live -= self._seen.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count what an operation returns."""
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor):
                self.count(leaf)
        return found


class _Attention(torch.autograd.Function):
    """Attention that keeps what a fused kernel keeps: inputs, result and one float32 per query."""

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
    """Allocate as `torch.mm(a, b, out_dtype=torch.float32)` does, which exists only on a GPU."""
    return a.new_empty((a.shape[0], b.shape[1]), dtype=torch.float32)


def _head_of(model: Any, fp32: bool) -> tuple[Tensor, Tensor | None]:
    head = model.get_output_embeddings()
    return head.weight, head.bias  # as on a GPU, without a copy in float32


@contextmanager
def counted(model: nn.Module) -> Iterator[Counted]:
    """Count the parameters of `model` and all allocations inside, as on a GPU."""
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
    """Return the peak bytes of a step of two passes of the largest size, from forward to AdamW."""
    model = empty(config, recipe).train()
    if recipe.learner.activation_checkpointing:
        checkpoint_activations(model)
    with counted(model) as mode:
        _train(Learner(model, recipe), recipe)
    return mode.peak


def trace_rank(recipe: Recipe, config: Any, ranks: int) -> int:
    """Return the peak bytes of such a step in one of `ranks` processes that shard the model."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param
    from transformers import AutoModelForCausalLM

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("data", "tensor"))
        for name in ("data", "tensor"):
            mesh[name]  # created before the fake mode, as the mesh reads its own values
        precision = dtype_of(recipe.precision)
        with FakeTensorMode(), patch.object(dist, "new_group"):
            how: Any = {"dtype": precision, "attn_implementation": "sdpa"}
            model: Any = AutoModelForCausalLM.from_config(config, **how).train()
            if recipe.learner.activation_checkpointing:
                checkpoint_activations(model)
            whole = shard(model, mesh, torch.device("cpu"), precision)
            with counted(whole) as mode, ExitStack() as resized:
                for name in ("alloc_storage", "free_storage"):
                    resized.enter_context(patch.object(_fsdp_param, name, _then_counted(name, mode)))
                _train(Learner(whole, recipe, mesh=mesh), recipe)
            return mode.peak
    finally:
        dist.destroy_process_group()


def _then_counted(name: str, mode: Counted) -> Any:
    """Return FSDP2's function `name`, which resizes a storage, followed by counting it."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    resize = getattr(_fsdp_param, name)

    def resize_and_count(tensor: Tensor) -> None:
        resize(tensor)
        mode.count(tensor)

    return resize_and_count


def _train(learner: Learner, recipe: Recipe) -> None:
    """Make a step of two passes of the largest size."""
    tokens = pass_tokens(recipe)
    device = "meta" if learner.device.type == "meta" else "cpu"

    def log_probs(model: Any) -> Tensor:
        ids_1T = torch.zeros(1, tokens, dtype=torch.long, device=device)
        hidden_RD = hidden_states(model, input_ids=ids_1T, use_cache=False, attention_mask=_NO_MASK)[0]
        hidden_RD = hidden_RD[ids_1T[0]]  # those that predict something: at most all of them
        weight_VD, bias_V = _head_of(model, learner.fp32_logits)
        chunk = recipe.learner.chunk
        # Stands in for `chunked_log_probs`, which reads the ends of chunks from tensors without data here.
        cuts = [min(start, tokens) for start in range(0, tokens + chunk, chunk)]
        how = recipe.temperature, chunk, learner.fp32_logits, cuts
        logp_W, _ = _Chunked.apply(hidden_RD, weight_VD, bias_V, ids_1T[0], ids_1T[0], *how)
        return logp_W

    for reduces in (recipe.learner.reduce == "micro_batch", True):
        sharded = isinstance(learner._whole, Whole)
        if sharded:
            group_of(learner._whole).set_requires_gradient_sync(reduces)
        logp_W = learner._whole(log_probs) if sharded else log_probs(learner.model)
        logp_W.sum().backward()
        del logp_W
        learner._gather_gradients()
    learner._optimiser.step(1e-6)


def trace_generator(recipe: Recipe, config: Any, slots: int) -> int:
    """Return the peak bytes of the built-in engine: all slots' prompts, and a decode step at full length."""
    model, positions = empty(config, recipe).eval(), positions_of(recipe)
    groups = -(-slots // recipe.batch.samples)
    with torch.no_grad(), counted(model) as mode:
        cache = SlotCache(config.num_hidden_layers, slots, positions, torch.device("meta"))
        # Prompts are also read while other slots are full.
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
            fp32 = recipe.fp32_head("generator")
            logp_BV = log_probs_TV(model, hidden_BTD[:, -1], recipe.temperature, fp32)
            logp_BV.double().exp_().cumsum(-1)  # what drawing a token allocates
            del hidden_BTD, mask, logp_BV
    return mode.peak


_SHAPES = {
    # hidden, layers, heads, inner, tied: from Qwen3's config.json; all have 8 key/value heads of size 128
    "0.6B": (1024, 28, 16, 3072, True),
    "1.7B": (2048, 28, 16, 6144, True),
    "8B": (4096, 36, 32, 12288, False),
}
_KEYS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "vocab_size", "tie_word_embeddings"),
)


def _config(recipe: Recipe) -> Any:
    from transformers import AutoConfig

    if not (size := _size(recipe)):
        found = cast(Any, model_shape(recipe)).config.to_dict()
        return AutoConfig.for_model("qwen3", **{key: found[key] for key in _KEYS if found.get(key)})
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


def _size(recipe: Recipe) -> str:
    return next((size for size in _SHAPES if size in recipe.model), "")


def main() -> None:
    """Print a table of formula and trace for one process of each role of every recipe."""
    names = sys.argv[1:] or sorted(f.name[:-5] for f in RECIPES.iterdir() if f.name.endswith(".toml"))
    print("| recipe | shape | role | formula, GiB | trace, GiB | difference |\n|---|---|---|---|---|---|")
    for name in names:
        recipe = load_recipe(name)
        config = _config(recipe)
        shape = ModelShape.of(config.to_dict(), name)
        ranks = max(recipe.trainers, 4)
        found = {
            "trainer, unsharded": (trainer_memory(recipe, shape).total, trace_trainer(recipe, config)),
            f"trainer, one of {ranks}": (
                trainer_memory(recipe, shape, ranks).total,
                trace_rank(recipe, config, ranks),
            ),
        }
        if recipe.vllm is None:  # vLLM takes the share of a GPU that it is given
            slots = recipe.decode_slots
            of_generator = generator_memory(recipe, shape, slots).total
            found["generator"] = (of_generator, trace_generator(recipe, config, slots))
        for role, (formula, trace) in found.items():
            both = f"{formula / 2**30:.2f} | {trace / 2**30:.2f}"
            model = f"Qwen3-{_size(recipe)}" if _size(recipe) else recipe.model
            print(f"| {name} | {model} | {role} | {both} | {formula / trace - 1:+.1%} |", flush=True)


if __name__ == "__main__":
    main()
