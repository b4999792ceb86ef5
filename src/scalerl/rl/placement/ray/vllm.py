"""vLLM workers placed by Ray: an actor on each node starts a worker and relays calls to it.

    driver   calls, weights as references ->  actor   calls, weights as files ->  worker of vLLM
             <- answers                               <- answers

The worker runs the Python of vLLM's environment on that node, on the actor's GPUs. Weights are fetched from
the object store before generation is paused for them. A worker ends with its actor, however that ends.
"""

import os
import shutil
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from scalerl.errors import ScalerlError
from scalerl.rl.config.cluster import Cluster
from scalerl.rl.config.devices import VISIBLE
from scalerl.rl.config.engine import Vllm
from scalerl.rl.engine.vllm.launch import (
    Servers,
    environment,
    exit_reason,
    find_python,
    with_transport,
    workers_of,
)
from scalerl.rl.engine.vllm.worker import serve_by_actor
from scalerl.rl.model.causal_lm import gpus_in_use
from scalerl.rl.sync.ray_weights import StoredWeights, store
from scalerl.rl.sync.vllm_client import VllmClient
from scalerl.rl.sync.vllm_weights import Choose, VllmTransport, write_files
from scalerl.rl.types import Weights
from scalerl.rl.workers.backend import Channel, Target, WorkerLostError
from scalerl.rl.workers.processes import ChildProcess, FreshPython
from scalerl.rl.workers.ray.backend import RayActors, RayProcess
from scalerl.rl.workers.ray.session import Session

_POLL = 1.0  # seconds between two checks of a worker that sends nothing


def place_on_ray(
    session: Session, settings: Vllm, model_folder: str, logs: Path, flags: Sequence[str], folder: Path
) -> Servers:
    """Return as many workers as the session has generators, anywhere on the cluster.

    Logs go to the folder `logs` on each node. `folder` is not used, because the files are on the nodes.
    """
    cluster = session.cluster
    gpus = cluster.generator.gpus_or(0.0) > 0
    # A local cluster is only on this machine.
    here = [gpu.name for gpu in gpus_in_use()] if gpus and cluster.address == "local" else []
    settings = with_transport(settings, here)
    states = workers_of(settings, cluster.generators, model_folder, flags, logs, gpus)
    transport = partial(StoreTransport, cluster) if settings.transport == "file" else None
    return Servers(settings, states, RayVllm(session, settings, model_folder, logs), here, transport)


class RayVllm(RayActors):
    """A backend that requests actors for vLLM workers."""

    def __init__(self, session: Session, *of_run: Any) -> None:
        super().__init__(session, "generators", session.cluster.timeouts.heartbeat)
        self._of_run = of_run

    def spawn(self, name: str, number: int, target: Target, *arguments: Any) -> RayProcess:
        """See `Backend.spawn`; the arguments are those of `scalerl.rl.engine.vllm.worker.serve`."""
        return super().spawn(name, number, relay, name, number, *self._of_run, arguments[1])


class StoreTransport(VllmTransport):
    """A transport by which a server's actor fetches weights from the object store and writes files."""

    def __init__(self, cluster: Cluster) -> None:
        self._bucket_mib, self._seconds = cluster.transport.bucket_mib, cluster.timeouts.weights

    def hold(self, weights: Weights, version: int) -> StoredWeights:
        """See `VllmTransport`."""
        return store(weights, self._bucket_mib, self._seconds)

    async def chosen(self, server: VllmClient, choose: Choose) -> tuple[int, str]:
        """See `VllmTransport`."""
        version, stored = choose()
        return version, await server.call("fetch", stored, seconds=self._seconds)


# -- in the actor -------------------------------------------------------------------------------------------


def relay(
    channel: Channel,
    name: str,
    number: int,
    settings: Vllm,
    model_folder: str,
    logs: Path,
    arguments: Sequence[str],
) -> None:
    """Start a vLLM worker on this node, and relay calls and answers until it exits."""
    python = find_python(settings)
    folder = Path(tempfile.mkdtemp(prefix="scalerl-", dir=settings.weights_folder))
    around = environment(folder / "path", settings, model_folder, bool(os.environ.get(VISIBLE)))
    backend = FreshPython(python, around, logs)
    log = backend.log(number)
    start = log.stat().st_size if log.exists() else 0
    worker = backend.spawn(name, number, serve_by_actor, str(folder), arguments)
    relayed = _Relayed(channel, worker, folder)
    Thread(target=relayed.forward, daemon=True).start()
    try:
        try:
            while True:
                backend.wait([worker], _POLL)
                relayed.answer()
        finally:  # before the loss is reported: the driver then ends this process
            relayed.remove()
    except WorkerLostError as error:
        why = str(error).removeprefix(str(worker.lost("")))
        channel.send("lost", f"{why} ({exit_reason(log, start)})")


class _Relayed:
    """A vLLM worker on this node, whose files are in `folder`, as the relay sees it."""

    def __init__(self, channel: Channel, worker: ChildProcess, folder: Path) -> None:
        self._channel, self._worker, self._folder = channel, worker, folder
        self._installing: dict[int, str] = {}
        """Folders of weights that calls in progress install, by the number of the call."""
        self._writing = Lock()

    def forward(self) -> None:
        """Relay calls to the worker; calls to fetch weights are answered here, in threads."""
        while True:
            number, method, arguments = call = self._channel.receive()
            if method == "fetch":
                Thread(target=self._fetch, args=(number, *arguments), daemon=True).start()
                continue
            if method == "install":
                self._installing[number] = arguments[0]
            self._worker.send(call)

    def answer(self) -> None:
        """Relay the worker's messages; remove files that it has installed.

        Raises:
            WorkerLostError: the worker has exited.
        """
        for kind, value, _ in self._worker.receive():
            if kind in ("answer", "refused") and (path := self._installing.pop(value[0], "")):
                shutil.rmtree(path, ignore_errors=True)
            self._channel.send(kind, value)

    def remove(self) -> None:
        """Remove all files; no more are written afterwards."""
        with self._writing:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _fetch(self, number: int, stored: StoredWeights) -> None:
        """Write weights to files; remove earlier ones that were never installed."""
        try:
            with self._writing:
                if not self._folder.exists():
                    return  # the worker is lost
                for unused in self._folder.glob("weights-*"):
                    shutil.rmtree(unused, ignore_errors=True)
                value: Any = str(write_files(stored, self._folder / f"weights-{number}"))
        except ScalerlError as error:  # the caller raises it: another worker would fail too
            value = error
        self._channel.send("answer", (number, value))
