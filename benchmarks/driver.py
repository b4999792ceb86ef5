"""What the one process that drives the loop costs, by itself: CPU seconds for 1,000 completions.

    python benchmarks/driver.py [--tokens 14000] [--completions 256] [--generators 16384]

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
"""

from __future__ import annotations

import argparse
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from scalerl.rl.advantage import BatchStd
from scalerl.rl.averaging import PromptAverage
from scalerl.rl.batch import make_batch
from scalerl.rl.counters import RunCounters, groups_row, step_row
from scalerl.rl.learner import StepStats
from scalerl.rl.length import NoLengthControl
from scalerl.rl.pipeline import Step, make_group
from scalerl.rl.pool import NoPositiveResampling, PromptPool
from scalerl.rl.saved_rollouts import pack_rollouts, unpack_rollouts
from scalerl.rl.types import Counters, Prompt, Reward, Rollout

SAMPLES, PROMPT = 16, 200


@dataclass
class Seat:
    """What the driver knows of a generator."""

    in_flight: dict[int, Any]
    installed: int = 0


def rollouts_of(n: int, tokens: int) -> list[Rollout]:
    """Completions of `tokens` tokens each, in groups."""
    rng = np.random.default_rng(0)
    return [
        Rollout(
            prompt=Prompt(f"task/0/{i // SAMPLES}", "x" * 4 * PROMPT, "1"),
            draw=0,
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
    """CPU seconds of `work`, the least of a few, and what it returns."""
    least, value = np.inf, None
    for _ in range(repeats):
        started = time.process_time()
        value = work()
        least = min(least, time.process_time() - started)
    return float(least), value


class _Queue:
    """What `step_row` asks the pipeline for."""

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
    seats = [Seat({}) for _ in range(args.generators)]
    admit, _ = seconds(lambda: [place(seats, i) for i in range(20)])
    look, _ = seconds(lambda: [min(seat.installed for seat in seats) for _ in range(20)])
    print(f"\n| {args.generators:,} generators | CPU s |\n|---|---|")
    print(f"| admit a group | {admit / 20:.5f} |\n| look at all | {look / 20:.5f} |")


def collect(taken: list[Rollout]) -> list[Any]:
    """As the pipeline does."""
    pool = PromptPool([r.prompt for r in taken[::SAMPLES]], NoPositiveResampling(), seed=0)
    groups = []
    for i in range(0, len(taken), SAMPLES):
        members = taken[i : i + SAMPLES]
        rewards = [Reward(1.0 if j % 2 else -1.0, bool(j % 2)) for j in range(SAMPLES)]
        groups.append(make_group(members, rewards, NoLengthControl()))
        pool.record(groups[-1])
    return groups


def place(seats: list[Seat], i: int) -> None:
    """As `LocalGenerator` does."""
    min(seats, key=lambda seat: len(seat.in_flight)).in_flight[i] = None


if __name__ == "__main__":
    main()
