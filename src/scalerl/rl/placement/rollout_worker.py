"""What runs in the process of a rollout worker: the loop of `scalerl.rl.engine.decoding`.

a thread that receives    groups go to the loop; weights to be fetched to the next thread
a thread that fetches     weights by a transport, while the loop decodes
the loop                  decodes, and installs the newest weights between two decode steps
"""

from __future__ import annotations

import os
import queue
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from scalerl.errors import brief_error
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.engine.decoding import CLOSED, decode
from scalerl.rl.model.weights import WeightStream
from scalerl.rl.sync.shared_weights import SharedWeights
from scalerl.rl.types import Counters, Weights
from scalerl.rl.workers.backend import Channel

GROUP, WEIGHTS = "group", "weights"
"""Messages to a worker: (GROUP, sequence number, prompt, epoch, completions) and (WEIGHTS, parcel, version),
where `parcel.fetch()` returns the weights; None where they are in shared memory."""


def generate(
    channel: Channel, recipe: Recipe, model_folder: str, shared: SharedWeights | None = None
) -> None:
    """Decode what is submitted, with the newest weights, until the channel is closed."""
    from scalerl.rl.engine.build import load_generator

    torch.set_num_threads(recipe.cpu_threads)
    generator = load_generator(recipe, model_folder, recipe.seed, recipe.decode_slots)
    inbox, parcels = queue.SimpleQueue[Any](), Parcels(channel)
    _in_thread(lambda: _receive_all(channel, inbox, parcels))
    _in_thread(lambda: parcels.fetch_all(inbox))
    newer = parcels.newer
    if shared is not None:
        staging = {n: torch.empty_like(p, device="cpu") for n, p in generator.model.named_parameters()}

        def newer(version: int) -> tuple[Weights, int] | None:
            if shared.version == version:
                return None
            read = shared.read(staging)
            return WeightStream.of(staging), read

    def send(message: tuple[str, Any, Counters]) -> None:
        kind, value, counters = message
        channel.send(kind, (value, counters))

    channel.send("started")
    decode(generator, inbox, send, newer, channel.began)


class Parcels:
    """Weights that are fetched by a thread, and taken by another."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._newest = channel, None
        self.offered = queue.SimpleQueue[tuple[Any, int]]()
        self._lock = threading.Lock()
        """Of `_newest`, which one thread sets and another takes."""

    def fetch_all(self, inbox: queue.SimpleQueue[Any]) -> None:
        """Fetch what is offered, and wake the loop each time."""
        while True:
            self.fetch(*self.offered.get())
            inbox.put(None)

    def fetch(self, parcel: Any, version: int) -> None:
        """Fetch weights, which are installed between two decode steps."""
        if parcel is None:
            return
        try:
            newest = parcel.fetch(), version
        except Exception as error:
            self._channel.send("behind", brief_error(error))
            return
        with self._lock:
            self._newest = newest

    def newer(self, version: int) -> tuple[Weights, int] | None:
        """Return weights that were fetched and are not `version`, once."""
        with self._lock:
            newest = self._newest
            if newest is None or newest[1] == version:
                return None
            self._newest = None  # the copy is given back once it is installed
            return newest


def _receive_all(channel: Channel, inbox: queue.SimpleQueue[Any], parcels: Parcels) -> None:
    with suppress(EOFError):
        while True:
            kind, *value = channel.receive()
            if kind == WEIGHTS:
                parcels.offered.put((value[0], value[1]))
            else:
                inbox.put(tuple(value))
    inbox.put(CLOSED)


def _in_thread(do: Callable[[], None]) -> None:
    """Do something in a thread whose failure ends the process, which would be silent otherwise."""

    def run() -> None:
        try:
            do()
        except Exception:
            traceback.print_exc()
            os._exit(1)

    threading.Thread(target=run, daemon=True).start()
