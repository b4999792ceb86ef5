"""What the one process that drives the loop costs, by itself: CPU seconds for 1,000 completions.

    python benchmarks/driver.py [--tokens 14000] [--completions 256] [--generators 16384] [--ray]

Groups of 16 completions of so many tokens, as a generator sends them, go the way that they go in a run, each
part timed alone, on one core, in CPU time: so that it says little of a machine's load.

    pack, pickle       in the generator
    unpickle, unpack   the driver takes a message
    collect            groups, rewards, and the record of the pool
    batch              advantages, padding
    record             the lines of steps.jsonl and groups.jsonl, the ledger
    admit              a group: its prompt is drawn, and goes to the generator with the fewest in flight,
                       who is looked for among all
    look               at all generators once, for the version that all have installed

And with `--ray`, on a Ray cluster of three simulated nodes on this machine (CPU seconds of the driver's
process, Ray's own threads included):

    call               of an actor's method, whose answer is not waited for: a group is submitted
    message            a call, and its answer: messages of a generator are received
    offer              weights of 218 buckets to a generator: all references, and one to these references
    listen             to all generators once, where none of 4,096 says anything
    fetch              buckets by two processes on one node, then by one on another; who has copies
"""

from __future__ import annotations

import argparse
import logging
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from scalerl.rl.algo.advantage import BatchStd
from scalerl.rl.algo.averaging import PromptAverage
from scalerl.rl.algo.curriculum import NoPositiveResampling
from scalerl.rl.algo.length import NoLengthControl
from scalerl.rl.engine.ordered import pack_rollouts, unpack_rollouts
from scalerl.rl.learner.batch import StepStats, make_batch
from scalerl.rl.loop.counters import RunCounters, groups_row, step_row
from scalerl.rl.loop.pipeline import Step, make_group
from scalerl.rl.loop.prompt_pool import PromptPool
from scalerl.rl.types import Counters, Prompt, Reward, Rollout

SAMPLES, PROMPT = 16, 200


@dataclass
class RolloutWorker:
    """What the driver knows of a generator."""

    in_flight: dict[int, Any]
    installed: int = 0


def rollouts_of(n: int, tokens: int) -> list[Rollout]:
    """Return `n` completions of `tokens` tokens each, in groups of `SAMPLES`."""
    rng = np.random.default_rng(0)
    return [
        Rollout(
            prompt=Prompt(f"task/0/{i // SAMPLES}", "x" * 4 * PROMPT, "1"),
            epoch=0,
            sample=i % SAMPLES,
            prompt_T=np.arange(PROMPT),
            token_T=rng.integers(0, 150_000, tokens),
            sampled_T=np.ones(tokens, dtype=bool),
            logp_T=rng.random(tokens, dtype=np.float32),
            version_T=np.sort(rng.integers(0, 4, tokens)).astype(np.int32),
            first_version=0,
            truncated=False,
            interrupted=False,
        )
        for i in range(n)
    ]


def seconds(work: Callable[[], Any], repeats: int = 3) -> tuple[float, Any]:
    """Return the CPU seconds of `work`, the least of `repeats`, and its result."""
    least, value = np.inf, None
    for _ in range(repeats):
        started = time.process_time()
        value = work()
        least = min(least, time.process_time() - started)
    return float(least), value


class _Queue:
    """Stands in for the pipeline in `step_row`."""

    pool_left = 0

    def queue(self) -> dict[str, int]:
        return {}

    def ledger(self, fates: Any) -> dict[str, int]:
        return dict(fates)


def main() -> None:
    """Time the parts and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=14_000)
    parser.add_argument("--completions", type=int, default=256)
    parser.add_argument("--generators", type=int, default=16_384)
    parser.add_argument("--ray", action="store_true", help="what Ray costs too")
    args = parser.parse_args()
    n = args.completions // SAMPLES * SAMPLES
    rollouts = rollouts_of(n, args.tokens)
    found: dict[str, float] = {}
    found["pack"], packed = seconds(lambda: pack_rollouts(rollouts))
    found["pickle"], sent = seconds(lambda: pickle.dumps(packed, protocol=5))
    found["unpickle"], heard = seconds(lambda: pickle.loads(sent))
    found["unpack"], taken = seconds(lambda: unpack_rollouts(heard))
    found["collect"], groups = seconds(lambda: collect(taken))
    found["batch"], batch = seconds(lambda: make_batch(groups, BatchStd(), PromptAverage(), args.tokens + 1))
    stats = StepStats(tokens=n * args.tokens)
    step = Step(9, tuple(groups), batch, stats, trained_at=0.0, train_seconds=1.0, waited_seconds=0.0)

    def record() -> None:
        counters = RunCounters()
        counters.add(step, Counters(), 1.0)
        step_row(step, counters, _Queue())  # type: ignore[arg-type]
        groups_row(step)

    found["record"], _ = seconds(record)
    print(f"| {args.tokens:,} tokens | CPU s for 1,000 completions | MB |\n|---|---|---|")
    for name, value in found.items():
        size = f"{len(sent) / n * 1000 / 1e6:,.0f}" if name == "pickle" else ""
        print(f"| {name} | {value / n * 1000:.3f} | {size} |")
    workers = [RolloutWorker({}) for _ in range(args.generators)]
    admit, _ = seconds(lambda: [place(workers, i) for i in range(20)])
    look, _ = seconds(lambda: [min(worker.installed for worker in workers) for _ in range(20)])
    print(f"\n| {args.generators:,} generators | CPU s |\n|---|---|")
    print(f"| admit a group | {admit / 20:.5f} |\n| look at all | {look / 20:.5f} |")
    if args.ray:
        on_ray()


def on_ray() -> None:
    """Time what the driver does through Ray, and print the tables."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    import torch
    from ray.cluster_utils import Cluster
    from ray.experimental import get_object_locations
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from scalerl.rl.sync.ray_weights import StoredWeights, put

    class Receiver:
        def take(self, *values: Any) -> None:
            """Accept anything and return at once."""

        def receive(self, seconds: float) -> None:
            time.sleep(600)

        def make(self, n: int, mib: float) -> StoredWeights:
            size = int(mib * 2**18)
            return StoredWeights((put({f"w{i}": torch.full((size,), float(i))}) for i in range(n)), 60)

        def fetch(self, parcel: Any) -> float:
            started = time.perf_counter()
            parcel.fetch()
            return time.perf_counter() - started

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=2) for _ in range(3)]
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    actor: Any = ray.remote(num_cpus=0.1)(Receiver)

    def on(node: Any) -> Any:
        strategy = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        return actor.options(scheduling_strategy=strategy).remote()

    silent, trainer, one, other, third = map(on, [nodes[0], *nodes[:2], nodes[1], nodes[2]])
    ray.get([actor.take.remote() for actor in (silent, trainer, one, other, third)])

    def calls(n: int, *values: Any, wait: bool = False) -> float:
        def work() -> None:
            asked = [one.take.remote(*values) for _ in range(n)]
            if wait:
                ray.get(asked)

        least, _ = seconds(work)
        ray.get(one.take.remote())
        return least / n

    many: Any = ray.get(trainer.make.remote(218, 0.01))
    print("\n| on Ray | CPU s |\n|---|---|")
    print(f"| call | {calls(1000):.6f} |\n| message | {calls(1000, wait=True):.6f} |")
    print(f"| offer, 218 references | {calls(100, many._buckets, 1, wait=True):.6f} |")
    print(f"| offer, one reference | {calls(1000, many, 1, wait=True):.6f} |")
    print(f"| listen to 4,096 | {listen_to(silent, 4096):.6f} |")
    weights: Any = ray.get(trainer.make.remote(16, 16))
    refs = [ref for _, ref in weights._buckets]
    print("\n| 256 MiB fetched | seconds | nodes with copies |\n|---|---|---|")
    for name, actor in (("by one", one), ("by another on its node", other), ("on a third node", third)):
        took = ray.get(actor.fetch.remote(weights))
        copies = {len(where["node_ids"]) for where in get_object_locations(refs).values()}
        print(f"| {name} | {took:.2f} | {', '.join(map(str, sorted(copies)))} |")
    ray.shutdown()
    cluster.shutdown()


def listen_to(actor: Any, n: int) -> float:
    """Return the CPU seconds of a poll of `RolloutPool` over `n` silent generators."""
    from scalerl.rl.placement.rollouts import RolloutPool, RolloutWorker
    from scalerl.rl.workers.pool import WorkerPool
    from scalerl.rl.workers.ray.backend import RayActors

    workers, backend = [], RayActors(cast(Any, None), "generators", 60.0)
    for i in range(n):
        worker = RolloutWorker(f"generator {i}", i)
        worker.process = process = backend.process(worker.name, actor)
        process._placing, process.pid, process.placed_at = None, 1, time.monotonic()
        process._request()
        worker.taking_part, worker.started, worker.installed = True, True, 0
        workers.append(worker)
    generator: Any = object.__new__(RolloutPool)
    WorkerPool.__init__(generator, workers, backend, print)
    generator.version = 0
    least, _ = seconds(lambda: [generator.poll(0) for _ in range(3)])
    return least / 3


def collect(taken: list[Rollout]) -> list[Any]:
    """Collect completions into groups as the pipeline does."""
    pool = PromptPool([r.prompt for r in taken[::SAMPLES]], NoPositiveResampling(), seed=0)
    groups = []
    for i in range(0, len(taken), SAMPLES):
        actors = taken[i : i + SAMPLES]
        rewards = [Reward(1.0 if j % 2 else -1.0, bool(j % 2)) for j in range(SAMPLES)]
        groups.append(make_group(actors, rewards, NoLengthControl()))
        pool.record(groups[-1])
    return groups


def place(workers: list[RolloutWorker], i: int) -> None:
    """Admit group `i` as `LocalGenerator` does."""
    min(workers, key=lambda worker: len(worker.in_flight)).in_flight[i] = None


if __name__ == "__main__":
    main()
