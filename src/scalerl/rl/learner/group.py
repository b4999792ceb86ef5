"""A learner on several ranks, as the driver of a run sees it.

    driver     LearnerGroup        has the methods of `Learner`; sends each by name with plain arguments
    rank 0..n  LearnerRank         the same methods on every rank, on its `Learner`

`Ranks` connects them: with torchrun by a broadcast from rank 0, which is the driver too
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
    """Calls methods of `LearnerRank` by name."""

    size: int

    def all(self, name: str, *args: Any) -> Any:
        """Call a method on every rank, in the order of the calls, from one thread; return rank 0's result.

        Raises:
            ScalerlError: what all ranks raised; WorkerError where one of them is lost.
        """
        ...

    def begin(self, name: str, *args: Any) -> Pending[Any]:
        """Start the same; a driver that is no rank itself need not wait for it."""
        ...

    def first(self, name: str, *args: Any) -> Any:
        """Call a method on rank 0 alone, from any thread, while the others go on."""
        ...

    def weights(self, plan: Plan) -> Weights:
        """Return the current weights, which have this plan."""
        ...

    def watch(self, stop: threading.Event, report: Callable[[int, int], None]) -> None:
        """Have a step given up once `stop` is set; report its micro-batches where this process makes them."""
        ...


class LearnerRank:
    """One rank: everything but `wait_saved` is collective."""

    learner: Learner
    _held: list[Tensor]
    _saving: Callable[[], Sums]

    def load(self, recipe: Mapping[str, Any], model_folder: str) -> str:
        """Make the learner; returns the device it computes on."""
        own = from_dict(recipe)
        torch.set_num_threads(own.cpu_threads)
        self.learner = load_learner(own, model_folder)
        return str(self.learner.device)

    def step(self, batch: Mapping[str, Any]) -> dict[str, float] | None:
        """Make one step of a batch, which is given by its fields; None where it was given up, to stop."""
        # The commands of torchrun are JSON, which makes lists of tuples.
        try:
            return asdict(self.learner.step(Batch(**{**batch, "fates": tuple(batch["fates"])})))
        except StepStoppedError:
            return None

    def gather(self) -> None:
        """Help rank 0 to gather the weights that it reads."""
        for _ in self.learner.weights():
            pass

    def hold(self) -> None:
        """Keep what `Learner.hold` returns."""
        self._held = self.learner.hold()

    def held_scores(self, *what: Any) -> list[Tensor]:
        """See `Learner.held_scores`."""
        return list(self.learner.held_scores(self._held, *what))

    def save(self, folder: str, resumable: bool) -> None:
        """Save the model in Hugging Face format, and start to save what training needs to go on."""
        return_freed_memory()  # before there are more copies
        self.learner.save_pretrained(folder)
        if resumable:
            self._saving = self.learner.save(Path(folder) / DISK)

    def wait_saved(self) -> Sums:
        """Wait until what `save` started is on the disk; on rank 0 that of all, and return their sums."""
        return self._saving()

    def restore(self, folder: str) -> int:
        """Go on from a checkpoint; returns the version."""
        self.learner.restore(Path(folder))
        return self.learner.version


class LearnerGroup:
    """The learner of a run whose ranks are called through `ranks`; see `Learner` for its methods."""

    def __init__(self, ranks: Ranks, recipe: Recipe, model_folder: str | Path) -> None:
        """Let the ranks load the model."""
        self._ranks, self.trainers = ranks, ranks.size
        self.device = torch.device(ranks.all("load", recipe.to_json(), str(model_folder)))
        self.model = empty_model(model_folder, dtype_of(recipe.precision))
        """The model's shape, without weights."""
        self._plan = plan_of(self.model)
        self.fp32_logits = recipe.fp32_head("trainer")
        self.version = 0

    def begin(self, batch: Batch) -> Pending[StepStats]:
        """Start a step; `version` is raised when its result is read."""
        values = {field.name: getattr(batch, field.name) for field in fields(batch)}
        return Mapped(self._step_of, self._ranks.begin("step", values))

    def _step_of(self, values: dict[str, Any] | None) -> StepStats:
        # Not before: a step that is lost with its ranks, or was given up, has made no version.
        if values is None:
            raise StepStoppedError
        stats = StepStats(**values)
        self.version += 1
        return stats

    def watch(self, stop: threading.Event, report: Callable[[int, int], None]) -> None:
        """See `Learner.watch`."""
        self._ranks.watch(stop, report)

    def check_life(self) -> None:
        """Check nothing: torchrun ends all ranks where one is lost."""

    def weights(self) -> Weights:
        """See `Learner.weights`."""
        return self._ranks.weights(self._plan)

    def restore(self, folder: Path) -> None:
        """See `Learner.restore`."""
        self.version = self._ranks.all("restore", str(folder))

    def saver(self, near: Path, resumable: bool = True) -> Write:
        """See `Learner.saver`. The model is written at once, block by block; the rest while training goes on.

        All ranks must see the folder: with several nodes it is on a file system that they share.
        """
        # On the disk of the checkpoint, so that `move` only renames; it may be left of a run that was killed.
        part = near / ".learner.part"
        shutil.rmtree(part, ignore_errors=True)
        try:
            self._ranks.all("save", str(part.absolute()), resumable)
        except WriteError:
            shutil.rmtree(part, ignore_errors=True)  # give the disk space back
            raise

        def move(folder: Path) -> Sums:
            try:
                # Called by the checkpoint's thread; a collective there would mix with those of a step.
                sums = self._ranks.first("wait_saved") if resumable else {}
                for path in part.iterdir():
                    path.rename(folder / path.name)
            finally:
                shutil.rmtree(part, ignore_errors=True)
            return {f"{DISK}/{name}": found for name, found in sums.items()}

        return move

    def hold(self) -> list[Tensor]:
        """Let the ranks hold their shards."""
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
