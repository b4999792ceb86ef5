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
_INTERVAL = 2.0  # seconds between two checks for room
_ANSWER = 5.0  # seconds in which a cluster must answer


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise InputError("[cluster] needs Ray: pip install 'scalerl[train,cluster]'") from None
    return ray


@contextmanager
def connected(cluster: Cluster) -> Iterator[None]:
    """Join the cluster of `[cluster]`, or start it; leave it, or end it, in the end.

    A program that has called `ray.init` itself keeps its connection.

    Raises:
        InputError: Ray is not installed, or no cluster is where the recipe says.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray warns that this will be the default.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray ends a driver after this long without its head; `cluster_watch` does so before, and says why.
    reconnect = round(cluster.timeouts.heartbeat + 3 * cluster_watch.GRACE)
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(reconnect))
    # Ray prints pages on standard output about each process that died, which the run reports by itself, where
    # --json has its object. Ray reads this as it is imported.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".*")
    if cluster.address == "local":
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # all sockets on the loopback
    ray = _ray()
    if ray.is_initialized():
        with _watched(ray, cluster):
            yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    local = cluster.address == "local"
    before, ours = _children() if local else [], list[Any]()
    with cluster_watch.last_words():
        try:
            with _masked():
                _init(ray, cluster)
            if threading.current_thread() is threading.main_thread():
                for number, handler in handlers.items():
                    signal.signal(number, handler)  # Ray's own would end the run without a checkpoint
            if local:
                ours = [process for process in _children() if process not in before]
            with _watched(ray, cluster):
                yield
        finally:
            ray.shutdown()
            _kill(ours)  # where the head of a local cluster was killed, Ray leaves some of its processes


def _children() -> list[Any]:
    import psutil  # Ray brings it

    return psutil.Process().children(recursive=True)


def _kill(processes: Sequence[Any]) -> None:
    import psutil

    for process in processes:
        with suppress(psutil.Error):  # it has ended, as most have by now
            process.kill()


@contextmanager
def _masked() -> Iterator[None]:
    """Mask signals in processes that Ray starts here: those to all of a job stop a run with a checkpoint.

    SIGINT Ray masks by itself, and SIGTERM ends its processes.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGHUP, signal.SIGUSR1))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watched(ray: Any, cluster: Cluster) -> AbstractContextManager[None]:
    context = ray.get_runtime_context()
    (own,) = (n["RayletSocketName"] for n in ray.nodes() if n["NodeID"] == context.get_node_id())
    return cluster_watch.watched(context.gcs_address, own, cluster.timeouts.heartbeat)


def _init(ray: Any, cluster: Cluster) -> None:
    address = cluster.address
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":  # as many processes as are asked for, however few cores they share
        cpus = sum(n * resources.cpus for _, n, resources, _ in _requests(cluster))
        cpus = max(math.ceil(cpus), os.cpu_count() or 1)
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)
        there = ray.cluster_resources()
        if any(n > there.get(name, 0.0) for name, n in _in_all(cluster).items()):
            raise InputError(f"{_lack(cluster, there)}, and no other machine joins a cluster that is local")
        return
    try:
        ray.init(address=_answering(address), **quiet)
    except (OSError, ValueError, RuntimeError) as error:  # ConnectionError is one of the first
        where = "runs here" if address == "auto" else f"answers at {address}"
        how = "`ray start --head` starts one, and --set cluster.address=local one for this run"
        raise InputError(f"[cluster]: no Ray cluster {where} ({first_line(error)}); {how}") from error


def _answering(address: str) -> str:
    """Return the address of a cluster that answers: where none does, Ray itself would try for minutes."""
    if address.startswith("ray://"):
        raise ValueError("the command has to run on a node of the cluster")
    found = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
    if found == "auto":  # Ray looks for processes of a cluster on this machine
        return found
    host, _, port = found.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=_ANSWER):
        return found


def _requests(cluster: Cluster) -> list[tuple[str, int, Resources, str]]:
    """Return what a run requests: role, number, resources of each, and how they are spread over nodes."""
    trainers = [("trainers", cluster.trainers, cluster.trainer, "PACK")]
    generators = [("generators", cluster.generators, cluster.generator, "SPREAD")]
    verifiers = [("verifiers", cluster.verifiers, cluster.verifier, "SPREAD")]
    evaluation = [("evaluation", 1, cluster.generator, "PACK")]
    return [
        *trainers * (cluster.learner.kind != "one"),
        *generators * (cluster.engine.kind == "torch"),
        *verifiers * (cluster.verifiers > 0),
        *evaluation * (cluster.engine.kind == "torch"),
    ]


def _in_all(cluster: Cluster) -> dict[str, float]:
    bundles = [(n, resources.bundle()) for _, n, resources, _ in _requests(cluster)]
    return {name: sum(n * bundle.get(name, 0.0) for n, bundle in bundles) for name in ("CPU", "GPU")}


class Session:
    """Room on the cluster for all parts of a run, released by `close`.

    Raises:
        InputError: there is not so much, and none came within `timeouts.start`.
    """

    def __init__(self, cluster: Cluster) -> None:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        cluster_watch.check()
        self._groups = []
        self.room: dict[str, Callable[[int], Any]] = {}
        """By role: the scheduling strategy of the actor of a number."""
        before = _ray().available_resources()
        for role, n, resources, strategy in _requests(cluster):
            group = placement_group([resources.bundle()] * n, strategy=strategy)
            self._groups.append(group)
            self.room[role] = partial(PlacementGroupSchedulingStrategy, group)
        self._wait(cluster, before)

    def _wait(self, cluster: Cluster, before: Mapping[str, float]) -> None:
        began, warned = time.monotonic(), False
        for group in self._groups:
            while not group.wait(_INTERVAL):
                cluster_watch.check()
                if not warned:
                    _LOG.warning("waiting for room: %s", _lack(cluster, before))
                    warned = True
                if time.monotonic() - began > cluster.timeouts.start:
                    self.close()
                    waited = f"waited {cluster.timeouts.start:g} s (cluster.timeouts.start)"
                    raise InputError(f"{_lack(cluster, before)}; {waited}")

    def close(self) -> None:
        """Release what was reserved."""
        from ray.util.placement_group import remove_placement_group

        while self._groups and not cluster_watch.gone():
            remove_placement_group(self._groups.pop())


def _lack(cluster: Cluster, before: Mapping[str, float]) -> str:
    """Return a sentence of what is requested, and of what there is."""
    ray = _ray()
    requests = [
        f"{counted(n, role.removesuffix('s'))} of {_words(resources.bundle())}"
        for role, n, resources, _ in _requests(cluster)
    ]
    in_all = _in_all(cluster)
    kinds = [name for name, n in in_all.items() if n]
    nodes = counted(sum(node["Alive"] for node in ray.nodes()), "node")
    there = f"{_words(ray.cluster_resources(), kinds)} on {nodes}, {_words(before, kinds)} of them free"
    return f"[cluster] asks for {', '.join(requests)}: {_words(in_all, kinds)}; there are {there}"


def here() -> tuple[str, int]:
    """Return node and process of this actor, for messages."""
    ray = _ray()
    context = ray.get_runtime_context()
    return f"node {ray.util.get_node_ip_address()} ({context.get_node_id()[:8]})", os.getpid()


def _words(resources: Mapping[str, float], kinds: Sequence[str] = ()) -> str:
    """Return amounts in words; those of `kinds` where there are none, too."""
    amounts = {name: resources.get(name, 0.0) for name in ("CPU", "GPU")}
    words = [f"{n:g} {name}{'s' * (n != 1)}" for name, n in amounts.items() if n or name in kinds]
    return " and ".join(words) or "nothing"
