"""A rank of the learner that is sharded over Ray actors; all ranks do everything at once, but for `ping`."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

from scalerl.rl.batch import Batch
from scalerl.rl.cluster.broadcast import Group, send
from scalerl.rl.cluster.parcel import Bucket, StoredWeights, in_buckets, put
from scalerl.rl.cluster.session import here
from scalerl.rl.learner import StepStats
from scalerl.rl.model import compute_device
from scalerl.rl.probe import Probe
from scalerl.rl.types import Rollout


class TrainerActor:
    """Holds a shard of the learner, and takes part in what all ranks do."""

    def where(self) -> tuple[str, int]:
        """Node and process."""
        return here()

    def meeting(self) -> str:
        """Where the ranks meet, asked of the first: an address of its node that nobody listens at."""
        address = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            return f"tcp://{address}:{probe.getsockname()[1]}"

    def start(self, recipe: Any, model_folder: str, rank: int, meeting: str) -> str:
        """Meet the others, and load the model; the device it is on.

        Raises:
            InputError: the model cannot be loaded, or not be sharded.
        """
        from scalerl.rl.fsdp.learner import load_sharded_learner

        torch.set_num_threads(1)
        settings, world = recipe.cluster.learner, recipe.cluster.trainers
        if meeting.startswith("tcp://127."):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            init_method=meeting,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=settings.timeout),
        )
        self._learner = load_sharded_learner(recipe, model_folder, settings)
        self._recipe, self._rank, self._world = recipe, rank, world
        self._probe: Probe | None = None
        return str(compute_device())

    @ray.method(concurrency_group="life")
    def ping(self) -> None:
        """A sign of life."""

    @ray.method(concurrency_group="send")
    def send(self, group: Group, weights: StoredWeights, version: int) -> None:
        """Broadcast weights to the generators, while training goes on."""
        send(group, weights, version)

    def step(self, batch: Batch) -> StepStats:
        """See `Learner.step`; the same on every rank."""
        return self._learner.step(batch)

    def weights(self, bucket_mib: float) -> list[tuple[int, Bucket]]:
        """The buckets that this rank has put into the object store: number of each, and where it is.

        The ranks take turns, so that none of them, and no node's store, has the whole model.
        """
        tensors = ((name, weight.float().cpu().numpy()) for name, weight in self._learner.weights_by_tensor())
        return [
            (i, put(bucket))
            for i, bucket in enumerate(in_buckets(tensors, bucket_mib))
            if i % self._world == self._rank
        ]

    def save(self, folder: str, training: bool) -> None:
        """Save the model in Hugging Face format; and begin to save what training needs, if that is wanted."""
        self._learner.save_pretrained(Path(folder) / "model")
        self._saving = self._learner.save(Path(folder) / "learner") if training else None

    def saved(self) -> None:
        """Until what was begun is on the disk.

        Raises:
            WriteError: a rank could not write.
        """
        if self._saving is not None:
            self._saving.wait()

    def load(self, folder: str) -> int:
        """Go on from what `save` has saved; the version."""
        self._learner.load(Path(folder))
        return self._learner.version

    def probe(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """See `scalerl.rl.probe.Probe`; the first call holds the present weights."""
        if self._probe is None:
            self._probe = Probe(self._learner, self._recipe)
        return self._probe(rollouts)
