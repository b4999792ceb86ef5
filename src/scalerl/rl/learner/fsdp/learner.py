"""The learner sharded over processes: one step is the same as in one process, but for rounding.

Every rank of the process group makes one `ShardedLearner` and calls its methods with the same arguments in
the same order; nothing is returned before all have called. What it returns is the same everywhere:

    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", ...)
    learner = load_sharded_learner(recipe, model_folder)        # collective, as all that follows
    stats = learner.step(batch)                                 # the same whole batch on every rank
    for name, weight in learner.weights_by_tensor(): ...        # whole tensors, one block at a time
    learner.save(folder)                                        # returns once the copy is made; .wait()
    learner.load(folder)                                        # saved by any number of ranks

A batch is shared by rows, balanced by tokens. The weights of tokens sum to 1 over the whole batch, so the
gradients of the ranks are summed, not averaged, and so are the sums that the stats are made of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from scalerl.errors import InputError
from scalerl.rl.algo.loss import Kl, Loss
from scalerl.rl.config.cluster import Fsdp2
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.config.settings import AdamW
from scalerl.rl.engine.check import check_training
from scalerl.rl.learner.batch import Batch
from scalerl.rl.learner.fsdp.checkpoint import DISK, Saving, State, load, save
from scalerl.rl.learner.fsdp.pretrained import save_pretrained
from scalerl.rl.learner.fsdp.rows import passes_of_rank
from scalerl.rl.learner.fsdp.score import ShardedScorer, can_pack
from scalerl.rl.learner.fsdp.sharding import Whole, blocks_of, group_of, shard, tensors_of
from scalerl.rl.learner.fsdp.tensor_parallel import check_plan
from scalerl.rl.learner.held import copies, scores_of_held
from scalerl.rl.learner.learner import Learner
from scalerl.rl.model.causal_lm import (
    checkpoint_activations,
    compute_device,
    dtype_of,
    empty_model,
    load_model,
    without_dropout,
)
from scalerl.rl.model.lora import add_adapters
from scalerl.rl.types import Weights
from scalerl.rl.workers.ranks import on_all_ranks


class ShardedLearner(Learner):
    """A `Learner` whose model is sharded over the processes of `mesh`; every method is collective."""

    def __init__(
        self,
        whole: Whole,
        mesh: DeviceMesh,
        loss: Loss,
        optimiser: AdamW,
        temperature: float,
        fp32_logits: bool,
        micro_batch: int,
        settings: Fsdp2,
        kl: Kl | None = None,
        base: Whole | None = None,
    ) -> None:
        """The model and the base model are sharded over `mesh`; see `Learner` for the rest."""
        self._whole, self._mesh, self._sharding = whole, mesh, settings
        super().__init__(whole.model, loss, optimiser, temperature, fp32_logits, micro_batch, kl, base)
        seconds = timedelta(seconds=settings.timeout)
        self._disk = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=seconds))
        for master in self._masters:  # as AdamW itself begins, so that a state is whole before the first step
            zeros = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
            self._optimiser.state[master] = {"step": torch.zeros((), device=self._device), **zeros}

    def _scorer(self, model: nn.Module, temperature: float, fp32_logits: bool) -> ShardedScorer:
        device = next(model.parameters()).device
        settings = self._sharding
        return ShardedScorer(self._whole, device, temperature, fp32_logits, settings.chunk, settings.packed)

    def weights_by_tensor(self) -> Iterator[tuple[str, Tensor]]:
        """The current weights one by one, whole, by the names of the plain model, in the model's precision.

        No rank holds more than a block of them at a time. It has to be gone through to its end.
        """
        return tensors_of(self._whole)

    def weights(self) -> Weights:
        """A copy of the current weights, all of them on every rank."""
        return {name: weight.float().cpu().numpy() for name, weight in self.weights_by_tensor()}

    def save(self, folder: str | Path) -> Saving:
        """Begin to save what training needs to go on; training may go on at once.

        It is on the disk after `.wait()`, on rank 0 that of all ranks; without `.metadata` it is not whole.
        """
        return save(self._disk_state(), Path(folder), self._disk)

    @torch.no_grad()
    def load(self, folder: str | Path) -> None:
        """Go on from what was saved by any number of ranks.

        Raises:
            InputError: it is not whole, or that of another model.
        """
        state = self._disk_state()
        load(state, Path(folder), self._disk)
        self.version = int(state["version"])

    def save_pretrained(self, folder: str | Path) -> None:
        """Save the model in Hugging Face format, a file for each block, which is all that is held at once.

        Raises:
            WriteError: rank 0, which writes, cannot; on every rank.
        """
        save_pretrained(self._whole, Path(folder))

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any], folder: Path | None = None) -> None:
        """Go on from what a learner of any number of processes saved, one included.

        Raises:
            InputError: it is not whole, or that of another model.
        """
        if "masters" not in state:
            assert folder is not None
            return self.load(folder / DISK)
        self.version = state["version"]
        for master, value, moments in zip(self._masters, state["masters"], state["moments"], strict=True):
            _scatter(value, master)
            for name, moment in moments.items():
                _scatter(moment, self._optimiser.state[master][name])

    def state(self) -> dict[str, Any]:
        """What is not in what `save` writes."""
        return {"version": self.version}

    def hold(self) -> list[Tensor]:
        """Each rank keeps its own shards; see `Learner.hold`."""
        self._held = copies(self._shards())
        return []

    def held_scores(
        self, held: Sequence[Tensor], token_NT: Tensor, wanted_NT: Tensor, heads: Sequence[bool]
    ) -> tuple[Tensor, Tensor]:
        """By what this rank holds; see `Learner.held_scores`."""
        return scores_of_held(self._held, self._shards(), self.distributions, token_NT, wanted_NT, heads)

    @torch.no_grad()
    def _shards(self) -> list[Tensor]:
        """What this rank has of the masters."""
        return [cast("DTensor", master).to_local() for master in self._masters]

    def _disk_state(self) -> State:
        """Masters and moments of what is trained, as they are, by name."""
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        state = {"version": torch.tensor(self.version)}
        for name, master in zip(names, self._masters, strict=True):
            moments = self._optimiser.state[master]
            state |= {f"{name}/{kind}": value for kind, value in moments.items()}
            state[f"{name}/master"] = master.detach()
        return state

    def _micro_batches(self, batch: Batch) -> list[np.ndarray]:
        """The passes of this rank; empty ones where another has more."""
        most = self._micro_batch, self._sharding.micro_tokens
        data = self._mesh["data"]
        return passes_of_rank(batch.length_N, data.get_local_rank(), data.size(), *most)

    def _accumulate_all(self, batch: Batch) -> tuple[Tensor, float]:
        passes = self._micro_batches(batch)
        sums, ratio_max = torch.zeros(7, dtype=torch.float64), 0.0
        for i, rows in enumerate(passes):
            last = i == len(passes) - 1
            group_of(self._whole).set_requires_gradient_sync(last or self._sharding.sync == "pass")
            part, largest = self._accumulate(*((batch, rows) if len(rows) else _nothing(batch)))
            sums, ratio_max = sums + part, max(ratio_max, largest)
        sums, largest = sums.to(self._device), torch.tensor(ratio_max, device=self._device)
        group = self._mesh["data"].get_group()
        dist.all_reduce(sums, group=group)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        return sums.cpu(), float(largest)

    def _clip(self) -> float:
        by_mesh: dict[Any, list[Any]] = {}  # what is shared by tensor has a mesh of its own
        for master in self._masters:
            if master.grad is not None:
                by_mesh.setdefault(cast("DTensor", master).device_mesh, []).append(master)
        norms = [nn.utils.get_total_norm([m.grad for m in masters]) for masters in by_mesh.values()]
        norm = torch.stack([cast("DTensor", norm).full_tensor() for norm in norms]).norm()
        for masters in by_mesh.values():
            nn.utils.clip_grads_with_norm_(masters, self._settings.max_grad_norm, norm)
        return float(norm)


def _scatter(value: Tensor, shards: Tensor) -> None:
    """Each rank takes its part of `value`, which all have."""
    value = value.to(shards.device)
    if isinstance(shards, DTensor):
        value = distribute_tensor(value, shards.device_mesh, shards.placements, src_data_rank=None)
    shards.copy_(value)


def _nothing(batch: Batch) -> tuple[Batch, np.ndarray]:
    """Two tokens that weigh nothing: a pass of a rank that has no completion left for it."""
    row = np.zeros(1, dtype=np.int64)
    none = replace(
        batch,
        token_NT=batch.token_NT[:1, :2],
        behaviour_logp_NT=np.zeros((1, 2), dtype=np.float32),
        weight_NT=np.zeros((1, 2)),
        version_NT=batch.version_NT[:1, :2],
        advantage_N=np.zeros(1),
        length_N=np.array([2]),
        prompt_N=np.array([1]),
        group_N=row,
    )
    return none, row


def load_sharded_learner(
    recipe: Recipe, model_folder: str | Path, settings: Fsdp2 | None = None
) -> ShardedLearner:
    """The learner of a recipe over all processes of the default group, at version 0; collective.

    Rank 0 reads the model and sends it; the others need only its config at `model_folder`.

    Raises:
        InputError: on every rank; the model cannot be loaded or sharded, or computes at random while it is
            trained.
    """
    settings = chosen = settings or Fsdp2()
    device = compute_device()
    mesh = _mesh(device, settings.tensor_parallel)
    precision = dtype_of(recipe.precision)

    def sharded(trained: bool) -> tuple[Whole, bool]:
        model = on_all_ranks(lambda: _model(recipe, model_folder, precision, chosen, trained))
        packs = torch.tensor(chosen.packed and dist.get_rank() == 0 and can_pack(model)).int()
        dist.broadcast(packs, 0)
        model.set_attn_implementation(chosen.attention)
        return shard(model, mesh, device, precision), bool(packs)

    whole, packed = sharded(True)
    settings = replace(settings, packed=packed)
    return ShardedLearner(
        whole,
        mesh,
        recipe.loss,
        recipe.optimiser,
        recipe.temperature,
        recipe.fp32_logits in ("both", "trainer"),
        recipe.batch.micro,
        settings,
        recipe.kl,
        sharded(False)[0] if recipe.kl.coefficient else None,
    )


def _mesh(device: torch.device, n_tensor: int) -> DeviceMesh:
    n_ranks = dist.get_world_size()
    if n_ranks % n_tensor:
        raise InputError(
            f"learner.tensor_parallel: {n_ranks} processes cannot be cut into rows of {n_tensor}"
        )
    return init_device_mesh(device.type, (n_ranks // n_tensor, n_tensor), mesh_dim_names=("data", "tensor"))


def _model(
    recipe: Recipe, model_folder: str | Path, precision: torch.dtype, settings: Fsdp2, trained: bool
) -> Any:
    """The model as it is on rank 0, and its shape on the others."""
    if dist.get_rank() == 0:
        model = load_model(model_folder, precision)
        if trained:
            check_training(model, recipe.model)
    else:
        model = empty_model(model_folder, precision)
        without_dropout(model)
    if settings.tensor_parallel > 1:
        check_plan(model, settings.tensor_parallel)
        if recipe.lora.rank:
            raise InputError("learner.tensor_parallel: adapters cannot be shared so: leave it 1")
    blocks_of(model)  # complains where there are none
    if not trained:
        return model.requires_grad_(False)
    model = add_adapters(model, recipe.lora, recipe.seed)
    if recipe.activation_checkpointing:
        checkpoint_activations(model)
    return model
