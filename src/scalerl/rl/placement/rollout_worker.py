"""The process of a rollout worker, on one machine or on a cluster.

a thread that receives    passes groups to the loop, and weights to fetch to the next thread
a thread that fetches     fetches weights by a transport while the loop decodes
the loop                  decodes, and installs the newest weights between two decode steps

So decoding never waits for groups or weights to be transferred.
"""

import os
import queue
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from scalerl.errors import brief_error
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.engine.generator import TorchGenerator
from scalerl.rl.engine.ordered import pack_samples
from scalerl.rl.model.weights import WeightStream
from scalerl.rl.sync.shared_weights import SharedWeights
from scalerl.rl.types import Counters, Weights
from scalerl.rl.workers.backend import Channel

GROUP, WEIGHTS = "group", "weights"
"""Messages to a worker: (GROUP, sequence number, prompt, epoch, completions) and (WEIGHTS, parcel, version).
`parcel.fetch()` returns the weights; the parcel is None if they are in shared memory."""
_CLOSED = object()
"""The last message to the loop."""
_BEAT = 0.25
"""Seconds between two reports of counters if nothing else is reported: a heartbeat, and the largest delay of
the counters in steps.jsonl."""


def generate(
    channel: Channel, recipe: Recipe, model_folder: str, shared: SharedWeights | None = None
) -> None:
    """Decode the groups that arrive, with the newest weights, until the channel closes."""
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

    channel.send("started")
    _decode(generator, inbox, channel, newer)


def _decode(
    generator: TorchGenerator,
    inbox: queue.SimpleQueue[Any],
    channel: Channel,
    newer: Callable[[int], tuple[Weights, int] | None],
) -> None:
    """Decode groups (seq_no, prompt, epoch, completions) from the inbox until `_CLOSED` arrives.

    `newer` returns the newest weights and their version, or None if that is the version it is passed; a None
    in the inbox makes the loop call it. The loop sends "installed" with a version, "complete" with packed
    groups, and "decoding", each with the counters. Start-up ends once the process has weights and a group.
    """
    clock = _DecodingClock(channel.began)
    generator.answers_at_once = True  # a slow environment delays only its own completions
    # Below every version, so that `newer` returns the first weights even at version 0.
    generator.version = -1

    def report(what: str, value: Any = None) -> None:
        channel.send(what, (value, clock.add_to(generator.counters)))

    while True:
        if (weights := newer(generator.version)) is not None:
            install = generator.update if generator.version >= 0 else generator.start
            install(*weights)
            report("installed", generator.version)
        # All messages first: completions of a group that start together share the prefill of its prompt.
        while not (generator.unfinished and inbox.empty()):
            try:
                message = inbox.get(timeout=_BEAT)
            except queue.Empty:
                report("decoding")
                continue
            if message is _CLOSED:
                return
            if generator.version >= 0:
                clock.start()
            if message is None:
                break  # new weights
            seq_no, *group = message
            generator.admit(seq_no, tuple(group))
        if generator.unfinished:
            generator.work()
        if groups := generator.take_complete():
            report("complete", pack_samples(groups))
        elif clock.due():
            report("decoding")


class _DecodingClock:
    """Seconds of start-up, and seconds for which the process was held since then.

    The decoding thread reads them between two decode steps, when `seconds`, the time worked, is up to date.
    If another thread read them, or within a step, held time and work would not be of the same instant.
    """

    def __init__(self, process_began: float) -> None:
        self._process_began, self._began = process_began, 0.0
        self._reported = 0.0

    def start(self) -> None:
        """End the start-up, as the first work has arrived."""
        self._began = self._began or time.perf_counter()

    def due(self) -> bool:
        return time.perf_counter() - self._reported >= _BEAT

    def add_to(self, counters: Counters) -> Counters:
        """Return a copy of the counters with the seconds until now."""
        self._reported = now = time.perf_counter()
        if not self._began:
            return counters
        return replace(counters, held=now - self._began, startup=self._began - self._process_began)


class Parcels:
    """Weights that one thread fetches and another takes."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._newest = channel, None
        self.offered = queue.SimpleQueue[tuple[Any, int]]()
        self._lock = threading.Lock()
        """Guards `_newest`, which one thread sets and another takes."""

    def fetch_all(self, inbox: queue.SimpleQueue[Any]) -> None:
        """Fetch offered weights, and wake the loop each time."""
        while True:
            parcel, version = self.offered.get()
            if parcel is not None:
                self.fetch(parcel, version)
            inbox.put(None)

    def fetch(self, parcel: Any, version: int) -> None:
        """Fetch some weights; if that fails, report that this worker is behind."""
        try:
            newest = parcel.fetch(), version
        except Exception as error:
            self._channel.send("behind", brief_error(error))
        else:
            with self._lock:
                self._newest = newest

    def newer(self, version: int) -> tuple[Weights, int] | None:
        """Return fetched weights of another version than `version`, once."""
        with self._lock:
            newest = self._newest
            if newest is None or newest[1] == version:
                return None
            self._newest = None  # so that the copy is freed once it is installed
            return newest


def _receive_all(channel: Channel, inbox: queue.SimpleQueue[Any], parcels: Parcels) -> None:
    with suppress(EOFError):
        while True:
            kind, *value = channel.receive()
            if kind == WEIGHTS:
                parcels.offered.put((value[0], value[1]))
            else:
                inbox.put(tuple(value))
    inbox.put(_CLOSED)


def _in_thread(do: Callable[[], None]) -> None:
    """Call `do` in a thread; end the process if it fails, because the failure would otherwise be silent."""

    def run() -> None:
        try:
            do()
        except Exception:
            traceback.print_exc()
            os._exit(1)

    threading.Thread(target=run, daemon=True).start()
