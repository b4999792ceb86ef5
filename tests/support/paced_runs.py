"""A run whose roles kept to known throughputs, to the second."""

import json

from scalerl.jsonl import dumps, plain
from scalerl.record.reader import RunRecord
from scalerl.rl.config.recipe import load_recipe

GENERATE, TRAIN, WAITED, OTHER = 2.0, 1.5, 0.5, 0.1
"""Seconds of a step: of both generators, and of the trainer by what it did or waited for."""
MADE = (
    *("batch.prompts=8", "batch.samples=8", "decode_slots=32", "schedule.k=0", "placement.kind=local"),
    *("placement.generators=2", "length.kind=length_penalty", "context.thinking=15", "context.answer=4"),
)
"""The recipe, as changes to `demo`."""


def write_run(folder, n=24, change=lambda row: row, cluster=None):
    """Such a run of `n` steps of 64 completions of 10 tokens; `change` may change their lines."""
    folder.mkdir()
    recipe = plain(load_recipe("demo", MADE).to_json())
    if cluster:
        recipe = {key: value for key, value in recipe.items() if key != "placement"} | {"cluster": cluster}
    config = {"name": "made", "seed": 0, "recipe": recipe, "devices": {"trainers": 1}}
    (folder / "config.json").write_text(dumps(config))
    point = {"pass_rate": 0.3, "n_prompts": 10, "n_samples": 2}
    seconds = {"generate": 1.0, "train": 1.0, "evaluate": 0.0, "idle": 0.0}
    evals = [{"step": step, "device_seconds": seconds, **point} for step in (0, 8, 16)]
    (folder / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evals))
    rows = [
        change(
            {
                "step": step,
                "groups": 8,
                "groups_used": 6,
                "completions": 64,
                "mean_length": 10.0,
                "tokens": {"generated": 640 * step, "trained": 480 * step},
                "device_seconds": {"generate": GENERATE * step, "train": TRAIN * step, "evaluate": 30.0},
                "idle_seconds": {"generate": 0.0, "train": WAITED * step},
                "wall_seconds": (TRAIN + WAITED + OTHER) * step,
            }
        )
        for step in range(1, n + 1)
    ]
    (folder / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunRecord.read(folder)
