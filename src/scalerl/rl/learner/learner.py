"""The learner: forward, loss, one optimiser step; on one process or sharded over many.

Every process makes a `Learner` and calls its methods with the same arguments in the same order: with several
processes every method is collective and returns the same everywhere. With one there is no process group.

    learner = load_learner(recipe, model_folder)                # scalerl.rl.learner.load
    stats = learner.step(batch)                                 # the same whole batch on every rank
    for name, weight in learner.weights(): ...                  # whole tensors, one block at a time
    learner.restore(folder)                                     # saved by any number of ranks

The rows of a batch are divided over the ranks, balanced by tokens. Token weights sum to 1 over the whole
batch, so gradients are summed over the ranks, not averaged; so are the sums behind the statistics.

Shapes in names: M completions of a micro-batch, T positions, D hidden size, V vocabulary.
"""

import math
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from scalerl.errors import DivergedError, OutOfMemoryError, OwnCodeError
from scalerl.model_config import ModelShape
from scalerl.rl.algo.checked import loss_of
from scalerl.rl.checkpoint.manifest import Sums
from scalerl.rl.checkpoint.store import Write
from scalerl.rl.config.memory import RoleMemory, trainer_memory
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.learner import checkpoint
from scalerl.rl.learner.batch import Batch, StepStats, StepSums, by_length, in_groups, nothing_of, of_rank
from scalerl.rl.learner.optimiser import Optimiser
from scalerl.rl.learner.score import Scorer, copies, in_place, scores_of_held
from scalerl.rl.learner.sharding import Whole, clip_gradients, gathered, group_of, plain_of
from scalerl.rl.model.causal_lm import FlopCount, dtype_of
from scalerl.rl.model.lora import write_adapter
from scalerl.rl.model.out_of_memory import within_memory
from scalerl.rl.model.routing import balance_of
from scalerl.rl.model.weights import WeightStream, plan_of, weights_of
from scalerl.rl.types import Done, Pending, Weights

T = TypeVar("T")


def _completions(batch: Batch, rows: np.ndarray) -> tuple[Any, ...]:
    """Return the arguments of a `Scorer` for some completions."""
    extent = int(batch.length_N[rows].max())
    experts = None if batch.expert_NTLK is None else batch.expert_NTLK[rows, : extent - 1]
    tokens = batch.token_NT[rows, :extent], batch.sampled_NT[rows, 1:extent]
    return *tokens, batch.prompt_N[rows], batch.group_N[rows], experts


class StepStoppedError(Exception):
    """The run stops: a step was abandoned between two micro-batches and has changed nothing."""


class Learner:
    """The trainer of one model; `version` counts trainer steps, skipped ones included.

    Weights in a lower precision have float32 masters, which gradients are summed in and steps are made on: in
    the lower precision a step with a small learning rate would round to nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        base: nn.Module | None = None,
        *,
        mesh: DeviceMesh | None = None,
        packed: bool = False,
    ) -> None:
        """Prepare to train `model`; `base` is a frozen model, the reference of the divergence `recipe.kl`.

        With a `mesh` both are sharded over it (`scalerl.rl.learner.sharding`). `packed` says that their
        attention is one for packed sequences.
        """
        self._whole, self._mesh, self._recipe = model, mesh, recipe
        self.model = plain_of(model).train()
        self.trainers = dist.get_world_size() if mesh else 1
        """Number of processes of the learner."""
        self.version = 0
        self.fp32_logits = recipe.fp32_head("trainer")
        self.device = next(model.parameters()).device
        self._trained = [p for p in self.model.parameters() if p.requires_grad]
        # Weights in float32 are their own masters, without a second copy.
        self._masters = [p if p.dtype == torch.float32 else p.detach().float() for p in self._trained]
        self._optimiser = Optimiser(recipe.optimiser, self._masters, recipe.learner.offload_optimiser)
        kernels = recipe.engine.kind != "transformers" and not recipe.learner.compile
        how: dict[str, Any] = {"chunk": recipe.learner.chunk, "packed": packed, "kernels": kernels}
        how["cut"] = recipe.top_p, recipe.top_k
        self.score = Scorer(model, recipe.temperature, self.fp32_logits, **how)
        self._base_score = Scorer(base, recipe.temperature, self.fp32_logits, **how) if base else None
        # A loss that raises on one rank alone must end that rank, because the others wait for it.
        self._loss = recipe.loss if mesh else partial(loss_of, recipe.loss)
        self._updates = max(int(getattr(recipe.loss, "updates", 1)), 1)
        # Shards of a sharded model: the checkpoint stores them like masters.
        self._proximal = [p.detach().clone() for p in self._trained] if self._updates > 1 else []
        """The weights before the first of `updates` steps, for a loss with a proximal policy."""
        self._flop_count = FlopCount.of(self.model)
        self.stop = threading.Event()
        self._report: Callable[[int, int], None] = lambda done, of: None
        # A group of its own: a thread saves while this one trains, and the collectives of two threads in one
        # group would have no defined order.
        self._disk: dist.ProcessGroup | None = None
        self._stopping: dist.ProcessGroup | None = None
        if mesh:
            seconds = timedelta(seconds=recipe.learner.timeout)
            self._disk = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=seconds))
            # On the CPU: a stop must not wait for the GPU's queue.
            self._stopping = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=seconds))

    def watch(self, stop: threading.Event, report: Callable[[int, int], None]) -> None:
        """Abandon a step between two micro-batches by a `StepStoppedError` once `stop` is set on any rank.

        `report` is called before each micro-batch with its index and the number of micro-batches of the step.
        """
        self.stop, self._report = stop, report

    def check_life(self) -> None:
        """Do nothing; a learner of other processes raises a LearnerLostError here if one of them is lost."""

    def weights(self) -> Weights:
        """Return the current weights as a stream, by the names of the plain model; tied weights occur once.

        Weights of one process are not copied. Those of a sharded model are gathered one block at a time, in
        the model's precision, and every rank must read all of them.
        """
        if self._mesh is None:
            return weights_of(self.model)
        plan = plan_of(self.model, dtype_of(self._recipe.precision))
        groups = partial(gathered, cast("Whole", self._whole))
        # Copies, because the storage of gathered weights is freed with their block.
        return WeightStream(plan, lambda: ((n, w.detach().clone()) for of_one in groups() for n, w in of_one))

    @torch.no_grad()
    def restore(self, folder: Path) -> None:
        """Continue from the checkpoint in `folder`, saved by a learner on any number of processes."""
        state = self._disk_state()
        checkpoint.load(state, folder / checkpoint.DISK, self._disk)
        self.version = int(state["version"])
        self._round_masters()

    def save(self, folder: Path) -> Callable[[], Sums]:
        """Start to save the training state of a sharded learner; training may continue at once.

        The returned function waits until the state is on disk, on rank 0 that of all ranks, and returns the
        checksums of its files. A folder without `.metadata` is incomplete.
        """
        return checkpoint.save(self._disk_state(), folder, cast("dist.ProcessGroup", self._disk))

    def save_pretrained(self, folder: str | Path) -> None:
        """Save a sharded model; see `checkpoint.save_pretrained`."""
        dtype = dtype_of(self._recipe.precision)
        checkpoint.save_pretrained(cast("Whole", self._whole), Path(folder), dtype)

    def saver(self, near: Path, resumable: bool = True) -> Write:
        """Return a function that writes the current model into a folder in Hugging Face format.

        It may be called later, from any thread. With `resumable` it also writes what `restore` reads.
        For a learner on one process; only others need `near`, the place of files that are written at once.
        """
        weights = checkpoint.host_state(self.model)
        adapter = checkpoint.adapter_state(self.model, dtype_of(self._recipe.precision))
        held = checkpoint.to_host(self._disk_state()) if resumable else {}
        model: Any = self.model

        def write(folder: Path) -> Sums:
            model.save_pretrained(folder, state_dict=weights)
            if adapter:
                write_adapter(adapter, model, folder / checkpoint.ADAPTER)
            sums = checkpoint.write(held, folder / checkpoint.DISK) if held else {}
            return {f"{checkpoint.DISK}/{name}": found for name, found in sums.items()}

        return write

    def _disk_state(self) -> checkpoint.State:
        """Return version, masters, moments and proximal weights by name, without copies of tensors."""
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        state = {"version": torch.tensor(self.version)}
        state |= {f"{name}/proximal": held for name, held in zip(names, self._proximal, strict=False)}
        for name, master in zip(names, self._masters, strict=True):
            state |= {f"{name}/{kind}": value for kind, value in self._optimiser.moments(master).items()}
            state[f"{name}/master"] = master.detach()
        return state

    def hold(self) -> list[Tensor]:
        """Return a copy of the trained weights, for `held_scores`; if sharded, of this rank's shards."""
        return copies(self._trained)

    def held_scores(
        self,
        held: Sequence[Tensor],
        token_NT: Tensor,
        wanted_NT: Tensor,
        heads: Sequence[bool],
        expert_NTLK: np.ndarray | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `scalerl.rl.learner.score.scores_of_held`; `held` is what `hold` returned."""
        # Torn: the last step is made but not recorded yet.
        return self._within_memory(
            lambda: scores_of_held(held, self._trained, self.score, token_NT, wanted_NT, heads, expert_NTLK),
            torn=True,
        )

    def begin(self, batch: Batch) -> Pending[StepStats]:
        """Make a step; in this process it is done when this returns."""
        return Done(self.step(batch))

    def step(self, batch: Batch) -> StepStats:
        """Make one update from `batch`; an empty batch changes only the version."""
        scored = self.version % self._updates > 0
        if not scored:
            for held, weight in zip(self._proximal, self._trained, strict=False):
                held.copy_(weight.detach())
        if not len(batch):
            # Counted: admission frees the slots of a consumed batch by its version.
            self.version += 1
            return StepStats()
        sharded = self._mesh is not None  # the other ranks are then in the middle of the step
        try:
            sums, ratio_max = self._within_memory(lambda: self._accumulate_all(batch), torn=sharded)
        except (OutOfMemoryError, OwnCodeError):
            self._drop_gradients()
            raise
        # From the version, so that a resume needs no scheduler state.
        lr = self._recipe.lr_at(self.version)
        # Checked before the optimiser step, so that the weights are still the last good ones.
        norm = clip_gradients(self._masters, self._recipe.optimiser.max_grad_norm)
        if not math.isfinite(norm):
            raise DivergedError(self.version + 1, "the gradient is not finite; the run ends before it")
        self._within_memory(lambda: self._optimiser.step(lr), torn=True)
        self._round_masters()
        self.version += 1
        load = math.nan, math.nan
        if self.score.routers is not None:
            load = balance_of(sums.load.view(self.score.routers.n_layers, -1).numpy())
        # A backward pass costs two forward passes; base model and proximal policy cost one forward pass each.
        n_passes = 3 + (self._base_score is not None) + scored
        tokens, ratio, squares = int(batch.sampled_NT.sum()), float(sums.ratio), float(sums.ratio_squared)
        return StepStats(
            loss=float(sums.loss),
            grad_norm=norm,
            lr=lr,
            entropy=float(sums.entropy) / tokens,
            ratio_mean=ratio / tokens,
            ratio_max=ratio_max,
            ratio_clipped=float(sums.clipped) / tokens,
            ess=ratio * ratio / (tokens * squares) if squares else math.nan,
            logp_shift=float(sums.log_ratio_abs) / tokens,
            kl=float(sums.kl) / tokens if self._base_score is not None else math.nan,
            router_load_max=load[0],
            router_load_entropy=load[1],
            flops=n_passes * self._flop_count.forward(*batch.tokens_and_positions()),
            tokens=tokens,
        )

    def _within_memory(self, do: Callable[[], T], torn: bool) -> T:
        def memory() -> RoleMemory:
            config: Any = self.model.config
            return trainer_memory(self._recipe, ModelShape.of(config.to_dict(), "model"), self.trainers)

        return within_memory(do, "trainer", memory, torn)

    def _drop_gradients(self) -> None:
        for tensor in (*self._masters, *self._trained):
            tensor.grad = None

    def _accumulate_all(self, batch: Batch) -> tuple[StepSums, float]:
        """Compute the gradient of the whole batch; return its sums and its largest importance ratio."""
        sums, ratio_max = torch.zeros(1, dtype=torch.float64), 0.0
        micro_batches = self._micro_batches(batch)
        proximal = self._by_proximal(batch, micro_batches)
        for i, rows in enumerate(micro_batches):
            self._report(i, len(micro_batches))
            self._check_stop()
            if self._mesh:
                # Reduced only in the last pass, gradients are sent once a step but are unsharded until then.
                reduces = i == len(micro_batches) - 1 or self._recipe.learner.reduce == "micro_batch"
                group_of(self._whole).set_requires_gradient_sync(reduces)
            some = (batch, rows) if len(rows) else nothing_of(batch)
            part, largest = self._accumulate(*some, *proximal[i : i + 1])
            sums, ratio_max = sums + part.packed(), max(ratio_max, largest)
        if not self._mesh:
            return StepSums.unpacked(sums), ratio_max
        of_all, most = sums.to(self.device), torch.tensor(ratio_max, device=self.device)
        # Not over `tensor`, whose ranks computed the same rows together.
        group = self._mesh["data"].get_group()
        dist.all_reduce(of_all, group=group)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        return StepSums.unpacked(of_all.cpu()), float(most)

    def _check_stop(self) -> None:
        stopped = torch.tensor(float(self.stop.is_set()))
        if self._stopping is not None:  # all ranks stop before the same micro-batch
            dist.all_reduce(stopped, dist.ReduceOp.MAX, group=self._stopping)
        if stopped:
            self._drop_gradients()
            raise StepStoppedError

    def _by_proximal(self, batch: Batch, micro_batches: list[np.ndarray]) -> list[Tensor]:
        """Score each micro-batch by the proximal policy; return nothing if that is the current policy."""
        found = list[Tensor]()
        if self.version % self._updates:
            with in_place(self._proximal, self._trained):
                for rows in micro_batches:
                    self._check_stop()
                    some = (batch, rows) if len(rows) else nothing_of(batch)
                    found.append(self.score(*_completions(*some))[0])
            if self.score.routers is not None:
                self.score.routers.clear()
        return found

    def _micro_batches(self, batch: Batch) -> list[np.ndarray]:
        """Return the rows of each pass of this rank; extra passes are empty if another rank has more.

        Groups stay together if their prompt is read once; otherwise completions are sorted by length.
        """
        size = self._recipe.batch
        if self.score.dense:
            return in_groups(batch.length_N, batch.group_N, size)
        data = self._mesh["data"] if self._mesh else None
        rank, n_ranks = (data.get_local_rank(), data.size()) if data else (0, 1)
        cut = partial(by_length, batch.length_N, size=size, packed=self.score.packed)
        return of_rank(batch.length_N, rank, n_ranks, cut)

    def _accumulate(self, batch: Batch, rows: np.ndarray, *proximal: Tensor) -> tuple[StepSums, float]:
        """Add the gradient of some completions to the masters'; return sums and the largest ratio.

        `proximal` has their log-probabilities by the proximal policy, if it differs from the current one.
        """
        extent = int(batch.length_N[rows].max())

        def cut(array_NT: np.ndarray) -> Tensor:
            return torch.from_numpy(array_NT[rows, 1:extent]).to(self.device)

        weight_MT = cut(batch.weight_NT)
        trained_MT = weight_MT > 0
        completions = _completions(batch, rows)
        logp_MT, entropy_MT = self.score(*completions)
        behaviour_MT = cut(batch.behaviour_logp_NT)
        advantage_M = torch.from_numpy(batch.advantage_N[rows]).to(logp_MT)
        value_MT, clipped_MT = self._loss(logp_MT, behaviour_MT, advantage_M, trained_MT, *proximal)
        kl_MT = torch.zeros_like(logp_MT)
        if self._base_score is not None:
            with torch.no_grad():
                base_logp_MT, _ = self._base_score(*completions[:-1])  # the base model routes by itself
            kl_MT = self._recipe.kl(logp_MT, base_logp_MT)
        loss = ((value_MT + self._recipe.kl.coefficient * kl_MT) * weight_MT.to(logp_MT)).sum()
        load, routers = loss.new_zeros(0), self.score.routers
        if routers is not None:
            load = routers.load().flatten()
            if routers.balance_coefficient and trained_MT.any():
                share = trained_MT.sum() / int(batch.sampled_NT.sum())
                loss = loss + routers.balance_coefficient * share * routers.balance_loss()
        # Backward per micro-batch, so that only its activations are held.
        loss.backward()
        if routers is not None:
            routers.clear()
        self._gather_gradients()
        # In float64, because the square of a ratio above e^44 overflows float32.
        log_ratio = (logp_MT.detach() - behaviour_MT)[trained_MT].double()
        ratio = log_ratio.exp()
        sums = StepSums(
            loss=loss.detach(),
            entropy=entropy_MT.detach().sum(),
            ratio=ratio.sum(),
            ratio_squared=(ratio**2).sum(),
            log_ratio_abs=log_ratio.abs().sum(),
            clipped=clipped_MT[trained_MT].sum(),
            kl=kl_MT.detach()[trained_MT].sum(),
            load=load,
        )
        return sums, float(ratio.max()) if len(ratio) else 0.0

    def _gather_gradients(self) -> None:
        for parameter, master in zip(self._trained, self._masters, strict=True):
            if master is not parameter and parameter.grad is not None:
                grad = parameter.grad.float()
                master.grad = grad if master.grad is None else master.grad.add_(grad)
                parameter.grad = None

    @torch.no_grad()
    def _round_masters(self) -> None:
        """Copy the masters' values into the weights that the model computes with."""
        for parameter, master in zip(self._trained, self._masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)
