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
from scalerl.rl.engine.ordered import Asked
from scalerl.rl.types import Counters, Weights
from scalerl.rl.workers.ray.session import here

Message = tuple[str, Any, Counters, float]
"""What is said, its value, what has been spent until then, and when (Unix seconds)."""
GROUPS = {"life": 1, "listen": 1, "tell": 1, "weights": 1}
"""Threads of the actor: none of these waits for another, nor for the decoding."""


class GeneratorActor:
    """Samples what it is told to, by the newest weights that have reached it."""

    def __init__(self) -> None:
        self._began, self._reported = time.perf_counter(), Counters()
        self._heard, self._said = queue.SimpleQueue[Any](), queue.SimpleQueue[Message]()
        self._newest: tuple[Weights, int] | None = None
        self._lock = threading.Lock()
        """Of `_newest`, which one thread sets and another takes."""

    @ray.method(concurrency_group="life")
    def where(self) -> tuple[str, int]:
        """Node and process."""
        return here()

    def start(self, recipe: Recipe, model_folder: str) -> None:
        """Load the model, and begin to listen.

        Raises:
            InputError: the model cannot be loaded here.
        """
        from scalerl.rl.engine.build import load_generator

        torch.set_num_threads(1)
        generator = load_generator(recipe, model_folder, recipe.seed, recipe.decode_slots)

        def run() -> None:
            try:
                decode(generator, self._heard, self._say, self._newer, self._began)
            except Exception as error:
                self._say(("failed", brief_error(error), self._reported))

        threading.Thread(target=run, daemon=True).start()

    @ray.method(concurrency_group="life")
    def ping(self) -> None:
        """A heartbeat, while the model is loaded; afterwards `listen` is one."""

    @ray.method(concurrency_group="tell")
    def submit(self, groups: Sequence[tuple[int, Asked]]) -> None:
        """Admit groups, each at its seq_no."""
        for seq_no, group in groups:
            self._heard.put((seq_no, *group))

    @ray.method(concurrency_group="weights")
    def offer(self, parcel: Any, version: int) -> None:
        """Fetch weights, which are installed between two decode steps."""
        try:
            newest = parcel.fetch(), version
        except Exception as error:
            # Not by `_say`: the thread that decodes may have reported newer counters by then.
            self._said.put(("behind", brief_error(error), Counters(), time.time()))
            return
        with self._lock:
            self._newest = newest
        del newest
        self._heard.put(None)

    @ray.method(concurrency_group="listen")
    def listen(self, seconds: float) -> list[Message]:
        """What has been reported since the last call; after so long with nothing, that it is there."""
        try:
            messages = [self._said.get(timeout=seconds)]
        except queue.Empty:
            # As of the last report: within a decode step nobody can tell how much of the time was work.
            return [("decoding", None, self._reported, time.time())]
        while not self._said.empty():
            messages.append(self._said.get())
        return messages

    def _say(self, message: tuple[str, Any, Counters]) -> None:
        self._reported = message[2]
        self._said.put((*message, time.time()))

    def _newer(self, version: int) -> tuple[Weights, int] | None:
        with self._lock:
            newest = self._newest
            if newest is None or newest[1] == version:
                return None
            self._newest = None  # the copy is given back once it is installed
            return newest
