"""The placement `local`: rollout workers in processes of their own, beside the learner in this one.

                 submit                                groups, as they are complete
    this process -------> generator process  0 .. n-1  -----------------------------> this process
                 weights in shared memory              versions installed, counters

    submit     goes to the process with the fewest groups in flight; waits for nothing
    process    takes submissions, installs the newest weights between two decode steps, decodes; threads of
               their own receive and send, so that decoding waits for no channel
    work       waits for a message of any process, or for its end, and not for long
    update     writes the weights to shared memory; waits for nothing. `installed` is the version that every
               process has reported as installed

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch

from scalerl.errors import ScalerlError, WorkerError
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.engine.decoding import CLOSED, decode
from scalerl.rl.engine.sampling import GroupRequest
from scalerl.rl.placement.rollouts import Assigned, AssignedGroups
from scalerl.rl.sync.shared_weights import SharedWeights
from scalerl.rl.types import Counters, Weights
from scalerl.rl.workers.child import ChildProcess
from scalerl.rl.workers.process import follow_the_parent
from scalerl.rl.workers.supervision import Watchdog, WorkerLostError

_LOG = logging.getLogger("scalerl")
MOST_LOSSES = 5
"""Times in a row, with no group complete in between, that a process may be lost before the run ends."""
_WORK = 0.5  # seconds that the driver waits for a message


class LocalGenerator(AssignedGroups["GeneratorProcess"]):
    """Generators in `n_processes` processes, `recipe.decode_slots` each; see `scalerl.rl.types.Generator`.

    Raises:
        WorkerError: a process does not start, or exits again and again.
    """

    def __init__(
        self,
        recipe: Recipe,
        model_folder: str,
        weights: Weights,
        n_processes: int = 1,
        version: int = 0,
        devices: Sequence[str] = (),
    ) -> None:
        """`devices` are the GPUs of the processes, by their names in CUDA_VISIBLE_DEVICES."""
        super().__init__(version)
        self._shared = SharedWeights(weights, version)
        self._workers: list[GeneratorProcess] = []
        # Python ends its children by SIGTERM at its exit, which these do not answer.
        self._at_exit = atexit.register(_kill, self._workers)
        recipe = recipe.without_prompts()
        for number in range(n_processes):
            device = devices[number] if devices else None
            self._workers.append(GeneratorProcess(number, recipe, model_folder, self._shared, device))
        self.restarts = 0
        """Processes that were lost and started again."""
        self._closed = False

    def _assign(self, seq_no: int, group: GroupRequest) -> None:
        min(self._workers, key=lambda worker: len(worker.in_flight)).submit({seq_no: group})

    def work(self) -> None:
        """Wait until a process sends a message, but not for long; and receive it."""
        self._poll(_WORK)

    def wait_until_started(self) -> None:
        """Wait until every process has its first weights."""
        while self.installed < 0:
            self.work()

    def update(self, weights: Weights, version: int) -> None:
        """Offer new weights; completions in flight go on with them and their old KV cache."""
        self._poll(0)
        self._shared.write(weights, version)
        self.version = version
        for worker in self._workers:
            worker.child.send(None)  # wakes one that has nothing to decode

    @property
    def installed(self) -> int:
        """The version that every process has installed."""
        self._poll(0)
        return min(worker.installed for worker in self._workers)

    @property
    def counters(self) -> Counters:
        """What all processes have spent, the lost ones included."""
        if not self._closed:
            self._poll(0)
        return super().counters

    def close(self) -> None:
        """Stop the processes; what is in flight is lost."""
        self._closed = True
        for worker in self._workers:
            worker.child.close()  # they see that at their next decode step, side by side
        for worker in self._workers:
            worker.child.join(10)
        atexit.unregister(self._at_exit)

    def _poll(self, timeout: float) -> None:
        by_channel: dict[Any, GeneratorProcess] = {}
        for worker in self._workers:
            # The sentinel too: what the process had started may hold its end of the channel open.
            by_channel |= {worker.child.channel: worker, worker.child.sentinel: worker}
        ready = wait(list(by_channel), timeout)
        for worker in {id(w): w for w in map(by_channel.__getitem__, ready)}.values():
            try:
                while worker.child.channel.poll():
                    self._receive(worker, worker.child.channel.recv())
            except (EOFError, OSError):
                self._restart(worker, f"{worker.name} is lost: {worker.child.exit_cause()}")
        for worker in self._workers:
            try:
                worker.watchdog.check()
            except WorkerLostError as error:
                self._restart(worker, str(error))

    def _receive(self, worker: GeneratorProcess, message: tuple[str, Any, Counters]) -> None:
        what, value, counters = message
        worker.reported(counters)
        worker.watchdog.progress()
        if what == "complete":
            self._complete_groups(worker, value)
            worker.losses = 0
        elif what == "installed":
            if worker.installed < 0:
                worker.started()
            worker.installed = value
        elif what == "failed":
            raise WorkerError(f"the generator cannot go on: {value}")

    def _restart(self, worker: GeneratorProcess, why: str) -> None:
        worker.losses += 1
        self.restarts += 1
        if worker.losses > MOST_LOSSES:
            raise WorkerError(f"{why}, {worker.losses} times in a row (out of memory?)")
        _LOG.warning("%s; it is started again, with %d groups", why, len(worker.in_flight))
        worker.child.kill()
        groups = worker.take_back()
        worker.start()
        worker.submit(groups)


class GeneratorProcess(Assigned):
    """A generator's process as the driver sees it."""

    def __init__(
        self,
        number: int,
        recipe: Recipe,
        model_folder: str,
        shared: SharedWeights,
        device: str | None = None,
    ) -> None:
        super().__init__()
        self._device = device
        self.name, self.losses = f"generator {number}", 0
        self._recipe, self._model_folder, self._shared = recipe, model_folder, shared
        self.start()

    def start(self) -> None:
        """Start the process; it is sent what it needs over its channel."""
        self.launched_at = time.monotonic()
        began = time.perf_counter()  # all processes of a machine have one `perf_counter`
        self.child = ChildProcess("generator", generate, self._shared, device=self._device)
        self.watchdog = Watchdog(self.name, self._recipe.timeouts.start)
        self.child.send((self._recipe, self._model_folder, began))

    def started(self) -> None:
        """Note that it has weights: from now on another deadline holds."""
        self.watchdog = Watchdog(self.name, self._recipe.timeouts.generator)

    def submit(self, groups: Mapping[int, GroupRequest]) -> None:
        """Send it groups to sample, by sequence number."""
        self.in_flight |= groups
        for seq_no, group in groups.items():
            self.child.send((seq_no, *group))


def _kill(workers: list[GeneratorProcess]) -> None:
    for worker in workers:
        worker.child.kill()


# -- in the process of a generator -------------------------------------------------------------------------


def generate(channel: Connection, shared: SharedWeights) -> None:
    """Decode what is submitted, with the newest weights, until the channel is closed."""
    from scalerl.rl.engine.build import load_generator

    follow_the_parent()
    torch.set_num_threads(1)
    inbox, outbox = queue.SimpleQueue[Any](), queue.SimpleQueue[Any]()
    for target, messages in ((_receive_all, inbox), (_send_all, outbox)):
        threading.Thread(target=target, args=(messages, channel), daemon=True).start()
    recipe, model_folder, began = inbox.get()
    try:
        generator = load_generator(recipe, model_folder, recipe.seed, recipe.decode_slots)
    except ScalerlError as error:
        outbox.put(("failed", str(error), Counters()))
        time.sleep(10)  # until it has been read; the parent kills this process
        return
    staging = {name: np.empty(p.shape, dtype=np.float32) for name, p in generator.model.named_parameters()}

    def newer(version: int) -> tuple[Weights, int] | None:
        return None if shared.version == version else (staging, shared.read(staging))

    decode(generator, inbox, outbox.put, newer, began)


def _receive_all(inbox: queue.SimpleQueue[Any], channel: Connection) -> None:
    with _ends_the_process(), suppress(EOFError, OSError):
        while True:
            inbox.put(channel.recv())
    inbox.put(CLOSED)


def _send_all(outbox: queue.SimpleQueue[Any], channel: Connection) -> None:
    with _ends_the_process(), suppress(OSError):  # the channel is closed: the other threads see that as well
        while True:
            channel.send(outbox.get())


@contextmanager
def _ends_the_process() -> Iterator[None]:
    """A failed thread would leave the process silent: what was sent cannot be read here, or memory is out."""
    try:
        yield
    except Exception:
        traceback.print_exc()
        os._exit(1)
