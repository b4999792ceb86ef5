"""A run whose parts kept to known rates, to the second."""

import json

import numpy as np

from scalerl.record.reader import RunRecord

BASE, ROW, PROMPT_TOKEN, POSITION = 0.02, 3e-4, 1e-4, 2e-6


def write_run(folder, n=24, change=lambda row: row):
    """Such a run, at the rates above, of `n` steps; `change` may change their lines."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"name": "made", "seed": 0}))
    point = {"pass_rate": 0.3, "n_prompts": 10, "n_samples": 2}
    seconds = {"generate": 1.0, "train": 1.0, "evaluate": 0.0, "idle": 0.0}
    evals = [{"step": step, "device_seconds": seconds, **point} for step in (0, 8, 16)]
    (folder / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evals))
    decode_FF, rows = np.zeros((5, 5)), []
    train = waited = verify = time = 0.0
    trained = 0
    for step in range(1, n + 1):
        for _ in range(20):
            used, read, attended = rng.integers(1, 65), rng.integers(0, 3) * 12, rng.integers(100, 9000)
            took = BASE + ROW * used + PROMPT_TOKEN * read + POSITION * attended
            what_F = np.array([1.0, used, read, attended, took])
            decode_FF = decode_FF + np.outer(what_F, what_F)
        tokens = int(rng.integers(500, 1500))
        trained += tokens
        train += 0.4 + 2e-3 * tokens
        waited += 0.5
        verify += 0.064
        time += 0.4 + 2e-3 * tokens + 0.5 + 0.064 + 0.1
        row = {
            "step": step,
            "time": 1e9 + time,
            "groups": 8,
            "groups_used": 6,
            "completions": 64,
            "tokens": {"generated": 0, "trained": trained},
            "device_seconds": {"generate": 0.0, "train": train, "evaluate": 30.0, "idle": 0.0},
            "idle_seconds": {"generate": 0.0, "train": waited},
            "pace": {
                "verify_seconds": verify,
                "installs": step,
                "install_seconds": 0.03 * step,
                "decode": decode_FF[np.triu_indices(5)].tolist(),
                "lengths": np.linspace(5, 45, 21).tolist(),
                "within": 0.6,
                "prompt": 12.0,
            },
        }
        rows.append(change(row))
    (folder / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunRecord.read(folder)
