"""The pool of rollout workers, wherever they run: their groups, and their weights.

              add                                        complete groups, installed versions
    driver -----------> generator  0 .. n-1  -------------------------------------------------------> driver
              weights, by a transport

    submit     assigns a group to the worker with the fewest groups in flight, of those that have weights
    work       waits briefly for a message of any worker
    update     passes the weights to the transport without waiting. `installed` is the version that all
               workers that take part have installed

A lost worker's groups in flight keep their sequence numbers, and others sample them again: the same epochs of
the same prompts (random numbers are counter-based), by newer weights. A replacement first gets the latest
weights, and takes part once it has installed a version as new as the one that groups were admitted by. So no
token is older than the schedule allows, however workers come and go.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from scalerl.errors import OutOfMemoryError, ScalerlError, WorkerError, counted
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.engine.ordered import Generator, sum_of
from scalerl.rl.engine.sampling import GroupRequest
from scalerl.rl.placement.rollout_worker import GROUP, WEIGHTS, generate
from scalerl.rl.sync.shared_weights import SharedWeights, WeightTransport
from scalerl.rl.types import Counters, Weights
from scalerl.rl.workers.backend import Backend, Message
from scalerl.rl.workers.pool import PoolWorker, WorkerPool, backoff
from scalerl.rl.workers.processes import Processes
from scalerl.rl.workers.timeline import Timeline

_LOG = logging.getLogger("scalerl")
_WORK = 0.5  # longest wait of the driver for a message, in seconds
_ARRIVALS = count()


@dataclass(eq=False)
class RolloutWorker(PoolWorker):
    """The state of one rollout worker: its weights, and its counters over all of its processes."""

    weights_timeout: float = math.inf
    """Seconds within which offered weights must be installed."""
    arrival: int = -1
    """Number of the current process among all that were started; a broadcast group consists of these."""
    installed: int = -1
    """The version of its weights; -1 before the first."""
    counters: Counters = field(default_factory=Counters)
    lost_counters: Counters = field(default_factory=Counters)
    """Counters of its lost processes."""
    reported_at: float = 0.0
    offered: int = -1
    offered_at: float = 0.0
    offer_at: float = math.inf
    """Time at which missed weights are offered again."""
    misses: int = 0
    """Number of missed offers in a row."""

    def reported(self, counters: Counters) -> None:
        """Record the counters of its process."""
        self.counters, self.reported_at = counters, time.monotonic()

    def has_installed(self, version: int) -> None:
        """Record the version of its weights; the timeout of newer ones starts now."""
        if version > self.installed:
            self.offered_at = self.clock.now()
        self.installed, self.misses = version, 0

    def offer(self, parcel: Any, version: int) -> None:
        """Send weights, if the worker has started."""
        if self.process is not None and self.started:
            self.process.send((WEIGHTS, parcel, version))
            # Newer weights must not extend the deadline of an older offer that is not installed yet.
            if self.offered == self.installed:
                self.offered_at = self.clock.now()
            self.offered, self.offer_at = version, math.inf

    def missed(self) -> None:
        """Record that it missed its weights; they are offered again after a back-off: the cause may last."""
        self.offer_at = time.monotonic() + backoff(self.misses, self.weights_timeout / 8)
        self.misses += 1

    def check(self) -> None:
        """See `PoolWorker.check`."""
        super().check()
        assert self.process is not None
        if self.installed < self.offered and self.clock.now() - self.offered_at > self.weights_timeout:
            version, seconds = self.offered, self.weights_timeout
            raise self.process.lost(f"version {version} of the weights was not installed in {seconds:g} s")

    def release(self) -> dict[int, Any]:
        """Add the counters of a lost process; return its groups, which are sampled again."""
        placed_at = self.process.placed_at if self.process else 0.0
        groups = super().release()
        # The process was also held since its last report, though its work since then is lost.
        now, spent = time.monotonic(), self.counters
        if spent.held:
            spent = replace(spent, held=spent.held + now - self.reported_at)
        else:
            spent = replace(spent, startup=now - placed_at if placed_at else 0.0)
        self.lost_counters, self.counters = sum_of([self.lost_counters, spent]), Counters()
        self.lost_counters.restarted += len(groups)
        self.installed = self.offered = -1
        self.offer_at, self.misses = math.inf, 0
        return groups


class RolloutPool(WorkerPool[RolloutWorker], Generator):
    """A generator whose rollout workers are other processes; see `scalerl.rl.engine.ordered.Generator`.

    Raises:
        WorkerError: (by any method) a worker does not start, or is lost too often.
    """

    noun, role = "generator", "generate"
    no_progress = frozenset({"behind"})

    def __init__(
        self,
        workers: Sequence[RolloutWorker],
        backend: Backend,
        arguments: Sequence[Any],
        transport: WeightTransport,
        weights: Weights,
        version: int = 0,
        events: Timeline | None = None,
        none_left: float = math.inf,
    ) -> None:
        Generator.__init__(self, version)
        WorkerPool.__init__(self, workers, backend, generate, arguments, none_left, events)
        self._transport = transport
        self._floor = -1
        """The version that groups were admitted by, below which no worker may sample."""
        self._transport.publish(weights, version)
        self.start()

    def work(self) -> None:
        """Wait briefly for messages of workers, and handle them."""
        self.poll(_WORK)

    def update(self, weights: Weights, version: int) -> None:
        """Offer new weights; completions in flight continue with them on the old weights' KV cache."""
        # A broadcast waits for all its receivers, so a worker that has exited must not be among them.
        self.poll(0)
        self._transport.publish(weights, version)
        self.version = version
        workers = [worker for worker in self._workers if worker.taking_part]
        parcels = self._transport.for_all([worker.arrival for worker in workers], version)
        for worker, parcel in zip(workers, parcels, strict=True):
            worker.offer(parcel, version)
        for worker in self._workers:
            if not worker.taking_part:
                self._offer_to(worker)
        self.poll(0)

    @property
    def installed(self) -> int:
        """The newest version that all workers which take part have installed; -1 before the first does."""
        self.poll(0)
        # Without workers it is the latest: a new worker installs that before it takes part.
        least = min((w.installed for w in self._workers if w.taking_part), default=self.version)
        if self.alive or self._floor >= 0:
            self._floor = max(self._floor, least)
        return self._floor

    @property
    def counters(self) -> Counters:
        """Counters of all processes, including lost ones and those before a resume."""
        if not self._ended:
            self.poll(0)
        return sum_of([self._before, *(c for w in self._workers for c in (w.counters, w.lost_counters))])

    def close(self) -> None:
        """Stop the workers; completions in flight are lost."""
        super().close()
        self._transport.close()

    # -- the pool ------------------------------------------------------------------------------------------

    def poll(self, timeout: float) -> None:
        """See `WorkerPool.poll`."""
        super().poll(timeout)
        for worker in self._workers:
            if time.monotonic() >= worker.offer_at:
                self._offer_to(worker)

    def _assign(self, seq_no: int, group: GroupRequest) -> None:
        self.add(seq_no, group)

    def _offer_to(self, worker: RolloutWorker) -> None:
        worker.offer(self._transport.for_one(), self.version)

    def _send(self, worker: RolloutWorker, number: int, work: GroupRequest) -> None:
        assert worker.process is not None
        worker.process.send((GROUP, number, *work))

    def _started(self, worker: RolloutWorker, value: Any) -> None:
        worker.arrival = next(_ARRIVALS)
        self._offer_to(worker)

    def _failed(self, worker: RolloutWorker, error: ScalerlError) -> None:
        if self._backend.elsewhere:
            super()._failed(worker, error)
        if isinstance(error, OutOfMemoryError):  # it would recur
            raise error
        raise WorkerError(f"the generator cannot go on: {error}")

    def _received(self, worker: RolloutWorker, message: Message) -> None:
        if message.kind == "behind":
            _LOG.warning("%s did not get its weights (%s)", worker.where, message.value)
            self._transport.failed()
            worker.missed()
            return
        value, counters = message.value
        if self._events and worker.process:
            busy = counters.seconds - worker.counters.seconds
            self._events.generated(worker.name, worker.process.node, message.at, busy)
        worker.reported(counters)
        if message.kind == "installed":
            worker.has_installed(value)
            # Below the floor its tokens would be staler than admission assumed.
            if value >= self._floor and not worker.taking_part:
                self._take_part(worker, f"takes part from version {value}")
        elif message.kind == "complete":
            self._keep(value)
            for seq_no in value["seq_nos"]:
                self.complete(worker, seq_no)

    def _reassign(self, worker: RolloutWorker, work: Mapping[int, Any]) -> None:
        super()._reassign(worker, work)
        self._transport.failed()  # a broadcast's process group cannot continue without its lost member

    def _fate(self, work: Mapping[int, Any]) -> str:
        groups = f", and its {counted(len(work), 'group')} go{'es' * (len(work) == 1)} to others"
        return "; it is started again" + groups * bool(work)


class LocalGenerator(RolloutPool):
    """A generator with `n_processes` processes on this machine, with `recipe.decode_slots` each.

    Weights are in shared memory, which every process reads between two decode steps.
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
        """Start the processes on `devices`, their GPUs by name in CUDA_VISIBLE_DEVICES."""
        shared, limits = SharedWeights(weights.plan), recipe.timeouts
        workers = [
            RolloutWorker(f"generator {i}", i, limits.generator, limits.start) for i in range(n_processes)
        ]
        arguments = recipe.without_prompts(), model_folder
        super().__init__(workers, Processes(shared, devices=devices), arguments, shared, weights, version)
