"""The placement `local`: generators in processes of their own, beside the learner in this one.

                 submit                               groups, as they are complete
    this process -------> GeneratorProcess  0 .. n-1  -----------------------------> this process
                 weights in shared memory             versions installed, counters

    submit     goes to the process with the fewest groups in flight; waits for nothing but a process that is
               only starting, and has more to read than a pipe takes
    process    takes submissions, installs the newest weights between two decode steps, decodes; threads of
               their own receive and send, so that decoding waits for nobody
    work       waits for a message of any process, or for its end
    update     writes the weights to shared memory; waits for nothing. `installed` is the version that every
               process has said it has installed

A process that dies is started again with the weights of the day, and its groups in flight are submitted to it
again: the same draws (random numbers are counters), by newer weights.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch

from scalerl.errors import ScalerlError, WorkerError
from scalerl.rl.process import deaf_to_interrupts, follow_the_parent
from scalerl.rl.saved_rollouts import pack_rollouts, unpack_rollouts
from scalerl.rl.shared_weights import SharedWeights
from scalerl.rl.types import Counters, Prompt, Rollout, Weights

_LOG = logging.getLogger("scalerl")
_SPAWN = get_context("spawn")
MOST_DEATHS = 5
"""Deaths of a process in a row, with no group complete in between, that end the run."""
_Group = tuple[Prompt, int, int]  # prompt, draw, completions


class LocalGenerator:
    """Generators in `n_processes` processes, `recipe.rows` rows each; see `scalerl.rl.types.Generator`.

    Raises:
        WorkerError: a process does not start, or dies again and again.
    """

    def __init__(
        self, recipe: Any, model_folder: str, weights: Weights, n_processes: int = 1, version: int = 0
    ) -> None:
        self._shared = SharedWeights(weights, version)
        self._processes: list[_Process] = []
        # They do not hear SIGTERM, with which Python ends its children.
        self._at_exit = atexit.register(partial(_kill, self._processes))
        for _ in range(n_processes):
            self._processes.append(_Process(recipe.without_prompts(), model_folder, self._shared))
        self._complete: dict[int, tuple[Rollout, ...]] = {}
        self._admitted = self._taken = 0
        self._before = Counters()
        """What was spent before the run was resumed."""
        self.restarts = 0
        """Processes that died and were started again."""

    def submit(self, prompt: Prompt, draw: int, n_samples: int) -> int:
        """Admit a group; see `scalerl.rl.types.Generator`."""
        place = self._admitted
        self._admitted += 1
        self._place(place, (prompt, draw, n_samples))
        return place

    def _place(self, place: int, group: _Group) -> None:
        min(self._processes, key=lambda p: len(p.in_flight)).submit(place, group)

    @property
    def ready(self) -> int:
        """Groups that can be taken."""
        n = self._taken
        while n in self._complete:
            n += 1
        return n - self._taken

    def work(self) -> None:
        """Wait until a process says something, and take note."""
        self._listen(timeout=None)

    def take(self, n_groups: int) -> list[tuple[Rollout, ...]]:
        """The next `n_groups` groups in order of admission, which are complete."""
        places = range(self._taken, self._taken + n_groups)
        self._taken = places.stop
        return [self._complete.pop(place) for place in places]

    def update(self, weights: Weights, version: int) -> None:
        """Offer new weights; completions in flight go on with them and their old KV cache."""
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
        """What all processes have spent, the dead ones included."""
        return sum_of([self._before, *(c for p in self._processes for c in (p.counters, p.buried))])

    @property
    def in_flight(self) -> int:
        """Groups that are admitted and not taken."""
        return len(self._complete) + sum(len(process.in_flight) for process in self._processes)

    def state(self) -> dict[str, Any]:
        """Which groups were in flight, and those that are complete: see `restore`."""
        in_flight = {place: g for process in self._processes for place, g in process.in_flight.items()}
        complete = sorted(self._complete.items())
        return {
            "version": self._shared.version,  # of the weights that it is resumed with
            "admitted": self._admitted,
            "taken": self._taken,
            "counters": asdict(self.counters),
            "in_flight": [
                [place, dict(vars(p)), draw, n] for place, (p, draw, n) in sorted(in_flight.items())
            ],
            "places": [place for place, _ in complete],
            "sizes": [len(rollouts) for _, rollouts in complete],
            "complete": pack_rollouts([rollout for _, rollouts in complete for rollout in rollouts]),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`; completions that were in flight begin again, and are counted."""
        self._admitted, self._taken = state["admitted"], state["taken"]
        rollouts = iter(unpack_rollouts(state["complete"]))
        for place, size in zip(state["places"], state["sizes"], strict=True):
            self._complete[place] = tuple(islice(rollouts, size))
        for place, prompt, draw, n_samples in state["in_flight"]:
            self._place(place, (Prompt.from_json(prompt), draw, n_samples))
        self._before = Counters(**state["counters"])
        self._before.restarted += len(state["in_flight"])

    def close(self) -> None:
        """End the processes; what is in flight is lost."""
        for process in self._processes:
            process.channel.close()  # at the next decode step they see that
        for process in self._processes:
            process.end()
        atexit.unregister(self._at_exit)

    def _listen(self, timeout: float | None) -> None:
        by_channel: dict[Any, _Process] = {p.channel: p for p in self._processes}
        by_channel |= {p.sentinel: p for p in self._processes}
        for process in {id(p): p for p in (by_channel[c] for c in wait(list(by_channel), timeout))}.values():
            try:
                while process.channel.poll():
                    self._take_note(process, process.channel.recv())
            except (EOFError, OSError):
                self._restart(process)

    def _take_note(self, process: _Process, message: tuple[str, Any, Counters]) -> None:
        what, value, process.counters = message
        if what == "complete":
            places, sizes, packed = value
            rollouts = iter(unpack_rollouts(packed))
            for place, size in zip(places, sizes, strict=True):
                group = tuple(islice(rollouts, size))
                if process.in_flight.pop(place, None) is not None:
                    self._complete[place] = group
            process.deaths = 0
        elif what == "installed":
            process.installed = value
        else:
            raise WorkerError(f"the generator cannot go on: {value}")

    def _restart(self, process: _Process) -> None:
        process.deaths += 1
        self.restarts += 1
        if process.deaths > MOST_DEATHS:
            raise WorkerError(f"the generator died {process.deaths} times in a row (out of memory?)")
        _LOG.warning("a generator died: it is started again, with %d groups", len(process.in_flight))
        process.restart()


@dataclass
class _Process:
    """A generator's process as seen from here."""

    recipe: Any
    model_folder: str
    shared: SharedWeights
    in_flight: dict[int, _Group] = field(default_factory=dict)
    installed: int = -1
    deaths: int = 0
    counters: Counters = field(default_factory=Counters)
    buried: Counters = field(default_factory=Counters)
    """What its processes before this one had spent."""

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Start the process; it is told what it needs by the channel."""
        self.channel, theirs = _SPAWN.Pipe()
        # Few arguments: Python waits until a process has read those, even where it is dead.
        arguments = (self.shared, theirs)
        self._process = _SPAWN.Process(target=generate, name="generator", args=arguments, daemon=True)
        with deaf_to_interrupts():
            self._process.start()
        theirs.close()
        self.tell((self.recipe, self.model_folder))

    @property
    def sentinel(self) -> int:
        return self._process.sentinel

    def submit(self, place: int, group: _Group) -> None:
        self.in_flight[place] = group
        self.tell((place, *group))

    def tell(self, message: Any) -> None:
        with suppress(OSError):  # it is dead: `_listen` will see that, and submit again what is in flight
            self.channel.send(message)

    def restart(self) -> None:
        """Start anew, with what was in flight."""
        self.channel.close()
        self.kill()
        self.buried, self.counters = sum_of([self.buried, self.counters]), Counters()
        self.buried.restarted += len(self.in_flight)
        self.installed = -1
        self.start()
        for place, group in self.in_flight.items():
            self.tell((place, *group))

    def end(self) -> None:
        """Wait for the end of a process whose channel is closed, and not for ever."""
        self._process.join(timeout=10)
        self.kill()

    def kill(self) -> None:
        """End it now."""
        self._process.kill()
        self._process.join()


def sum_of(counters: Sequence[Counters]) -> Counters:
    """What several processes have spent together."""
    return Counters(*map(sum, zip(*(vars(c).values() for c in counters), strict=True)))


def _kill(processes: list[_Process]) -> None:
    for process in processes:
        process.kill()


# -- in the process of a generator -------------------------------------------------------------------------


def generate(shared: SharedWeights, channel: Connection) -> None:
    """Decode what is submitted, with the newest weights, until the channel is closed."""
    from scalerl.rl.setup import load_generator

    follow_the_parent()
    torch.set_num_threads(1)
    heard, said = queue.SimpleQueue[Any](), queue.SimpleQueue[Any]()
    for thread, messages in ((_hear, heard), (_send, said)):
        threading.Thread(target=thread, args=(messages, channel), daemon=True).start()
    recipe, model_folder = heard.get()
    try:
        generator = load_generator(recipe, model_folder, recipe.seed, recipe.rows)
    except ScalerlError as error:
        said.put(("failed", str(error), Counters()))
        time.sleep(10)  # until it has been read; the parent ends this process
        return
    staging = {name: np.empty(p.shape, dtype=np.float32) for name, p in generator.model.named_parameters()}
    places = deque[int]()
    generator.version = -1
    while True:
        if shared.version != generator.version:
            generator.update(staging, shared.read(staging))
            said.put(("installed", generator.version, replace(generator.counters)))
        while not (generator.busy and heard.empty()):
            message = heard.get()
            if message is _CLOSED:
                return
            if message is None:
                break  # new weights
            place, *group = message
            places.append(place)
            generator.submit(*group)
        if generator.busy:
            generator.work()
        if groups := generator.take(generator.ready):
            packed = pack_rollouts([rollout for rollouts in groups for rollout in rollouts])
            value = [places.popleft() for _ in groups], [len(rollouts) for rollouts in groups], packed
            said.put(("complete", value, replace(generator.counters)))


_CLOSED = object()
"""What is heard at the end of the channel."""


def _hear(heard: queue.SimpleQueue[Any], channel: Connection) -> None:
    with _ends_the_process(), suppress(EOFError, OSError):
        while True:
            heard.put(channel.recv())
    heard.put(_CLOSED)


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
