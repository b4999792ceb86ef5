"""A generator in an actor of its own: the loop of `scalerl.rl.engine.decoding` between two queues of Ray."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import ray
import torch

from scalerl.errors import brief_error
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.engine.decoding import decode
from scalerl.rl.engine.sampling import GroupRequest
from scalerl.rl.types import Counters, Weights
from scalerl.rl.workers.ray.actors import WorkerActor

Message = tuple[str, Any, Counters, float]
"""Kind of message, its value, what has been spent until then, and when it was sent (Unix seconds)."""
THREADS = {"life": 1, "receive": 1, "submit": 1, "weights": 1}
"""Threads of the actor: none of these waits for another, nor for the decoding."""


class GeneratorActor(WorkerActor):
    """Samples the groups that are submitted, by the newest weights that have reached it."""

    def __init__(self) -> None:
        self._began, self._reported = time.perf_counter(), Counters()
        self._inbox, self._outbox = queue.SimpleQueue[Any](), queue.SimpleQueue[Message]()
        self._newest: tuple[Weights, int] | None = None
        self._lock = threading.Lock()
        """Of `_newest`, which one thread sets and another takes."""

    def start(self, recipe: Recipe, model_folder: str) -> None:
        """Load the model, and start to decode.

        Raises:
            InputError: the model cannot be loaded here.
        """
        from scalerl.rl.engine.build import load_generator

        torch.set_num_threads(1)
        generator = load_generator(recipe, model_folder, recipe.seed, recipe.decode_slots)

        def run() -> None:
            try:
                decode(generator, self._inbox, self._send, self._newer, self._began)
            except Exception as error:
                self._send(("failed", brief_error(error), self._reported))

        threading.Thread(target=run, daemon=True).start()

    @ray.method(concurrency_group="submit")
    def submit(self, groups: Sequence[tuple[int, GroupRequest]]) -> None:
        """Admit groups, each with its sequence number."""
        for seq_no, group in groups:
            self._inbox.put((seq_no, *group))

    @ray.method(concurrency_group="weights")
    def offer(self, parcel: Any, version: int) -> None:
        """Fetch weights, which are installed between two decode steps."""
        try:
            newest = parcel.fetch(), version
        except Exception as error:
            # Not by `_send`: the thread that decodes may have reported newer counters by then.
            self._outbox.put(("behind", brief_error(error), Counters(), time.time()))
            return
        with self._lock:
            self._newest = newest
        del newest  # or this thread would hold a second copy of the model until the next offer
        self._inbox.put(None)

    @ray.method(concurrency_group="receive")
    def receive(self, seconds: float) -> list[Message]:
        """Return the messages since the last call; where none comes within `seconds`, a heartbeat."""
        try:
            messages = [self._outbox.get(timeout=seconds)]
        except queue.Empty:
            # As of the last report: within a decode step it is not known how much of the time was work.
            return [("decoding", None, self._reported, time.time())]
        while not self._outbox.empty():
            messages.append(self._outbox.get())
        return messages

    def _send(self, message: tuple[str, Any, Counters]) -> None:
        self._reported = message[2]
        self._outbox.put((*message, time.time()))

    def _newer(self, version: int) -> tuple[Weights, int] | None:
        with self._lock:
            newest = self._newest
            if newest is None or newest[1] == version:
                return None
            self._newest = None  # the copy is given back once it is installed
            return newest
