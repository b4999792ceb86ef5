"""The Ray cluster of a run: joined or started, and the room that the run reserves on it."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

from scalerl.errors import InputError, counted, first_line
from scalerl.rl.config.cluster import Cluster, Resources
from scalerl.rl.workers.ray import cluster_watch

_LOG = logging.getLogger("scalerl")
_LOOK = 2.0  # seconds between two looks for room
_ANSWER = 5.0  # seconds in which a cluster must answer


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise InputError("[cluster] needs Ray: pip install 'scalerl[train,cluster]'") from None
    return ray


@contextmanager
def connected(cluster: Cluster) -> Iterator[None]:
    """Join the cluster of `[cluster]`, or start it; it is left, or ended, in the end.

    A program that has called `ray.init` itself keeps its connection.

    Raises:
        InputError: Ray is not installed, or no cluster is where the recipe says.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # it is the default to be, and warns
    # Ray ends a driver after this long without its head; `cluster_watch` does so before, and says why.
    reconnect = round(cluster.timeouts.heartbeat + 3 * cluster_watch.GRACE)
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(reconnect))
    if cluster.address == "local":
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # all sockets on the loopback
    ray = _ray()
    if ray.is_initialized():
        with _watched(ray, cluster):
            yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with cluster_watch.last_words(), _Began(cluster.address == "local") as began:
        try:
            with _masked():
                _init(ray, cluster)
            if threading.current_thread() is threading.main_thread():
                for number, handler in handlers.items():
                    signal.signal(number, handler)  # Ray's own would end the run without a checkpoint
            began.note()
            with _watched(ray, cluster):
                yield
        finally:
            ray.shutdown()


class _Began:
    """The processes of a cluster that is started here: where its head was killed, Ray leaves some of them."""

    def __init__(self, local: bool) -> None:
        self._local, self._processes = local, []

    def __enter__(self) -> _Began:
        self._before = self._below()
        return self

    def __exit__(self, *_: object) -> None:
        import psutil  # Ray brings it

        for process in self._processes:
            with suppress(psutil.Error):  # it has ended, as most have by now
                process.kill()

    def note(self) -> None:
        """All have begun."""
        self._processes = [process for process in self._below() if process not in self._before]

    def _below(self) -> list[Any]:
        if not self._local:
            return []
        import psutil

        return psutil.Process().children(recursive=True)


@contextmanager
def _masked() -> Iterator[None]:
    """Processes of Ray that are started here do not end by what goes to all of a job and stops a run with a
    checkpoint. SIGINT it masks by itself, and SIGTERM it is ended by."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGHUP, signal.SIGUSR1))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watched(ray: Any, cluster: Cluster) -> AbstractContextManager[None]:
    head, own = ray.get_runtime_context().gcs_address, ray._private.worker._global_node.raylet_socket_name
    return cluster_watch.watched(head, own, cluster.timeouts.heartbeat)


def _init(ray: Any, cluster: Cluster) -> None:
    address = cluster.address
    ray._private.worker.print_to_stdstream = _keep  # it is of the driver's process alone
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":  # as many processes as are asked for, however few cores they share
        cpus = sum(n * share.cpus for _, n, share, _ in _wanted(cluster))
        cpus = max(math.ceil(cpus), os.cpu_count() or 1)
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)
        there = ray.cluster_resources()
        if any(n > there.get(name, 0.0) for name, n in _in_all(cluster).items()):
            raise InputError(f"{_lack(cluster, there)}, and no other machine joins a cluster that is local")
        return
    try:
        ray.init(address=_answering(ray, address), **quiet)
    except (OSError, ValueError, RuntimeError) as error:  # ConnectionError is one of the first
        where = "runs here" if address == "auto" else f"answers at {address}"
        how = "`ray start --head` starts one, and --set cluster.address=local one for this run"
        raise InputError(f"[cluster]: no Ray cluster {where} ({first_line(error)}); {how}") from error


def _keep(said: Mapping[str, Any], ignore_prefix: bool) -> None:
    """What Ray would print on standard output, which has what --json asks for: pages about each process that
    died, of which the run tells by itself."""
    _LOG.debug("%s", said["lines"])


def _answering(ray: Any, address: str) -> str:
    """The address of a cluster, if somebody listens there: Ray itself would try for minutes."""
    if address.startswith("ray://"):
        raise ValueError("the command has to run on a node of the cluster")
    found = ray._private.services.canonicalize_bootstrap_address(address)
    host, _, port = found.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=_ANSWER):
        return found


def _wanted(cluster: Cluster) -> list[tuple[str, int, Resources, str]]:
    """What a run has on a cluster: who, how many, what each is given, and how they are spread over nodes."""
    trainers = [("trainers", cluster.trainers, cluster.trainer, "PACK")]
    generators = [("generators", cluster.generators, cluster.generator, "SPREAD")]
    verifiers = [("verifiers", cluster.verifiers, cluster.verifier, "SPREAD")]
    return [
        *trainers * (cluster.learner.kind != "one"),
        *generators * (cluster.engine.kind == "torch"),
        *verifiers * (cluster.verifiers > 0),
        ("evaluation", 1, cluster.generator, "PACK"),
    ]


def _in_all(cluster: Cluster) -> dict[str, float]:
    """How much a run asks for of everything."""
    shares = [(n, share.bundle()) for _, n, share, _ in _wanted(cluster)]
    return {name: sum(n * share.get(name, 0.0) for n, share in shares) for name in ("CPU", "GPU")}


class Session:
    """Room on the cluster for all parts of a run, given back with `close`.

    Raises:
        InputError: there is not so much, and none came within `timeouts.start`.
    """

    def __init__(self, cluster: Cluster) -> None:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        cluster_watch.check()
        self._groups = []
        self.room: dict[str, Callable[[int], Any]] = {}
        """By whom it is for: where the actor of each is to be put."""
        before = _ray().available_resources()
        for who, n, share, strategy in _wanted(cluster):
            group = placement_group([share.bundle()] * n, strategy=strategy)
            self._groups.append(group)
            self.room[who] = partial(PlacementGroupSchedulingStrategy, group)
        self._wait(cluster, before)

    def _wait(self, cluster: Cluster, before: Mapping[str, float]) -> None:
        begun, told = time.monotonic(), False
        for group in self._groups:
            while not group.wait(_LOOK):
                cluster_watch.check()
                if not told:
                    _LOG.warning("waiting for room: %s", _lack(cluster, before))
                    told = True
                if time.monotonic() - begun > cluster.timeouts.start:
                    self.close()
                    waited = f"waited {cluster.timeouts.start:g} s (cluster.timeouts.start)"
                    raise InputError(f"{_lack(cluster, before)}; {waited}")

    def close(self) -> None:
        """Give back what was reserved."""
        from ray.util.placement_group import remove_placement_group

        while self._groups and not cluster_watch.gone():
            remove_placement_group(self._groups.pop())


def _lack(cluster: Cluster, before: Mapping[str, float]) -> str:
    """What is asked for, and what there is."""
    ray = _ray()
    asked = [
        f"{counted(n, who.removesuffix('s'))} of {_words(share.bundle())}"
        for who, n, share, _ in _wanted(cluster)
    ]
    in_all = _in_all(cluster)
    kinds = [name for name, n in in_all.items() if n]
    nodes = counted(sum(node["Alive"] for node in ray.nodes()), "node")
    there = f"{_words(ray.cluster_resources(), kinds)} on {nodes}, {_words(before, kinds)} of them free"
    return f"[cluster] asks for {', '.join(asked)}: {_words(in_all, kinds)}; there are {there}"


def here() -> tuple[str, int]:
    """Node and process of this actor, for messages."""
    ray = _ray()
    context = ray.get_runtime_context()
    return f"node {ray.util.get_node_ip_address()} ({context.get_node_id()[:8]})", os.getpid()


def _words(resources: Mapping[str, float], kinds: Sequence[str] = ()) -> str:
    """Amounts in words; of `kinds` they are told where there are none, too."""
    amounts = {name: resources.get(name, 0.0) for name in ("CPU", "GPU")}
    words = [f"{n:g} {name}{'s' * (n != 1)}" for name, n in amounts.items() if n or name in kinds]
    return " and ".join(words) or "nothing"
