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

import heapq
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
from scalerl.rl.config.cluster import Fsdp2
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.engine.check import check_training
from scalerl.rl.learner.batch import Batch
from scalerl.rl.learner.fsdp.checkpoint import DISK, Saving, State, load, save, save_pretrained
from scalerl.rl.learner.fsdp.score import ShardedScorer, can_pack
from scalerl.rl.learner.fsdp.sharding import Whole, blocks_of, check_plan, group_of, shard, tensors_of
from scalerl.rl.learner.learner import Learner
from scalerl.rl.learner.score import copies, scores_of_held
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
        self, whole: Whole, mesh: DeviceMesh, recipe: Recipe, settings: Fsdp2, base: Whole | None = None
    ) -> None:
        """The model and the base model are sharded over `mesh`; see `Learner` for the rest."""
        self._whole, self._mesh, self._sharding = whole, mesh, settings
        super().__init__(whole.model, recipe, base)
        seconds = timedelta(seconds=settings.timeout)
        # A group of its own, as a thread saves while this one trains: nothing orders the collectives of two
        # threads in one group.
        self._disk = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=seconds))
        for master in self._masters:  # as AdamW itself starts, so that a state is whole before the first step
            zeros = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
            self._optimiser.state[master] = {"step": torch.zeros((), device=self.device), **zeros}

    def _scorer(self) -> ShardedScorer:
        settings, temperature = self._sharding, self._recipe.temperature
        return ShardedScorer(
            self._whole, self.device, temperature, self.fp32_logits, settings.chunk, settings.packed
        )

    def weights_by_tensor(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the current weights, whole, by the names of the plain model, in the model's precision.

        No rank holds more than a block of them at a time. All must be taken, on every rank.
        """
        return tensors_of(self._whole)

    def weights(self) -> Weights:
        """Return a copy of the current weights, all of them on every rank."""
        return {name: weight.float().cpu().numpy() for name, weight in self.weights_by_tensor()}

    def save(self, folder: str | Path) -> Saving:
        """Start to save what training needs to go on; training may go on at once.

        After `.wait()` it is on the disk, on rank 0 that of all ranks; without `.metadata` it is not whole.
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
        """Return what `save` does not write."""
        return {"version": self.version}

    def hold(self) -> list[Tensor]:
        """Keep a copy of the shards of this rank; see `Learner.hold`."""
        self._held = copies(self._shards())
        return []

    def held_scores(
        self, held: Sequence[Tensor], token_NT: Tensor, wanted_NT: Tensor, heads: Sequence[bool]
    ) -> tuple[Tensor, Tensor]:
        """Score by the shards that the ranks hold; see `Learner.held_scores`."""
        return scores_of_held(self._held, self._shards(), self._score, token_NT, wanted_NT, heads)

    @torch.no_grad()
    def _shards(self) -> list[Tensor]:
        """Return this rank's part of the masters."""
        return [cast("DTensor", master).to_local() for master in self._masters]

    def _disk_state(self) -> State:
        """Return masters and moments by name, without a copy."""
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        state = {"version": torch.tensor(self.version)}
        for name, master in zip(names, self._masters, strict=True):
            moments = self._optimiser.state[master]
            state |= {f"{name}/{kind}": value for kind, value in moments.items()}
            state[f"{name}/master"] = master.detach()
        return state

    def _micro_batches(self, batch: Batch) -> list[np.ndarray]:
        """Return the passes of this rank; empty ones where another rank has more."""
        most = self._recipe.batch.micro, self._sharding.micro_tokens
        data = self._mesh["data"]
        return passes_of_rank(batch.length_N, data.get_local_rank(), data.size(), *most)

    def _accumulate_all(self, batch: Batch) -> tuple[Tensor, float]:
        passes = self._micro_batches(batch)
        sums, ratio_max = torch.zeros(7, dtype=torch.float64), 0.0
        for i, rows in enumerate(passes):
            last = i == len(passes) - 1
            # Reduced in the last pass, gradients travel once a step; they are held whole until then.
            group_of(self._whole).set_requires_gradient_sync(last or self._sharding.sync == "pass")
            part, largest = self._accumulate(*((batch, rows) if len(rows) else _nothing(batch)))
            sums, ratio_max = sums + part, max(ratio_max, largest)
        sums, largest = sums.to(self.device), torch.tensor(ratio_max, device=self.device)
        # Not over `tensor`, whose ranks have computed the same rows together.
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
            nn.utils.clip_grads_with_norm_(masters, self._recipe.optimiser.max_grad_norm, norm)
        return float(norm)


def _scatter(value: Tensor, shards: Tensor) -> None:
    """Copy this rank's part of `value`, which all ranks have, into `shards`."""
    value = value.to(shards.device)
    if isinstance(shards, DTensor):
        # None: every rank has read the value, and nothing need be sent.
        value = distribute_tensor(value, shards.device_mesh, shards.placements, src_data_rank=None)
    shards.copy_(value)


def _nothing(batch: Batch) -> tuple[Batch, np.ndarray]:
    """Return a completion of two tokens of weight 0, for a rank that has none left in this pass."""
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
    """Return the learner of a recipe over all processes of the default group, at version 0; collective.

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
        # Only rank 0 has weights to try it with, and all must do the same.
        packs = torch.tensor(chosen.packed and dist.get_rank() == 0 and can_pack(model)).int()
        dist.broadcast(packs, 0)
        # After the trial, which runs on the CPU: flash attention needs a GPU.
        model.set_attn_implementation(chosen.attention)
        return shard(model, mesh, device, precision), bool(packs)

    whole, packed = sharded(True)
    settings = replace(settings, packed=packed)
    base = sharded(False)[0] if recipe.kl.coefficient else None
    return ShardedLearner(whole, mesh, recipe, settings, base)


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
    """Return the model on rank 0, and its shape on the others."""
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
    blocks_of(model)  # raises where there are none
    if not trained:
        return model.requires_grad_(False)
    model = add_adapters(model, recipe.lora, recipe.seed)
    if recipe.activation_checkpointing:
        checkpoint_activations(model)
    return model


# -- which rank trains which completions: all compute the same answer, so that nothing is sent ---------------


def share_rows(length_N: np.ndarray, n_ranks: int) -> list[np.ndarray]:
    """Return the rows of each rank, ascending: the longest left goes to the rank with the fewest tokens."""
    shares: list[list[int]] = [[] for _ in range(n_ranks)]
    loads = [(0, rank) for rank in range(n_ranks)]
    for row in np.argsort(-length_N, kind="stable"):
        tokens, rank = loads[0]
        shares[rank].append(int(row))
        heapq.heapreplace(loads, (tokens + int(length_N[row]), rank))
    return [np.array(sorted(share), dtype=np.int64) for share in shares]


def passes(length_N: np.ndarray, rows: np.ndarray, most_rows: int, most_tokens: int) -> list[np.ndarray]:
    """Cut `rows` into forward passes, the shortest first, so that little is padded.

    A pass has at most `most_tokens` tokens with padding, and at least one completion; where `most_tokens` is
    0, it has at most `most_rows` completions.
    """
    rows = rows[np.argsort(length_N[rows], kind="stable")]
    if not most_tokens:
        return np.split(rows, range(most_rows, len(rows), most_rows)) if len(rows) else []
    found: list[list[int]] = []
    for row in rows:
        if found and (len(found[-1]) + 1) * int(length_N[row]) <= most_tokens:
            found[-1].append(int(row))
        else:
            found.append([int(row)])
    return [np.array(one, dtype=np.int64) for one in found]


def passes_of_rank(
    length_N: np.ndarray, rank: int, n_ranks: int, most_rows: int, most_tokens: int
) -> list[np.ndarray]:
    """Return the passes of one rank, filled up with empty ones to the most that any rank has.

    The collectives of a pass need all ranks, also those that have no completion left.
    """
    shares = share_rows(length_N, n_ranks)
    each = [passes(length_N, rows, most_rows, most_tokens) for rows in shares]
    nothing = np.zeros(0, dtype=np.int64)
    return [*each[rank], *[nothing] * (max(map(len, each)) - len(each[rank]))]
