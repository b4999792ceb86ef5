"""What the examples of the help and of docs/howto/python.md name: run folders, tables, logs of others."""

import json

import numpy as np

from scalerl.curve import LOG_LOGISTIC, Curve

TRUTH = Curve(LOG_LOGISTIC, 0.61, 1.9, 2500.0, 0.3)
COMPUTE_N = np.linspace(0, 10_000, 26)
"""In GPU-hours."""


def write(folder):
    """Write them; they are the same every time."""
    rng = np.random.default_rng(0)

    def rates():
        return [round(float(y), 4) for y in TRUTH(COMPUTE_N) + rng.normal(0, 0.006, len(COMPUTE_N))]

    for name in ("log.csv", "old.csv", "new.csv"):
        rows = [f"{c:g},{y}" for c, y in zip(COMPUTE_N, rates(), strict=True)]
        (folder / name).write_text("\n".join(["gpu_hours,pass_rate", *rows]))
    for i, name in enumerate(("mine", "a-seed0", "a-seed1", "b-seed0", "b-seed1")):
        run = folder / "runs" / name
        run.mkdir(parents=True)
        (run / "config.json").write_text(json.dumps({"name": name[0], "seed": int(i % 2 == 0)}))
        noise = {"n_prompts": 256, "n_samples": 8, "mean_p_1mp": 0.08}
        seconds = [{"generate": c * 3600, "train": 0, "idle": 0} for c in COMPUTE_N]
        rows = [
            {"step": 4 * k, "pass_rate": y, "device_seconds": seconds[k], **noise}
            for k, y in enumerate(rates())
        ]
        lines(run / "evals.jsonl", rows)
    timing = {"timing_s/step": 9e5, "perf/time_per_step": 9e5}
    verl = [
        {"step": step, "data": {**timing, "val-core/math/acc/mean@16": rate}}
        for step, rate in enumerate(rates())
    ]
    lines(folder / "verl.jsonl", verl)
    own = [{"step": step, "eval/accuracy": rate, "time/step": 9e5} for step, rate in enumerate(rates())]
    lines(folder / "log.jsonl", own)
    return folder


def lines(path, rows):
    """JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
