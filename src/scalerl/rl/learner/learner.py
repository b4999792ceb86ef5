"""The learner: forward, loss, one optimiser step.

Shapes in names: M completions of a micro-batch, T positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from scalerl.errors import DivergedError, InputError
from scalerl.rl.checkpoint.manifest import Sums
from scalerl.rl.checkpoint.store import Write, copied_state
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.config.settings import AdamW
from scalerl.rl.engine.check import check_training
from scalerl.rl.learner.batch import Batch
from scalerl.rl.learner.score import Scorer, copies, scores_of_held
from scalerl.rl.model.causal_lm import FlopCount, checkpoint_activations, copy_weights, model_of
from scalerl.rl.model.lora import add_adapters, merged_parameters
from scalerl.rl.types import Done, Pending, Weights


@dataclass(frozen=True)
class StepStats:
    """What one step showed, over the trained tokens; NaN where the step was skipped."""

    loss: float = math.nan
    grad_norm: float = math.nan
    lr: float = math.nan
    entropy: float = math.nan
    """Mean entropy of the trainer's distribution, nats per token."""
    ratio_mean: float = math.nan
    ratio_max: float = math.nan
    ratio_clipped: float = math.nan
    """Share of tokens on which a bound of the loss on the importance ratio acts."""
    ess: float = math.nan
    """Effective sample size of the importance ratios, (sum rho)^2 / (n sum rho^2), in (0, 1]."""
    logp_shift: float = math.nan
    """Mean |log rho|, nats per token: how far trainer and generator are apart, staleness included."""
    kl: float = math.nan
    """Mean divergence from the base model by the recipe's estimator, nats per token; NaN where it is off."""
    flops: float = 0.0
    tokens: int = 0


class StepStoppedError(Exception):
    """The run is to stop: a step was given up between two micro-batches, and has changed nothing."""


class Learner:
    """Trains one model in this process. `version` counts trainer steps, skipped ones included.

    Weights of a lower precision have masters in float32: gradients are summed and steps are made there, as a
    step of a small learning rate would round to nothing.
    """

    trainers = 1
    """Processes that it is on."""
    stop: threading.Event | None = None
    """Once it is set, a step is given up between two micro-batches, by a `StepStoppedError`."""

    def __init__(self, model: nn.Module, recipe: Recipe, base: nn.Module | None = None) -> None:
        """`base` is a model that stays as it is: what the divergence `recipe.kl` is measured from."""
        self.model = model.train()
        self.version = 0
        self.fp32_logits = recipe.fp32_logits in ("both", "trainer")
        self.device = next(model.parameters()).device
        self._recipe = recipe
        self._trained = [p for p in model.parameters() if p.requires_grad]
        # Weights in float32 are their own masters, without a second copy.
        self._masters = [p if p.dtype == torch.float32 else p.detach().float() for p in self._trained]
        self._optimiser = new_adamw(recipe.optimiser, self._masters)
        self._score = self._scorer()
        self._base_score = self._score.by(base) if base is not None else None
        self._flop_count = FlopCount.of(model)

    def _scorer(self) -> Scorer:
        kernels = self._recipe.engine.kind != "transformers"
        return Scorer(self.model, self._recipe.temperature, self.fp32_logits, kernels)

    def check_life(self) -> None:
        """Raise a LearnerLostError where a process of the learner is gone: this learner has but one."""

    def weights(self) -> Weights:
        """Return a copy of the current weights."""
        return copy_weights(self.model)

    def weights_by_tensor(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the current weights by the names of the plain model, without a copy, tied ones once."""
        for name, weight in merged_parameters(self.model):
            yield name, weight.detach()

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs: the version, the masters, and the optimiser's moments."""
        return {
            "version": self.version,
            "masters": [master.detach().clone() for master in self._masters],
            "moments": [
                {name: value.clone() for name, value in self._optimiser.state[master].items()}
                for master in self._masters
            ],
        }

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any], folder: Path | None = None) -> None:
        """Go on from `state`; `folder` is that of its checkpoint, with what `saver` wrote.

        Raises:
            InputError: it is the state of a learner on several processes.
        """
        if "masters" not in state:
            again = f"torchrun --nproc-per-node N -m scalerl train {folder and folder.parents[1]} --resume"
            raise InputError(f"{folder}: saved by a learner on several processes: resume it by {again}")
        self.version = state["version"]
        for master, value, moments in zip(self._masters, state["masters"], state["moments"], strict=True):
            master.copy_(value)
            # Before its first step AdamW has none.
            if moments:
                self._optimiser.state[master] = {name: v.to(master.device) for name, v in moments.items()}
        self._round_masters()

    def saver(self, near: Path, resumable: bool = True) -> Write:
        """Return a function that writes the model as it is now, in Hugging Face format, into a folder.

        It may be called in any thread, later. With `resumable` it also writes what `state` leaves out, if
        anything. What has to be written at once goes `near` that folder.
        """
        weights = copied_state(self.model)
        model: Any = self.model

        def write(folder: Path) -> Sums:
            model.save_pretrained(folder, state_dict=dict(weights))
            return {}

        return write

    def hold(self) -> list[Tensor]:
        """Return a copy of the weights that are trained, for `held_scores`."""
        return copies(self._trained)

    def held_scores(
        self, held: Sequence[Tensor], token_NT: Tensor, wanted_NT: Tensor, heads: Sequence[bool]
    ) -> tuple[Tensor, Tensor]:
        """See `scalerl.rl.learner.score.scores_of_held`; `held` is what `hold` returned."""
        return scores_of_held(held, self._trained, self._score, token_NT, wanted_NT, heads)

    def begin(self, batch: Batch) -> Pending[StepStats]:
        """Start a step; in this process it is done at once."""
        return Done(self.step(batch))

    def step(self, batch: Batch) -> StepStats:
        """One update from `batch`; an empty batch changes nothing but the version."""
        if not len(batch):
            # Counted: a version stands for a batch that was consumed, by which admission gives slots back.
            self.version += 1
            return StepStats()
        sums, ratio_max = self._accumulate_all(batch)
        # By the version, so that a resume needs no state of a scheduler.
        lr = self._recipe.optimiser.lr_at(self.version)
        for group in self._optimiser.param_groups:
            group["lr"] = lr
        # Checked before the step: the weights that are saved then are still the last good ones.
        norm = self._clip()
        if not math.isfinite(norm):
            raise DivergedError(self.version + 1, "the gradient is not finite; the run ends before it")
        self._optimiser.step()
        # None, not 0: gradients take no memory while nothing is trained.
        self._optimiser.zero_grad(set_to_none=True)
        self._round_masters()
        self.version += 1
        tokens = int(batch.sampled_NT.sum())
        loss, entropy, ratio, squares, shift, clipped, kl = sums.tolist()
        # A backward pass costs two forward passes; the base model only a forward pass.
        passes = 3 if self._base_score is None else 4
        flops = passes * self._flop_count.forward(*_tokens_and_positions(batch))
        return StepStats(
            loss=loss,
            grad_norm=norm,
            lr=lr,
            entropy=entropy / tokens,
            ratio_mean=ratio / tokens,
            ratio_max=ratio_max,
            ratio_clipped=clipped / tokens,
            ess=ratio * ratio / (tokens * squares) if squares else math.nan,
            logp_shift=shift / tokens,
            kl=kl / tokens if self._base_score is not None else math.nan,
            flops=flops,
            tokens=tokens,
        )

    def _accumulate_all(self, batch: Batch) -> tuple[Tensor, float]:
        """Compute the gradient of the whole batch; returns what `_accumulate` does, over all of it."""
        sums, ratio_max = torch.zeros(7, dtype=torch.float64), 0.0
        for rows in self._micro_batches(batch):
            if self.stop is not None and self.stop.is_set():
                self._optimiser.zero_grad(set_to_none=True)
                raise StepStoppedError
            part, largest = self._accumulate(batch, rows)
            sums, ratio_max = sums + part, max(ratio_max, largest)
        return sums, ratio_max

    def _clip(self) -> float:
        """Bound the norm of the whole gradient; returns what it was."""
        return float(nn.utils.clip_grad_norm_(self._masters, self._recipe.optimiser.max_grad_norm))

    def _micro_batches(self, batch: Batch) -> list[np.ndarray]:
        """Return the rows of each forward pass; the weights per token make the order immaterial.

        Groups stay whole where they fit, as their prompt is then read once. Padded sequences go by length.
        """
        micro = self._recipe.batch.micro
        if not self._score.dense:
            order = np.argsort(batch.length_N, kind="stable")
            return np.split(order, range(micro, len(order), micro))
        cuts, size = [], 0
        _, first_U, size_U = np.unique(batch.group_N, return_index=True, return_counts=True)
        for first, n in zip(first_U, size_U, strict=True):
            if size and size + n > micro:
                cuts, size = [*cuts, first], 0
            cuts += range(first + micro, first + n, micro)
            size = size + n if n <= micro else (n - 1) % micro + 1
        return np.split(np.arange(len(batch)), cuts)

    def _accumulate(self, batch: Batch, rows: np.ndarray) -> tuple[Tensor, float]:
        """Add the gradient of some completions to the masters'.

        Returns:
            Sums of loss, entropy, ratio, its square, |log ratio|, clipped tokens and divergence; and the
            largest ratio.
        """
        extent = int(batch.length_N[rows].max())

        def cut(array_NT: np.ndarray) -> Tensor:
            return torch.from_numpy(array_NT[rows, 1:extent]).to(self.device)

        weight_MT = cut(batch.weight_NT)
        sampled_MT = weight_MT > 0
        completions = (
            batch.token_NT[rows, :extent],
            batch.sampled_NT[rows, 1:extent],
            batch.prompt_N[rows],
            batch.group_N[rows],
        )
        logp_MT, entropy_MT = self._score(*completions)
        behaviour_MT = cut(batch.behaviour_logp_NT)
        advantage_M = torch.from_numpy(batch.advantage_N[rows]).to(logp_MT)
        value_MT, clipped_MT = self._recipe.loss(logp_MT, behaviour_MT, advantage_M, sampled_MT)
        kl_MT = torch.zeros_like(logp_MT)
        if self._base_score is not None:
            with torch.no_grad():
                base_logp_MT, _ = self._base_score(*completions)
            kl_MT = self._recipe.kl(logp_MT, base_logp_MT)
        loss = ((value_MT + self._recipe.kl.coefficient * kl_MT) * weight_MT.to(logp_MT)).sum()
        # At once, so that the activations of one micro-batch are all that is held.
        loss.backward()
        self._gather_gradients()
        # In float64, as the square of a ratio above e^44 overflows float32.
        log_ratio = (logp_MT.detach() - behaviour_MT)[sampled_MT].double()
        ratio = log_ratio.exp()
        of_ratio = [ratio.sum(), (ratio**2).sum(), log_ratio.abs().sum()]
        parts = [loss, entropy_MT.sum(), *of_ratio, clipped_MT[sampled_MT].sum(), kl_MT[sampled_MT].sum()]
        largest = float(ratio.max()) if len(ratio) else 0.0
        return torch.stack([part.detach().double() for part in parts]).cpu(), largest

    def _gather_gradients(self) -> None:
        """Add the gradients of one micro-batch to the masters' own."""
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

    def log_probs(
        self, token_MT: Tensor, wanted_MT: Tensor, model: nn.Module | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return what `Scorer` gives for sequences that share no prompt; of `model`, where it is given."""
        score = self._score if model is None else self._score.by(model)
        return score(token_MT.cpu().numpy(), wanted_MT.cpu().numpy())


def _tokens_and_positions(batch: Batch) -> tuple[float, float]:
    """Return the tokens that are read, and the positions that they attend to; a group's prompt counts once.

    The last token of a completion is predicted and never read.
    """
    _, first_U = np.unique(batch.group_N, return_index=True)
    prompt_N, read_N = batch.prompt_N.astype(float), batch.length_N - 1.0
    own_N, prompt_U = read_N - prompt_N, prompt_N[first_U]
    positions_N = (read_N * (read_N + 1) - prompt_N * (prompt_N + 1)) / 2
    return own_N.sum() + prompt_U.sum(), positions_N.sum() + (prompt_U * (prompt_U + 1) / 2).sum()


def new_adamw(settings: AdamW, parameters: Iterable[Tensor]) -> torch.optim.AdamW:
    """Build the optimiser over `parameters`; biases and norms do not decay."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    # `fused`: one pass over weights, gradients and moments, which are far larger than a cache.
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)


def load_learner(recipe: Recipe, model_folder: str | Path) -> Learner:
    """Return the learner of a recipe in this process, at version 0.

    Raises:
        InputError: the model cannot be loaded, or computes at random while it is trained.
    """
    plain = model_of(recipe, model_folder)
    check_training(plain, recipe.model)
    model: Any = add_adapters(plain, recipe.lora, recipe.seed)
    if recipe.activation_checkpointing:
        checkpoint_activations(model)
    base = model_of(recipe, model_folder).requires_grad_(False) if recipe.kl.coefficient else None
    return Learner(model, recipe, base)
