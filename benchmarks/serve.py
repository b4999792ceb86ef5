"""How long `scalerl serve` takes to show what is appended to one of many runs.

    python benchmarks/serve.py [--runs 2000] [--changes 20]

Runs of ten evaluations, written a week ago. Evaluations are appended to runs drawn at random: the time is
that from the append to the row with it, by the stream of events, as the page gets it. The server fits the
runs meanwhile, one by one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WEEK = 7 * 86400.0


def evaluation(step: int) -> str:
    """Return a line of evals.jsonl."""
    seconds = {"generate": 5.0 * step, "train": 4.0 * step, "evaluate": 0.0, "idle": 0.0}
    row = {
        "step": step,
        "time": time.time(),
        "pass_rate": 0.3 + 0.3 * step**2 / (step**2 + 10_000),
        "n_prompts": 300,
        "n_samples": 16,
        "mean_p_1mp": 0.15,
        "device_seconds": seconds,
    }
    return json.dumps(row) + "\n"


def make_runs(root: Path, n: int) -> list[Path]:
    """Make `n` run folders, forty in each parent folder."""
    first = root / "group-0" / "run-0"
    first.mkdir(parents=True)
    (first / "config.json").write_text(json.dumps({"schema_version": 1, "name": "run", "seed": 0}))
    (first / "evals.jsonl").write_text("".join(map(evaluation, range(0, 200, 20))))
    rows = (json.dumps({"step": step, "time": time.time()}) + "\n" for step in range(0, 200, 20))
    (first / "steps.jsonl").write_text("".join(rows))
    runs = [first, *(root / f"group-{i // 40}" / f"run-{i}" for i in range(1, n))]
    for run in runs[1:]:
        shutil.copytree(first, run)
    ago = time.time() - WEEK
    for path in root.rglob("*.json*"):
        os.utime(path, (ago, ago))
    return runs


def versions(address: str) -> Iterator[int]:
    """Yield the versions that the stream of events announces."""
    with urllib.request.urlopen(f"{address}/events") as stream:
        for line in stream:
            if line.startswith(b"data: "):
                yield int(line[6:])


def runs_since(address: str, version: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"{address}/api/runs?since={version}") as answer:
        return json.load(answer)


def seconds_to_show(address: str, root: Path, run: Path, step: int, news: Iterator[int]) -> float:
    """Append an evaluation to a run; return the seconds until its row shows it."""
    known, path = runs_since(address, 0)["version"], run.relative_to(root).as_posix()
    started = time.perf_counter()
    with (run / "evals.jsonl").open("a") as file:
        file.write(evaluation(step))
    for _ in news:
        found = runs_since(address, known)
        if any(row["path"] == path and row["step"] == step for row in found["runs"]):
            break
        known = found["version"]
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--changes", type=int, default=20)
    args = parser.parse_args()
    rng, steps = random.Random(0), itertools.count(200)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        runs = make_runs(root, args.runs)
        command = [sys.executable, "-m", "scalerl", "serve", str(root), "--port", "0"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip().rstrip("/")
            started, news = time.perf_counter(), versions(address)
            while runs_since(address, 0)["looking"]:
                time.sleep(0.1)
            print(f"{args.runs} runs are listed after {time.perf_counter() - started:.1f} s")
            took = []
            for _ in range(args.changes):
                time.sleep(rng.uniform(0, 2))
                took.append(seconds_to_show(address, root, rng.choice(runs), next(steps), news))
            rows = runs_since(address, 0)["runs"]
            waits = sum(row["waits"] for row in rows)
        finally:
            server.kill()
            server.wait()
    print(f"from append to row, {args.changes} changes: median {statistics.median(took):.2f} s,", end=" ")
    print(f"worst {max(took):.2f} s (at the end {waits} runs wait for their first fit)")


if __name__ == "__main__":
    main()
