"""The placement `local`: generators in processes of their own, beside the learner in this one.

                 submit                               groups, as they are complete
    this process -------> GeneratorProcess  0 .. n-1  -----------------------------> this process
                 weights in shared memory             versions installed, counters

    submit     goes to the process with the fewest groups in flight; waits for nothing
    process    takes submissions, installs the newest weights between two decode steps, decodes; threads of
               their own receive and send, so that decoding waits for nobody
    work       waits for a message of any process, or for its end, and not for long
    update     writes the weights to shared memory; waits for nothing. `installed` is the version that every
               process has said it has installed

A process that exits, or makes no progress until its deadline, is replaced by one with the latest weights, to
which its groups in flight are submitted again: the same epochs of the same prompts (random numbers are
counters), by newer weights.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch

from scalerl.errors import ScalerlError, WorkerError
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.engine.decoding import CLOSED, decode
from scalerl.rl.engine.ordered import Asked, OrderedGroups, sum_of
from scalerl.rl.sync.shared_weights import SharedWeights
from scalerl.rl.types import Counters, Weights
from scalerl.rl.workers.outbox import Outbox
from scalerl.rl.workers.process import follow_the_parent, masked_signals
from scalerl.rl.workers.supervision import Watchdog, WorkerLostError

_LOG = logging.getLogger("scalerl")
_SPAWN = get_context("spawn")
MOST_DEATHS = 5
"""Deaths of a process in a row, with no group complete in between, that end the run."""
_LOOK = 1.0  # seconds between two looks whether the processes make progress


class LocalGenerator(OrderedGroups):
    """Generators in `n_processes` processes, `recipe.decode_slots` each; see `scalerl.rl.types.Generator`.

    Raises:
        WorkerError: a process does not start, or dies again and again.
    """

    def __init__(
        self, recipe: Recipe, model_folder: str, weights: Weights, n_processes: int = 1, version: int = 0
    ) -> None:
        super().__init__()
        self._shared = SharedWeights(weights, version)
        self._processes: list[_Process] = []
        # They do not hear SIGTERM, with which Python ends its children.
        self._at_exit = atexit.register(partial(_kill, self._processes))
        recipe, self._timeouts = recipe.without_prompts(), recipe.timeouts
        for number in range(n_processes):
            self._processes.append(_Process(number, recipe, model_folder, self._shared))
        self.restarts = 0
        """Processes that were lost and started again."""
        self._closed = False

    def _assign(self, seq_no: int, group: Asked) -> None:
        min(self._processes, key=lambda p: len(p.in_flight)).submit(seq_no, group)

    def _under_way(self) -> Mapping[int, Asked]:
        return {seq_no: group for process in self._processes for seq_no, group in process.in_flight.items()}

    def _published(self) -> int:
        return self._shared.version

    def work(self) -> None:
        """Wait until a process sends something, but not for long; and take note."""
        self._listen(timeout=_LOOK)

    def wait_until_started(self) -> None:
        """Wait until every process has its first weights."""
        while self.installed < 0:
            self.work()

    def update(self, weights: Weights, version: int) -> None:
        """Offer new weights; completions in flight go on with them and their old KV cache."""
        self._listen(timeout=0)
        self._shared.write(weights, version)
        for process in self._processes:
            process.tell(None)  # wakes one that has nothing to decode

    @property
    def installed(self) -> int:
        """The version that every process has installed."""
        self._listen(timeout=0)
        return min(process.installed for process in self._processes)

    @property
    def counters(self) -> Counters:
        """What all processes have spent, the lost ones included."""
        if not self._closed:
            self._listen(timeout=0)
        return sum_of([self._before, *(c for p in self._processes for c in (p.counters, p.buried))])

    def close(self) -> None:
        """End the processes; what is in flight is lost."""
        self._closed = True
        for process in self._processes:
            process.outbox.close()  # at the next decode step they see that
        for process in self._processes:
            process.end()
        atexit.unregister(self._at_exit)

    def _listen(self, timeout: float) -> None:
        by_channel: dict[Any, _Process] = {p.channel: p for p in self._processes}
        by_channel |= {p.sentinel: p for p in self._processes}
        for process in {id(p): p for p in (by_channel[c] for c in wait(list(by_channel), timeout))}.values():
            try:
                while process.channel.poll():
                    self._take_note(process, process.channel.recv())
            except (EOFError, OSError):
                self._restart(process, f"generator {process.number} is lost: its process has exited")
        for process in self._processes:
            try:
                process.watchdog.check()
            except WorkerLostError as error:
                self._restart(process, str(error))

    def _take_note(self, process: _Process, message: tuple[str, Any, Counters]) -> None:
        what, value, process.counters = message
        process.watchdog.moved()
        if what == "complete":
            seq_nos, sizes, packed = value
            self._keep(seq_nos, sizes, packed)
            for seq_no in seq_nos:
                del process.in_flight[seq_no]
            process.deaths = 0
        elif what == "installed":
            if process.installed < 0:
                process.watch(self._timeouts.generator)
            process.installed = value
        elif what == "failed":
            raise WorkerError(f"the generator cannot go on: {value}")

    def _restart(self, process: _Process, why: str) -> None:
        process.deaths += 1
        self.restarts += 1
        if process.deaths > MOST_DEATHS:
            raise WorkerError(f"{why}, {process.deaths} times in a row (out of memory?)")
        _LOG.warning("%s; it is started again, with %d groups", why, len(process.in_flight))
        process.restart()


@dataclass
class _Process:
    """A generator's process as seen from here."""

    number: int
    recipe: Recipe
    model_folder: str
    shared: SharedWeights
    in_flight: dict[int, Asked] = field(default_factory=dict)
    installed: int = -1
    deaths: int = 0
    counters: Counters = field(default_factory=Counters)
    buried: Counters = field(default_factory=Counters)
    """What its processes before this one had spent."""

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Start the process; it is sent what it needs by the channel."""
        self.began = time.perf_counter()
        self.channel, theirs = _SPAWN.Pipe()
        # Few arguments: Python waits until a process has read those, even where it is dead.
        arguments = (self.shared, theirs)
        self._process = _SPAWN.Process(target=generate, name="generator", args=arguments, daemon=True)
        with masked_signals():
            self._process.start()
        theirs.close()
        self.outbox = Outbox(self.channel)
        self.watch(self.recipe.timeouts.start)
        self.tell((self.recipe, self.model_folder, self.began))

    @property
    def sentinel(self) -> int:
        return self._process.sentinel

    def submit(self, seq_no: int, group: Asked) -> None:
        self.in_flight[seq_no] = group
        self.tell((seq_no, *group))

    def tell(self, message: Any) -> None:
        self.outbox.put(message)

    def watch(self, timeout: float) -> None:
        """Have it make progress within so many seconds from now on."""
        self.watchdog = Watchdog(f"generator {self.number}", timeout)

    def restart(self) -> None:
        """Start anew, with what was in flight."""
        self.kill()
        self.outbox.close()
        self.buried, self.counters = sum_of([self.buried, self._all_spent()]), Counters()
        self.buried.restarted += len(self.in_flight)
        self.installed = -1
        self.start()
        for seq_no, group in self.in_flight.items():
            self.tell((seq_no, *group))

    def _all_spent(self) -> Counters:
        """What it has spent, with the time since its last message, in which what it has done is lost."""
        life = time.perf_counter() - self.began  # all processes of a machine have one `perf_counter`
        if not self.counters.held:
            return replace(self.counters, startup=life)
        return replace(self.counters, held=life - self.counters.startup)

    def end(self) -> None:
        """Wait for the end of a process whose channel is closed, and not for ever."""
        self._process.join(timeout=10)
        self.kill()

    def kill(self) -> None:
        """End it now."""
        self._process.kill()
        self._process.join()


def _kill(processes: list[_Process]) -> None:
    for process in processes:
        process.kill()


# -- in the process of a generator -------------------------------------------------------------------------


def generate(shared: SharedWeights, channel: Connection) -> None:
    """Decode what is submitted, with the newest weights, until the channel is closed."""
    from scalerl.rl.engine.build import load_generator

    follow_the_parent()
    torch.set_num_threads(1)
    heard, said = queue.SimpleQueue[Any](), queue.SimpleQueue[Any]()
    for thread, messages in ((_hear, heard), (_send, said)):
        threading.Thread(target=thread, args=(messages, channel), daemon=True).start()
    recipe, model_folder, began = heard.get()
    try:
        generator = load_generator(recipe, model_folder, recipe.seed, recipe.decode_slots)
    except ScalerlError as error:
        said.put(("failed", str(error), Counters()))
        time.sleep(10)  # until it has been read; the parent ends this process
        return
    staging = {name: np.empty(p.shape, dtype=np.float32) for name, p in generator.model.named_parameters()}

    def newer(version: int) -> tuple[Weights, int] | None:
        return None if shared.version == version else (staging, shared.read(staging))

    decode(generator, heard, said.put, newer, began)


def _hear(heard: queue.SimpleQueue[Any], channel: Connection) -> None:
    with _ends_the_process(), suppress(EOFError, OSError):
        while True:
            heard.put(channel.recv())
    heard.put(CLOSED)


def _send(said: queue.SimpleQueue[Any], channel: Connection) -> None:
    with _ends_the_process(), suppress(OSError):  # the channel is closed: the other threads see that as well
        while True:
            channel.send(said.get())


@contextmanager
def _ends_the_process() -> Iterator[None]:
    """Nobody would hear of a thread that has failed: what was sent cannot be read here, or memory is out."""
    try:
        yield
    except Exception:
        traceback.print_exc()
        os._exit(1)
