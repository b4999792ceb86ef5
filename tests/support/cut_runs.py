"""Small runs that are cut, for tests of what becomes of them."""

import json
from pathlib import Path
from typing import Any

from record_checker import check
from small_runs import small_recipe

from scalerl.record.reader import RunRecord
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.config.settings import BatchSize, Checkpointing, Evaluation, Steps
from scalerl.rl.train import train

STEPS = 9
EVERY = 3
"""Steps between two checkpoints."""


class CutError(Exception):
    """A crash, where a watcher stands."""


def cut_at(step: int) -> Any:
    """A watcher that crashes after a step."""

    def watch(progress: Any) -> None:
        if progress.step == step and not progress.evaluated:
            raise CutError

    return watch


def recipe_of(model: Path) -> Recipe:
    """A recipe of `STEPS` steps in a second."""
    return small_recipe(
        model,
        budget=Steps(STEPS),
        batch=BatchSize(prompts=2, samples=4, micro=8),
        evaluation=Evaluation(count=3, samples=1),
        checkpoint=Checkpointing(steps=EVERY, minutes=0),
    )


def run(recipe: Recipe, path: Path, **options: Any) -> RunRecord:
    """Train it in this process alone."""
    return train(recipe, path, recipe.model, evaluate_aside=False, **options)


def lines(path: Path) -> list[Any]:
    """Of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def record_and_weights(folder: Path) -> tuple[dict[str, str], bytes]:
    """The record, times apart, and the final weights."""
    record = {}
    for name in ("evals.jsonl", "eval_prompts.jsonl", "steps.jsonl", "groups.jsonl", "samples.jsonl"):
        rows = lines(folder / name)
        for row in rows:
            for key in ("time", "device_seconds", "wall_seconds", "idle_seconds", "weight_sync"):
                row.pop(key, None)
        if name == "samples.jsonl":  # an evaluation that was given up is written after the next steps
            rows.sort(key=lambda row: (row["step"], row["source"]))  # and all else keeps its order
        record[name] = json.dumps(rows)
    return record, (folder / "checkpoints" / "final" / "model.safetensors").read_bytes()


def content(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def timeless(folder: Path, edited: bool = False) -> Any:
    """Its record and weights; the record must be sound unless the test has edited it."""
    assert edited or check(folder) == []
    skipped = [row["skipped"] for row in lines(folder / "steps.jsonl")]
    assert sum(skipped) <= len(skipped) / 2  # it was trained
    return record_and_weights(folder)
