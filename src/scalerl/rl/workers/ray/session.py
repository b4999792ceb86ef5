"""The Ray cluster of a run, joined or started, and the resources that the run reserves on it."""

import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import Any

from scalerl.errors import InputError, counted, first_line
from scalerl.rl.config.cluster import Cluster, Resources
from scalerl.rl.config.devices import VISIBLE, HeldDevices, gpus_of_workers
from scalerl.rl.config.engine import BUILT_IN, AnyEngine, Vllm
from scalerl.rl.model.causal_lm import gpus_in_use
from scalerl.rl.workers.ray import cluster_watch
from scalerl.rl.workers.signals import masked_signals

_LOG = logging.getLogger("scalerl")
_INTERVAL = 2.0  # seconds between two checks for free resources
_ANSWER = 5.0  # seconds within which a cluster must answer


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise InputError("[cluster] needs Ray: pip install 'scalerl[train,cluster]'") from None
    return ray


@contextmanager
def connected(cluster: Cluster, engine: AnyEngine = BUILT_IN) -> Iterator[None]:
    """Join or start the cluster of `[cluster]`; leave or end it at the end of the context.

    A program that has called `ray.init` itself keeps its connection.

    Raises:
        InputError: Ray is not installed, or there is no cluster at the recipe's address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A call after the end of the cluster, such as to kill an actor, would otherwise start another cluster.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    # The future default, about which Ray warns.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray ends a driver after this long without its head; `cluster_watch` ends it earlier, with a reason.
    reconnect = round(cluster.timeouts.heartbeat + 3 * cluster_watch.GRACE)
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(reconnect))
    # Ray prints pages about each dead process to standard output, where --json prints its object; the run
    # reports such a process itself. Ray reads this at import.
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
            # Signals to a whole job stop a run with a checkpoint and must not end Ray's processes. Ray itself
            # masks SIGINT in them; SIGTERM must still end them.
            with masked_signals((signal.SIGHUP, signal.SIGUSR1)):
                _init(ray, cluster, engine)
            if threading.current_thread() is threading.main_thread():
                for number, handler in handlers.items():
                    signal.signal(number, handler)  # Ray's own would end the run without a checkpoint
            if local:
                ours = [process for process in _children() if process not in before]
            with _watched(ray, cluster):
                yield
        finally:
            ray.shutdown()
            _kill(ours)  # if the head of a local cluster was killed, Ray leaves some of its processes behind


def _children() -> list[Any]:
    import psutil  # a dependency of Ray

    return psutil.Process().children(recursive=True)


def _kill(processes: Sequence[Any]) -> None:
    import psutil

    for process in processes:
        with suppress(psutil.Error):  # most have already exited
            process.kill()


def _watched(ray: Any, cluster: Cluster) -> AbstractContextManager[None]:
    context = ray.get_runtime_context()
    (own,) = (n["RayletSocketName"] for n in ray.nodes() if n["NodeID"] == context.get_node_id())
    return cluster_watch.watched(context.gcs_address, own, cluster.timeouts.heartbeat)


def _init(ray: Any, cluster: Cluster, engine: AnyEngine) -> None:
    address = cluster.address
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        with _gpus_for_actors(cluster, engine) as gpus:
            requests = requests_of(cluster, gpus.get("num_gpus", 0), engine)
            # Enough CPUs for all requested actors, even if they share fewer cores.
            cpus = max(math.ceil(_in_all(requests)["CPU"]), os.cpu_count() or 1)
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, **gpus, **quiet)
        there = ray.cluster_resources()
        if any(n > there.get(name, 0.0) for name, n in _in_all(requests).items()):
            raise InputError(f"{_lack(requests, there)}: no other machine joins a cluster that is local")
        return
    try:
        ray.init(address=_answering(address), **quiet)
    except (OSError, ValueError, RuntimeError) as error:  # ConnectionError is an OSError
        where = "runs here" if address == "auto" else f"answers at {address}"
        how = "`ray start --head` starts one, and --set cluster.address=local one for this run"
        raise InputError(f"[cluster]: no Ray cluster {where} ({first_line(error)}); {how}") from error


@contextmanager
def _gpus_for_actors(cluster: Cluster, engine: AnyEngine) -> Iterator[dict[str, int]]:
    """Yield the arguments for `ray.init` that give it the GPUs of this machine which the driver leaves free.

    Raises:
        InputError: there are too few GPUs for vLLM's workers beside the driver.
    """
    gpus, first = gpus_in_use(), cluster.beside_ray
    if not gpus:
        yield {}
        return
    if isinstance(engine, Vllm) and not engine.urls:
        gpus_of_workers(engine, cluster.generators, [gpu.name for gpu in gpus], first)
    before = os.environ.get(VISIBLE)
    names = [gpu.name for gpu in gpus[first:] or gpus]  # a single GPU is shared
    os.environ[VISIBLE] = ",".join(names)
    try:
        yield {"num_gpus": len(names)}
    finally:
        os.environ.pop(VISIBLE)
        os.environ.update({VISIBLE: before} if before is not None else {})


def _answering(address: str) -> str:
    """Return the address if a cluster answers there, else raise an OSError; Ray would retry for minutes."""
    if address.startswith("ray://"):
        raise ValueError("the command has to run on a node of the cluster")
    found = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
    if found == "auto":  # Ray looks for processes of a cluster on this machine
        return found
    host, _, port = found.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=_ANSWER):
        return found


Requests = Mapping[str, tuple[Resources, ...]]
"""The resources of each actor, by role."""
_SPREAD = {"trainers": "PACK", "generators": "SPREAD", "verifiers": "SPREAD", "evaluation": "PACK"}
"""Ray's placement strategy for the actors of a role."""


def requests_of(cluster: Cluster, gpus: float, engine: AnyEngine = BUILT_IN) -> Requests:
    """Return the resource requests of a run on a cluster that has `gpus` GPUs.

    As on one machine (`scalerl.rl.config.devices`), the evaluation gets a GPU that is left over, otherwise
    half of the last generator's. With a number in place of `auto` it gets as many GPUs as a generator.
    """
    fixed = cluster.with_gpus(gpus, engine)
    generators, last = (fixed.generator,) * cluster.generators, fixed.generator
    vllm = isinstance(engine, Vllm)
    if not vllm and cluster.evaluates_beside(gpus):
        last = replace(last, gpus=0.5)
        generators = (*generators[1:], last)
    requests = {
        "trainers": (fixed.trainer,) * cluster.trainers * (cluster.learner.kind != "one"),
        "generators": generators * (not (vllm and engine.urls)),
        "verifiers": (fixed.verifier,) * cluster.verifiers,
        "evaluation": (last,) * (not vllm),
    }
    return {role: each for role, each in requests.items() if each}


def _in_all(requests: Requests) -> dict[str, float]:
    bundles = [one.bundle() for each in requests.values() for one in each]
    return {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in ("CPU", "GPU")}


class Session:
    """The resources that a run reserves on the cluster for all its parts; `close` releases them.

    Raises:
        InputError: the resources are not free within `timeouts.start`, or the learner in the driver needs a
            GPU of this node that Ray gives to actors.
    """

    def __init__(self, cluster: Cluster, engine: AnyEngine = BUILT_IN) -> None:
        from ray.util.placement_group import placement_group

        cluster_watch.check()
        ray = _ray()
        there, before = ray.cluster_resources(), ray.available_resources()
        _check_beside_ray(cluster)
        self._requests = requests_of(cluster, there.get("GPU", 0.0), engine)
        self.cluster = cluster.with_gpus(there.get("GPU", 0.0), engine)
        """The table `[cluster]`, with the number of GPUs of each actor filled in."""
        bundles = {role: [one.bundle() for one in each] for role, each in self._requests.items()}
        gpus = there.get("GPU", 0.0)
        self._beside = "evaluation" in bundles and cluster.evaluates_beside(gpus)
        self.held = HeldDevices.on_cluster(cluster, engine, len(gpus_in_use()), gpus)
        """The devices that a process of each role counts as."""
        if self._beside:
            (own,), shared = bundles.pop("evaluation"), bundles["generators"][-1]
            bundles["generators"][-1] = {name: n + own[name] for name, n in shared.items()}
        self._groups: dict[str, Any] = {
            role: placement_group(of_role, strategy=_SPREAD[role]) for role, of_role in bundles.items()
        }
        """The placement group of each role."""
        self._wait(cluster, before)

    def options(self, role: str, number: int) -> dict[str, Any]:
        """Return Ray's options for actor `number` of a role."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = self._requests[role][number]
        if role == "evaluation" and self._beside:
            role, number = "generators", len(self._requests["generators"]) - 1
        place = PlacementGroupSchedulingStrategy(self._groups[role], number)
        return {"num_cpus": resources.cpus, "num_gpus": resources.gpus, "scheduling_strategy": place}

    def _wait(self, cluster: Cluster, before: Mapping[str, float]) -> None:
        began, warned = time.monotonic(), False
        for group in self._groups.values():
            while not group.wait(_INTERVAL):
                cluster_watch.check()
                if not warned:
                    _LOG.warning("waiting for room: %s", _lack(self._requests, before))
                    warned = True
                if time.monotonic() - began > cluster.timeouts.start:
                    self.close()
                    waited = f"waited {cluster.timeouts.start:g} s (cluster.timeouts.start)"
                    raise InputError(f"{_lack(self._requests, before)}; {waited}")

    def close(self) -> None:
        """Release the reserved resources."""
        from ray.util.placement_group import remove_placement_group

        while self._groups and not cluster_watch.gone():
            remove_placement_group(self._groups.popitem()[1])


def _lack(requests: Requests, before: Mapping[str, float]) -> str:
    """Return a sentence on the requested and the existing resources, and on the keys to change."""
    ray = _ray()
    roles = [
        f"{counted(len(each), role.removesuffix('s'))} of {_words(each[0].bundle())}"
        for role, each in requests.items()
    ]
    in_all, there = _in_all(requests), ray.cluster_resources()
    kinds = [name for name, n in in_all.items() if n]
    nodes = counted(sum(node["Alive"] for node in ray.nodes()), "node")
    has = f"{_words(there, kinds)} on {nodes}, {_words(before, kinds)} of them free"
    keys = " or ".join(f"cluster.{role}" for role in ("generators", "trainers") if role in requests)
    change = f"lower {keys or 'cluster.generators'}"
    if in_all["GPU"] > there.get("GPU", 0.0) and "evaluation" in requests:  # vLLM's workers cannot share
        change += ", or have actors share a GPU (cluster.generator.gpus=0.5)"
    return f"[cluster] asks for {', '.join(roles)}: {_words(in_all, kinds)}; there are {has}; {change}"


def _check_beside_ray(cluster: Cluster) -> None:
    """Check that Ray does not give actors the GPU of this node that a learner in the driver uses.

    Raises:
        InputError: Ray gives it to actors.
    """
    if cluster.address == "local" or not cluster.beside_ray:  # in a local cluster `_init` has left it out
        return
    ray = _ray()
    own = ray.get_runtime_context().get_node_id()
    of_ray = sum(node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["NodeID"] == own)
    if of_ray:
        raise InputError(
            "[cluster]: a learner in the driver computes on a GPU of this node, which Ray gives to actors: "
            'set cluster.learner.kind to "fsdp2", which is for one trainer too'
        )


def here() -> tuple[str, int]:
    """Return the node, for messages, and the process id of this actor."""
    ray = _ray()
    context = ray.get_runtime_context()
    return f"node {ray.util.get_node_ip_address()} ({context.get_node_id()[:8]})", os.getpid()


def _words(resources: Mapping[str, float], kinds: Sequence[str] = ()) -> str:
    """Return amounts in words, including zero amounts of `kinds`."""
    amounts = {name: resources.get(name, 0.0) for name in ("CPU", "GPU")}
    words = [f"{n:g} {name}{'s' * (n != 1)}" for name, n in amounts.items() if n or name in kinds]
    return " and ".join(words) or "nothing"
