"""The learner of a run whose ranks are Ray actors: what the driver has in its place.

    step       the batch goes into the object store once; all ranks fetch it from there, and return the same
    weights    every rank puts its share of the buckets into the object store; references come here
    save       the ranks write, into a folder that all of them and the driver see

The driver holds the model's shape, and never its weights. Where a rank is lost, the others cannot go on: all
are ended, and the run goes back to its last checkpoint (`LearnerLostError`).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

from scalerl.errors import InputError, LearnerLostError, WriteError
from scalerl.rl.batch import Batch
from scalerl.rl.cluster.broadcast import Group
from scalerl.rl.cluster.members import LostError, Member, gather, remote
from scalerl.rl.cluster.parcel import StoredWeights
from scalerl.rl.cluster.session import Session
from scalerl.rl.cluster.trainer_actor import TrainerActor
from scalerl.rl.learner import StepStats
from scalerl.rl.model import dtype_of, empty_model
from scalerl.rl.types import Rollout

_AFTERMATH = 5.0  # seconds in which Ray tells which rank died first


class RayLearner:
    """A `Learner` over the ranks of a sharded one; see there.

    Raises:
        InputError: the model cannot be loaded or sharded.
        LearnerLostError: (by any method) a rank was lost.
    """

    def __init__(self, recipe: Any, model_folder: str, session: Session) -> None:
        self._cluster = recipe.cluster
        self._patience = recipe.cluster.patience
        self.model: Any = empty_model(model_folder, dtype_of(recipe.precision))
        self.fp32_logits = recipe.fp32_logits in ("both", "trainer")
        self.version = 0
        put, share = session.room["trainers"], recipe.cluster.trainer
        actor = remote(TrainerActor, {"life": 1, "send": 1})
        self._ranks: list[Member] = []
        for rank in range(recipe.cluster.trainers):
            handle = actor.options(
                num_cpus=share.cpus, num_gpus=share.gpus, max_restarts=0, scheduling_strategy=put(rank)
            ).remote()
            self._ranks.append(Member(f"trainer {rank}", handle, self._patience.silence))
        self.device = self._start(recipe, model_folder)

    def _start(self, recipe: Any, model_folder: str) -> str:
        seconds = self._patience.start
        for member, where in zip(self._ranks, self._all("started", seconds, "where"), strict=True):
            member.settled(where)
        self.address = self._ranks[0].node.split()[1]
        """Where the first rank can be reached."""
        (meeting,) = self._on("found a place to meet", seconds, {self._ranks[0]: ()}, "meeting")
        arguments = {
            member: (recipe.without_prompts(), model_folder, rank, meeting)
            for rank, member in enumerate(self._ranks)
        }
        return self._on("loaded the model", seconds, arguments, "start")[0]

    # -- what a learner does -------------------------------------------------------------------------------

    def step(self, batch: Batch) -> StepStats:
        """One update from `batch`; see `Learner.step`."""
        stats = self._all("made a step", self._patience.step, "step", ray.put(batch))[0]
        self.version += 1
        return stats

    def weights(self) -> StoredWeights:
        """The current weights, in the object store."""
        bucket_mib = self._cluster.transport.bucket_mib
        found = self._all("given its weights", self._patience.weights, "weights", bucket_mib)
        buckets = sorted((bucket for of_rank in found for bucket in of_rank), key=lambda bucket: bucket[0])
        return StoredWeights((bucket for _, bucket in buckets), self._patience.weights)

    def send(self, group: Group, weights: StoredWeights, version: int) -> None:
        """Have the first rank broadcast weights to the generators; waits for nothing."""
        self._ranks[0].handle.send.remote(group, weights, version)

    def state(self) -> dict[str, Any]:
        """What a checkpoint has of it here: the ranks write the rest."""
        return {"version": self.version, "sharded": True}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from the checkpoint at `state["path"]`.

        Raises:
            InputError: its learner was of one process, or it cannot be read by the ranks.
        """
        if not state.get("sharded"):
            raise InputError("the run's learner was that of one process: cluster.learner.kind stays 'one'")
        folder = str(Path(state["path"]) / "learner")
        self.version = self._all("loaded the checkpoint", self._patience.start, "load", folder)[0]

    def copies(self, folder: Path, training: bool) -> Callable[[Path], None]:
        """Begin to save beside `folder`; what is returned waits for that, and moves it in there."""
        aside = folder.with_name(f".{folder.name}.ranks").absolute()
        shutil.rmtree(aside, ignore_errors=True)
        try:
            aside.mkdir(parents=True)
        except OSError as error:
            raise WriteError(f"{folder}: the checkpoint could not be saved ({error})") from error
        self._all("saved the model", self._patience.step, "save", str(aside), training)

        def finish(into: Path) -> None:
            try:
                self._all("written the checkpoint", self._patience.step, "saved")
                for path in [*(aside / "model").iterdir(), *aside.glob("learner")]:
                    path.rename(into / path.name)
            finally:
                shutil.rmtree(aside, ignore_errors=True)

        return finish

    def probe(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """What `scalerl.rl.probe.Probe` finds."""
        return self._all("probed", self._patience.step, "probe", ray.put(list(rollouts)))[0]

    def close(self) -> None:
        """End the ranks."""
        for member in self._ranks:
            member.kill()

    # -- all ranks at once ---------------------------------------------------------------------------------

    def _all(self, what: str, seconds: float, method: str, *arguments: Any) -> list[Any]:
        return self._on(what, seconds, dict.fromkeys(self._ranks, arguments), method)

    def _on(
        self, what: str, seconds: float, arguments: Mapping[Member, Sequence[Any]], method: str
    ) -> list[Any]:
        """What the ranks return; none of them is left where one is lost."""
        calls = {getattr(m.handle, method).remote(*args): m for m, args in arguments.items()}
        try:
            return gather(calls, seconds, what)
        except LostError as error:
            cause = self._dead_first() or error
            self.close()
            raise LearnerLostError(str(cause)) from error

    def _dead_first(self) -> LostError | None:
        """Who died, where somebody did: the others complain of their connection to it."""
        ends = time.monotonic() + _AFTERMATH
        pings = {member.handle.ping.remote(): member for member in self._ranks}
        while pings and time.monotonic() < ends:
            for ref in ray.wait(list(pings), timeout=_AFTERMATH / 10)[0]:
                member = pings.pop(ref)
                try:
                    ray.get(ref, timeout=_AFTERMATH)
                except RayActorError as error:
                    return member.lost(error)
        return None


class RayProbe:
    """`scalerl.rl.probe.Probe` on the ranks; what it holds is not kept by a checkpoint."""

    def __init__(self, learner: RayLearner, recipe: Any) -> None:
        self._learner, self._completions = learner, recipe.health.probe
        self([])

    def __call__(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """See `scalerl.rl.probe.Probe`."""
        return self._learner.probe(rollouts) if self._completions else {}

    def state(self) -> dict[str, Any]:
        """Nothing: after a resume the ranks hold the weights of the day."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `state`."""
