"""The logs behind the examples of the documentation: a run of each trainer, as it or its tracker writes it.

Every run has the same curve over 240 steps and an evaluation before the first and after every tenth step.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import shutil
import sqlite3
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from scalerl.curve import LOG_LOGISTIC, Curve

EXAMPLES = Path(__file__).parents[2] / "examples"
CURVE = Curve(LOG_LOGISTIC, 0.61, 1.9, 60.0, 0.35)
"""Over steps."""
LAST, EVERY, SECONDS, START = 240, 10, 900.0, 1.76e9
"""Steps, steps between evaluations, seconds of a step, Unix seconds of the first one."""

Row = dict[str, float]


def steps(seed: int = 0, curve: Curve = CURVE, last: int = LAST) -> Iterator[tuple[int, dict[str, float]]]:
    """Of every step the quantities that trainers log; `held_out` where there is an evaluation."""
    rng = np.random.default_rng(seed)
    for step in range(last + 1):
        rate = float(curve(np.array(float(step))))
        row: Row = {} if step % EVERY else {"held_out": round(rate + float(rng.normal(0, 0.004)), 4)}
        if step:
            row |= {"reward": round(rate + float(rng.normal(0.03, 0.02)), 4), "seconds": SECONDS}
            row |= {"tokens": 2_000_000.0 + float(rng.integers(0, 1000)), "samples": 1024.0}
            row |= {"truncated": round(0.03 + step / 1e5, 5), "entropy": round(0.4 - step / 1e4, 4)}
        yield step, row


def renamed(names: dict[str, str], **options: Any) -> Iterator[tuple[int, Row]]:
    """The same under the names of a trainer; what it does not log is left out."""
    for step, row in steps(**options):
        yield step, {names[key]: value for key, value in row.items() if key in names}


def jsonl(path: Path, rows: Iterator[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


TRL = {
    **{"held_out": "eval_rewards/accuracy_reward/mean", "reward": "rewards/accuracy_reward/mean"},
    **{"seconds": "step_time", "truncated": "completions/clipped_ratio", "entropy": "entropy"},
}


def trl(seed: int = 0) -> None:
    """Checkpoint folders of the Trainer, of which the last one holds the whole log."""
    history, tokens = [], 0.0
    for (step, row), (_, known) in zip(renamed(TRL, seed=seed), steps(seed), strict=True):
        held_out = {key: row.pop(key) for key in [TRL["held_out"]] if key in row}
        if row:
            tokens += known["tokens"]
            history.append({"step": step, "num_tokens": tokens, **row})
        if held_out:
            history.append({"step": step, "eval_loss": 0.0, **held_out})
    folder = Path("outputs/checkpoint-240")
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": LAST, "log_history": history}))


def verl() -> None:
    """Its file logger, with logger=["console", "file"]."""
    names = {
        "held_out": "val-core/math/acc/mean@16",
        "reward": "critic/score/mean",
        "seconds": "timing_s/step",
    }
    names |= {"tokens": "perf/total_num_tokens", "truncated": "response_length/clip_ratio"}
    names |= {"entropy": "actor/entropy"}
    jsonl(Path("my_project/my_run.jsonl"), ({"step": s, "data": row} for s, row in renamed(names)))


def prime_rl() -> None:
    """metrics.jsonl of its file monitor."""
    names = {
        "held_out": "eval/aime24/effective/agent/avg@16",
        "seconds": "time/step",
        "tokens": "progress/tokens",
    }
    names |= {"reward": "train/agg/effective/agent/reward/mean", "entropy": "entropy/all/mean"}
    names |= {"truncated": "train/agg/effective/agent/is_truncated/mean"}
    path = Path("outputs/my-run/metrics.jsonl")
    jsonl(path, ({"step": s, "time": START + s * SECONDS, **row} for s, row in renamed(names)))


def pipeline_rl() -> None:
    """The actor's run in W&B: it has versions in place of steps, and the time of day in place of seconds."""
    names = {"held_out": "actor/test_success_mean", "reward": "actor/success_mean"}
    names |= {"truncated": "actor/overflow_mean"}
    rows = ((step, row | {"actor/trainer_model_version": 1024.0 * step}) for step, row in renamed(names))
    wandb(Path("wandb/offline-run-20260801_120000-my_exp_actor"), "my_exp/actor", rows, {})
    names = {
        "seconds": "throughput/sec_per_step",
        "tokens": "throughput/tokens_per_step",
        "entropy": "rl/entropy",
    }
    wandb(Path("wandb/offline-run-20260801_120003-my_exp_finetune"), "my_exp/finetune", renamed(names), {})


def skyrl() -> None:
    """trainer.logger="tensorboard"."""
    names = {"held_out": "eval/all/avg_score", "reward": "reward/avg_raw_reward", "seconds": "timing/step"}
    names |= {"samples": "generate/batch_num_seq", "entropy": "policy/policy_entropy"}
    tensorboard(Path("tensorboard_log"), renamed(names))


def openrlhf() -> None:
    """--logger.tensorboard_dir; no evaluation before the first step."""
    names = {"held_out": "eval/eval_math_pass1", "reward": "train/rollout/reward_mean"}
    names |= {"seconds": "train/timing/step_total", "samples": "train/rollout/num_samples"}
    names |= {"truncated": "train/rollout/truncated_rate"}
    tensorboard(Path("tb/my_run"), ((s, row) for s, row in renamed(names) if s))


def slime() -> None:
    """What it prints: rollouts from 0, evaluations after a rollout, and one before the first."""
    head, lines = "[2026-08-21 17:14:19] rollout_metrics.py:247 - ", []
    for step, row in steps():
        n = max(step - 1, 0)
        if step:
            rollout = {"rollout/raw_reward": row["reward"], "rollout/response_lengths": 1953.1}
            lines += [
                f"perf {n}: { {'rollout/truncated_ratio': row['truncated'], 'perf/rollout_time': 200.0} }",
                f"rollout {n}: {rollout}",
                f"step {n}: { {'train/pg_loss': -0.01, 'train/entropy_loss': row['entropy']} }",
                f"perf {n}: { {'perf/step_time': row['seconds'], 'perf/wait_time_ratio': 0.6} }",
            ]
        if "held_out" in row:
            lines.append(f"eval {n}: { {'eval/aime': row['held_out'], 'eval/aime-truncated_ratio': 0.03} }")
    Path("run.log").write_text("".join(f"{head}{line}\n" for line in lines))


def nemo_rl() -> None:
    """logger.tensorboard_enabled: validation is in the seconds of its step."""
    names = {"held_out": "validation/accuracy", "reward": "train/reward", "entropy": "train/approx_entropy"}
    names |= {"seconds": "timing/train/total_step_time", "tokens": "train/total_num_tokens"}
    names |= {"truncated": "train/truncation_rate"}
    rows = []
    for step, row in renamed(names):
        if step and step % EVERY == 0:
            row["timing/train/total_step_time"] += 240.0
            row["timing/validation/total_validation_time"] = 240.0
        rows.append((step, row))
    tensorboard(Path("logs/exp_001/tensorboard"), iter(rows))


def open_instruct() -> None:
    """Offline W&B; scores are multiples of verification_reward."""
    names = {"held_out": "eval/scores", "reward": "scores", "seconds": "time/total"}
    names |= {"tokens": "val/num_step_tokens", "entropy": "policy/entropy_avg"}
    rows = []
    for step, row in renamed(names):
        scaled = {key: 10 * value for key, value in row.items() if key.endswith("scores")}
        rows.append((step, {"training_step": float(step), **row, **scaled}))
    config = {"verification_reward": 10.0}
    wandb(Path("wandb/offline-run-20260801_120000-a1b2c3d4"), "grpo_math", iter(rows), config)


ANY = {
    **{"held_out": "eval/accuracy", "reward": "reward", "seconds": "step_time"},
    **{"tokens": "tokens_per_step", "truncated": "truncated", "entropy": "entropy"},
}
"""Names of a trainer of nobody's."""


def wandb_run() -> None:
    wandb(Path("wandb/offline-run-20260801_120000-a1b2c3d4"), "my-run", renamed(ANY), {"n_gpus": 8})


def tensorboard_run() -> None:
    tensorboard(Path("runs/my-run"), renamed(ANY))


def mlflow() -> None:
    """The file store."""
    run = Path("mlruns/1/0123456789abcdef0123456789abcdef")
    (run / "metrics" / "eval").mkdir(parents=True)
    (run / "params").mkdir()
    (run / "params" / "n_gpus").write_text("8")
    (run.parent / "meta.yaml").write_text("experiment_id: '1'\nname: rl\n")
    (run / "meta.yaml").write_text("lifecycle_stage: active\nrun_name: my-run\nstatus: 3\n")
    lines: dict[str, list[str]] = {}
    for step, row in renamed(ANY):
        for name, value in row.items():
            at = int(1000 * (START + step * SECONDS))
            lines.setdefault(name, []).append(f"{at} {value} {step}\n")
    for name, rows in lines.items():
        (run / "metrics" / name).write_text("".join(rows))


def trackio() -> None:
    """A project's database."""
    columns = "id INTEGER PRIMARY KEY, run_id TEXT, timestamp TEXT, run_name TEXT, step INTEGER, metrics TEXT"
    Path("trackio").mkdir()
    with closing(sqlite3.connect("trackio/my-project.db")) as database, database:
        database.execute(f"CREATE TABLE metrics ({columns})")
        for step, row in renamed({**ANY, "held_out": "eval/pass_rate"}):
            at = np.datetime64(int(START + step * SECONDS), "s").astype(str)
            cells = ("one", f"{at}+00:00", "my-run", step, json.dumps(row))
            query = "INSERT INTO metrics (run_id, timestamp, run_name, step, metrics) VALUES (?, ?, ?, ?, ?)"
            database.execute(query, cells)


def harness() -> None:
    """Results of lm-evaluation-harness, of every second evaluation, and the log of verl."""
    verl()
    held_out = [(step, row["held_out"]) for step, row in steps() if "held_out" in row]
    for step, rate in held_out[::2]:
        model = f"out/checkpoint-{step}"
        folder = Path("results", model.replace("/", "__"))
        folder.mkdir(parents=True)
        found = {
            "results": {"gsm8k": {"exact_match,strict-match": rate}},
            "n-samples": {"gsm8k": {"original": 1319, "effective": 1319}},
            "config": {"model": "vllm", "model_args": {"pretrained": model}},
            "model_name": model,
        }
        (folder / "results_2026-08-01T12-00-00.json").write_text(json.dumps(found))


def tables() -> None:
    """A table of one's own."""
    table("log.csv")


def table(path: str, seed: int = 0, curve: Curve = CURVE, last: int = LAST) -> None:
    """Columns gpu_hours and pass_rate."""
    rows = [
        (s * SECONDS * 8 / 3600, row["held_out"]) for s, row in steps(seed, curve, last) if "held_out" in row
    ]
    Path(path).write_text("gpu_hours,pass_rate\n" + "".join(f"{c:g},{y}\n" for c, y in rows))


def recipes() -> None:
    """Three seeds of two recipes, and a sweep of four that stands at the same compute."""
    for seed in range(3):
        table(f"base-{seed}.csv", seed)
        table(f"new-{seed}.csv", seed + 10, replace(CURVE, A=0.68))
    for place, (A, C_mid) in enumerate([(0.61, 60.0), (0.55, 60.0), (0.68, 60.0), (0.5, 50.0)]):
        table(f"arm-{place}.csv", place, replace(CURVE, A=A, C_mid=C_mid), last=180)


def runs() -> None:
    """The tables in examples/runs."""
    for path in (EXAMPLES / "runs").glob("*.csv"):
        shutil.copy(path, ".")


def nothing() -> None:
    """No log: the page makes its own."""


def tensorboard(folder: Path, rows: Iterator[tuple[int, Row]]) -> None:
    """Event files, by the library that writes them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.utils.tensorboard.writer import SummaryWriter
    with SummaryWriter(str(folder)) as writer:
        for step, row in rows:
            for name, value in row.items():
                writer.add_scalar(name, value, step, walltime=START + step * SECONDS)


BLOCK = 32768


def wandb(folder: Path, name: str, rows: Iterator[tuple[int, Row]], config: dict[str, Any]) -> None:
    """A run's file as W&B writes it when offline: its messages, in blocks."""
    from wandb.proto import wandb_internal_pb2

    pb: Any = wandb_internal_pb2  # its messages are made when it is imported
    run_id = folder.name.rpartition("-")[2]
    head = pb.Record(num=1)
    head.run.run_id, head.run.display_name, head.run.start_time.seconds = run_id, name, int(START)
    for key, value in config.items():
        head.run.config.update.add(key=key, value_json=json.dumps(value))
    records = [head.SerializeToString()]
    for call, (step, row) in enumerate(rows):
        record = pb.Record(num=call + 2)
        for key, value in {**row, "_step": call, "_timestamp": START + step * SECONDS}.items():
            item = record.history.item.add(value_json=json.dumps(value))
            item.nested_key.append(key)
        record.history.step.num = call
        records.append(record.SerializeToString())
    folder.mkdir(parents=True)
    (folder / f"run-{run_id}.wandb").write_bytes(in_blocks(records))


def in_blocks(records: list[bytes]) -> bytes:
    """Records in W&B's blocks: each chunk has a checksum, its size, and which part of a record it is."""
    out = bytearray(b":W&B\xe1\xbe\x00")
    for record in records:
        first = True
        while first or record:
            if BLOCK - len(out) % BLOCK < 7:
                out += bytes(BLOCK - len(out) % BLOCK)
            room = BLOCK - len(out) % BLOCK - 7
            part, record = record[:room], record[room:]
            kind = (1 if first else 4) if not record else (2 if first else 3)
            out += struct.pack("<IHB", zlib.crc32(bytes([kind]) + part), len(part), kind) + part
            first = False
    return bytes(out)


def fourteen() -> None:
    """The evaluations of examples/fit_a_log.py."""
    with contextlib.redirect_stdout(io.StringIO()):
        found = runpy.run_path(str(EXAMPLES / "fit_a_log.py"))
    rows = zip(found["gpu_hours"], found["pass_rate"], strict=True)
    lines = [f"{compute},{rate}" for compute, rate in rows]
    Path("log.csv").write_text("\n".join(["gpu_hours,pass_rate", *lines]))


MAKERS: dict[str, Callable[[], None]] = {
    **{"trl": trl, "verl": verl, "prime-rl": prime_rl, "pipeline-rl": pipeline_rl, "skyrl": skyrl},
    **{"openrlhf": openrlhf, "nemo-rl": nemo_rl, "open-instruct": open_instruct, "wandb": wandb_run},
    **{"tensorboard": tensorboard_run, "mlflow": mlflow, "trackio": trackio, "tables": tables},
    **{"harness": harness},
    **{"slime": slime, "recipes": recipes, "runs": runs, "fourteen": fourteen, "nothing": nothing},
}
"""By the names that pages give them; each writes into the current folder."""
