"""A learner on several ranks, as the driver of a run sees it.

    driver     LearnerGroup        has the methods of `Learner`, and calls them on the ranks by name
    rank 0..n  LearnerRank         executes these calls on the `Learner` of its rank

`Ranks` connects them: with torchrun by a broadcast from rank 0, which is also the driver
(`scalerl.rl.learner.launch`); with Ray by a remote call to each actor. Arguments and results are
numbers, text, lists, mappings, arrays and tensors; the driver receives the result of rank 0.
"""

import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from scalerl.errors import WriteError
from scalerl.rl.checkpoint.manifest import Sums
from scalerl.rl.checkpoint.store import Write
from scalerl.rl.config.recipe import Recipe, from_dict
from scalerl.rl.learner.batch import Batch, StepStats
from scalerl.rl.learner.checkpoint import DISK
from scalerl.rl.learner.learner import Learner, StepStoppedError
from scalerl.rl.learner.load import load_learner
from scalerl.rl.model.causal_lm import dtype_of, empty_model
from scalerl.rl.model.out_of_memory import return_freed_memory
from scalerl.rl.model.weights import plan_of
from scalerl.rl.types import Mapped, Pending, Plan, Weights


class Ranks(Protocol):
    """The connection to the ranks: it calls methods of `LearnerRank` by name."""

    size: int

    def all(self, name: str, *args: Any) -> Any:
        """Call a method on every rank and return rank 0's result; to be called from one thread.

        Raises:
            ScalerlError: the error that all ranks raised; a WorkerError if a rank is lost.
        """
        ...

    def begin(self, name: str, *args: Any) -> Pending[Any]:
        """Start a call on every rank; a driver that is not itself a rank need not wait for it."""
        ...

    def first(self, name: str, *args: Any) -> Any:
        """Call a method on rank 0 alone, from any thread."""
        ...

    def weights(self, plan: Plan) -> Weights:
        """Return the current weights, which have this plan."""
        ...

    def watch(self, stop: threading.Event, report: Callable[[int, int], None]) -> None:
        """Abandon a step once `stop` is set; report its micro-batches if this process is a rank."""
        ...


class LearnerRank:
    """One rank of a learner; all methods but `wait_saved` are collective."""

    learner: Learner
    _held: list[Tensor]
    _saving: Callable[[], Sums]

    def load(self, recipe: Mapping[str, Any], model_folder: str) -> str:
        """Make the learner; return the device it computes on."""
        own = from_dict(recipe)
        torch.set_num_threads(own.cpu_threads)
        self.learner = load_learner(own, model_folder)
        return str(self.learner.device)

    def step(self, batch: Mapping[str, Any]) -> dict[str, float] | None:
        """Make one step from the fields of a batch; return None if it was abandoned because the run stops."""
        # With torchrun commands are JSON, which turns tuples into lists.
        try:
            return asdict(self.learner.step(Batch(**{**batch, "fates": tuple(batch["fates"])})))
        except StepStoppedError:
            return None

    def gather(self) -> None:
        """Take part in the gathering of weights that rank 0 reads."""
        for _ in self.learner.weights():
            pass

    def hold(self) -> None:
        """Keep the weights that `Learner.hold` returns for `held_scores`."""
        self._held = self.learner.hold()

    def held_scores(self, *what: Any) -> list[Tensor]:
        """Call `Learner.held_scores` with the weights of `hold`."""
        return list(self.learner.held_scores(self._held, *what))

    def save(self, folder: str, resumable: bool) -> None:
        """Save the model in Hugging Face format; if `resumable`, also start to save the training state."""
        return_freed_memory()  # before more copies are made
        self.learner.save_pretrained(folder)
        if resumable:
            self._saving = self.learner.save(Path(folder) / DISK)

    def wait_saved(self) -> Sums:
        """Wait until `save` has finished, on rank 0 that of all ranks; return their checksums there."""
        return self._saving()

    def restore(self, folder: str) -> int:
        """Continue from a checkpoint; return the version."""
        self.learner.restore(Path(folder))
        return self.learner.version


class LearnerGroup:
    """The learner of a run whose ranks are called through `ranks`; see `Learner` for its methods."""

    def __init__(self, ranks: Ranks, recipe: Recipe, model_folder: str | Path) -> None:
        """Make all ranks load the model."""
        self._ranks, self.trainers = ranks, ranks.size
        self.device = torch.device(ranks.all("load", recipe.to_json(), str(model_folder)))
        self.model = empty_model(model_folder, dtype_of(recipe.precision))
        """The model without weights, for its shapes."""
        self._plan = plan_of(self.model)
        self.fp32_logits = recipe.fp32_head("trainer")
        self.version = 0

    def begin(self, batch: Batch) -> Pending[StepStats]:
        """Start a step; `version` increases when its result is read."""
        values = {field.name: getattr(batch, field.name) for field in fields(batch)}
        return Mapped(self._step_of, self._ranks.begin("step", values))

    def _step_of(self, values: dict[str, Any] | None) -> StepStats:
        # Only now: a step that was abandoned, or lost with its ranks, makes no version.
        if values is None:
            raise StepStoppedError
        stats = StepStats(**values)
        self.version += 1
        return stats

    def watch(self, stop: threading.Event, report: Callable[[int, int], None]) -> None:
        """See `Learner.watch`."""
        self._ranks.watch(stop, report)

    def check_life(self) -> None:
        """Do nothing: torchrun ends all ranks if one is lost."""

    def weights(self) -> Weights:
        """See `Learner.weights`."""
        return self._ranks.weights(self._plan)

    def restore(self, folder: Path) -> None:
        """See `Learner.restore`."""
        self.version = self._ranks.all("restore", str(folder))

    def saver(self, near: Path, resumable: bool = True) -> Write:
        """See `Learner.saver`. The model is written now, block by block; the rest while training goes on.

        All ranks must see the folder: with several nodes it must be on a shared file system.
        """
        # On the disk of the checkpoint, so that `move` only renames. A killed run may have left it behind.
        part = near / ".learner.part"
        shutil.rmtree(part, ignore_errors=True)
        try:
            self._ranks.all("save", str(part.absolute()), resumable)
        except WriteError:
            shutil.rmtree(part, ignore_errors=True)  # give the disk space back
            raise

        def move(folder: Path) -> Sums:
            try:
                # Rank 0 alone: a collective in the checkpoint's thread would mix with those of a step.
                sums = self._ranks.first("wait_saved") if resumable else {}
                for path in part.iterdir():
                    path.rename(folder / path.name)
            finally:
                shutil.rmtree(part, ignore_errors=True)
            return {f"{DISK}/{name}": found for name, found in sums.items()}

        return move

    def hold(self) -> list[Tensor]:
        """Make the ranks hold their shards; the list for `held_scores` is empty."""
        self._ranks.all("hold")
        return []

    def held_scores(
        self,
        held: Sequence[Tensor],
        token_NT: Tensor,
        wanted_NT: Tensor,
        heads: Sequence[bool],
        expert_NTLK: np.ndarray | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `Learner.held_scores`."""
        logp_WH, rank_W2 = self._ranks.all("held_scores", token_NT, wanted_NT, list(heads), expert_NTLK)
        return logp_WH, rank_W2
