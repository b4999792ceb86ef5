"""A run on a mixture of two tasks, with a suite beside them, as files of a run folder."""

import json
from pathlib import Path

import numpy as np

N = 31


def write_mixed(folder: Path, seed: int = 1, middle: float = 20.0, lr: float = 1e-5) -> Path:
    """Write a run of 300 prompts of each task: `hard` goes to .8, half of it at step `middle`; `easy` stands.

    The suite `aime` has 30 prompts. Its recipe is `lr`.
    """
    draw = np.random.default_rng(seed)
    folder.mkdir()
    lines = {"evals": [], "eval_prompts": [], "downstream": []}
    for i in range(N):
        step = 8 * i
        compute = {"flops": {"generate": step * 1e9, "train": step * 2e9}, "version": step}
        p = 0.1 + 0.7 / (1 + (middle / max(step, 1e-9)) ** 2)
        hard, easy, aime = draw.binomial(8, p, 300), draw.binomial(8, 0.9, 300), draw.binomial(8, p / 2, 30)
        ids = [f"{name}/{j}" for name in ("hard", "easy") for j in range(300)]
        both = np.concatenate([hard, easy])
        row = {"step": step, "n_samples": 8, "mean_p_1mp": 0.15, **compute}
        lines["evals"].append(row | {"pass_rate": both.mean() / 8, "n_prompts": 600})
        lines["eval_prompts"].append(
            {"step": step, "prompt_set": "s", "n": 8, "id": ids, "correct": both.tolist()}
        )
        if i % 3 == 0:
            rate = {"suite": "aime", "pass_rate": aime.mean() / 8, "n_prompts": 30}
            lines["downstream"].append(row | rate | {"correct": aime.tolist(), "id": list(range(30))})
    for name, rows in lines.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"kind": "mix", "tasks": {"hard": {}, "easy": {}}}
    suite = {"downstream": [{"name": "aime", "task": {"kind": "chain"}}]}
    recipe = {"task": task, "evaluation": suite, "lr": lr}
    config = {"name": folder.name, "recipe": recipe, "budget": {"kind": "flops"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
