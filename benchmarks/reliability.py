"""Runs that are killed, starved and lied to, and what becomes of their records.

    python benchmarks/reliability.py inline --kills 30      kill -9 of the whole group at random moments
    python benchmarks/reliability.py local --kills 30       the same with generators in processes of their own
    python benchmarks/reliability.py generators --kills 20  kill -9 of generators in the middle of one run
    python benchmarks/reliability.py evaluators --kills 30  kill -9 of the process that evaluates
    python benchmarks/reliability.py verifiers              5 % of the verifications hang, 5 % raise
    python benchmarks/reliability.py disk                   no room for checkpoints, then room again

Each prints what it found and ends with status 1 where something was lost, or where the run was over before
all kills were made. The runs are the demo's recipe.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).parents[1] / "tests" / "support"
TIMES = ("time", "device_seconds", "wall_seconds", "idle_seconds")
STEPS = {"inline": 1200, "local": 1800, "generators": 2400, "evaluators": 2400, "verifiers": 10, "disk": 120}
"""Training steps of each case: enough for all its kills."""
SHORT = {
    "budget.kind": "steps",
    "evaluation.count": 12,
    "evaluation.samples": 1,
    "checkpoint.steps": 5,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        sound = CASES[args.case](Path(folder), args.kills, random.Random(args.seed))
        print(f"{args.case}: {'sound' if sound else 'NOT SOUND'} after {time.monotonic() - started:.0f} s")
    raise SystemExit(not sound)


# -- the trainer is killed ---------------------------------------------------------------------------------


def inline(folder: Path, kills: int, rng: random.Random) -> bool:
    """Check that the record and the final weights equal those of an undisturbed run."""
    _run(_train(folder / "whole", "inline"))
    killed = _killed_and_resumed(folder / "cut", "inline", kills, rng)
    same = {name: _timeless(folder / "cut" / name) == _timeless(folder / "whole" / name) for name in _FILES}
    weights = "checkpoints/final/model.safetensors"
    same[weights] = (folder / "cut" / weights).read_bytes() == (folder / "whole" / weights).read_bytes()
    for name, equal in same.items():
        print(f"  {name}: {'equal, times apart' if equal else 'DIFFERENT'}")
    return all(same.values()) and _sound(folder / "cut") and killed == kills


def local(folder: Path, kills: int, rng: random.Random) -> bool:
    """Check that the record is sound, with each group in it once."""
    killed = _killed_and_resumed(folder / "cut", "local", kills, rng, "placement.kind=local")
    return _sound(folder / "cut") and killed == kills


def _killed_and_resumed(folder: Path, case: str, kills: int, rng: random.Random, *changes: str) -> int:
    done, steps = 0, []
    while done < kills:
        process = subprocess.Popen(
            _train(folder, case, *changes),
            process_group=0,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if done % 10 < 9:  # kill while training; every tenth time while starting
            until = (steps[-1] if steps else 0) + rng.randint(1, STEPS[case] // kills)
            while process.poll() is None and _last_step(folder) < until:
                time.sleep(0.05)
        time.sleep(rng.uniform(0, 0.2 if done % 10 < 9 else 6))
        if process.poll() is not None:
            break  # the run ended before the kill
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        done += 1
        steps.append(_last_step(folder))
    _run(_train(folder, case, *changes))
    lost = [row["lost"]["steps"] for row in _rows(folder / "lost.jsonl") if "lost" in row]
    print(f"  killed {done} times, after the steps {steps}; steps run again: {sum(lost)} of {STEPS[case]}")
    return done


def _settings(case: str, *changes: str) -> list[str]:
    return [f"{key}={value}" for key, value in SHORT.items()] + [f"budget.amount={STEPS[case]}", *changes]


def _train(folder: Path, case: str, *changes: str) -> list[str]:
    settings = _settings(case, *changes)
    options = [part for setting in settings for part in ("--set", setting)]
    return [sys.executable, "-m", "scalerl", "train", "demo", "-o", str(folder), "--resume", *options]


def _run(command: list[str]) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with {ended.returncode}:\n{ended.stderr}")


# -- its workers are killed or fail ------------------------------------------------------------------------


def generators(folder: Path, kills: int, rng: random.Random) -> bool:
    """Check that the run continues to its end with every group accounted for."""
    settings = _settings("generators", "placement.kind=local", "placement.generators=2")
    # Pauses are longer than a start takes.
    killed, record = _killing("generator", 2, kills, lambda: rng.uniform(5, 8), folder / "run", settings)
    last = record.steps()[-1]
    print(f"  {killed} generators killed in {last['step']} steps; groups restarted: {last['restarted']}")
    return killed == kills and last["step"] == STEPS["generators"] and _sound(folder / "run")


def evaluators(folder: Path, kills: int, rng: random.Random) -> bool:
    """Check that every evaluation is made and equals that of an undisturbed run."""
    settings = _settings("evaluators", "evaluation.count=60", "evaluation.samples=8")
    whole = _in_this_process(folder / "whole", settings)
    # Between two kills an evaluation must finish, as losing a third worker in a row ends a run.
    made = -1

    def due() -> bool:
        nonlocal made
        before, made = made, _lines(folder / "run" / "evals.jsonl")
        return made > before

    killed, record = _killing(
        "evaluation", 1, kills, lambda: rng.uniform(0, 3), folder / "run", settings, due
    )
    equal = [[e.pass_rate for e in r.evals] for r in (whole, record)]
    print(
        f"  {killed} evaluators killed; {len(record.evals)} evaluations, pass rates as of a whole run: ",
        end="",
    )
    print(equal[0] == equal[1])
    return killed == kills and equal[0] == equal[1] and _sound(folder / "run")


def _killing(
    name: str,
    number: int,
    kills: int,
    pause: Callable[[], float],
    folder: Path,
    settings: list[str],
    due: Callable[[], bool] = lambda: True,
) -> tuple[int, Any]:
    """Train in this process; after each pause kill one of `number` processes called `name` if `due`."""
    import multiprocessing

    done = threading.Event()
    killed = 0

    def kill() -> None:
        nonlocal killed
        while killed < kills and not done.wait(pause()):
            processes = [p for p in multiprocessing.active_children() if p.name == name]
            if len(processes) == number and due():
                processes[killed % number].kill()
                killed += 1

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        record = _in_this_process(folder, settings)
    finally:
        done.set()
        thread.join()
    return killed, record


VERIFIER = '''
import hashlib, time

def judge(prompt, text):
    """Right if the answer follows the thinking; one in twenty hangs, and one in twenty raises."""
    fate = hashlib.sha256((prompt.id + text).encode()).digest()[0] / 256
    if fate < 0.05:
        time.sleep(3600)
    if fate < 0.10:
        raise RuntimeError("no verdict")
    return text.endswith("</think>" + prompt.answer)
'''


def verifiers(folder: Path, kills: int, rng: random.Random) -> bool:
    """Check that a failed verification costs only its completion and is counted."""
    from scalerl.rl.config.recipe import load_recipe
    from scalerl.rl.tasks.dataset import Dataset
    from scalerl.rl.tasks.verifiers import Function
    from scalerl.rl.types import Limits

    (folder / "judge.py").write_text(VERIFIER)
    chain = load_recipe("demo").task
    with (folder / "prompts.jsonl").open("w") as file:
        for prompt in chain.prompts("train")[:400]:
            file.write(json.dumps({"prompt": prompt.text, "answer": prompt.answer}) + "\n")
    task = Dataset(
        str(folder / "prompts.jsonl"),
        verifier=Function(f"{folder / 'judge.py'}:judge"),
        heldout=50,
        chat_template=False,
        limits=Limits(seconds=0.5, workers=8),
    )
    settings = _settings("verifiers", "batch.prompts=4", "evaluation.count=2")
    record = _in_this_process(folder / "run", settings, task)
    failed: Counter[str] = Counter()
    for row in record.steps():
        failed.update(row["failed"])
    total = sum(row["groups"] for row in record.steps()) * 16
    print(f"  {total} completions; failed verifications: {dict(failed)}")
    shares = [failed["timeout"] / total, failed["raised"] / total]
    return all(0.01 < share < 0.1 for share in shares) and _sound(folder / "run")


def disk(folder: Path, kills: int, rng: random.Random) -> bool:
    """Check that training without room for a checkpoint continues, says so, and can be resumed."""
    _run(_train(folder / "base", "disk", "budget.amount=1"))  # makes the base model if there is none yet
    command = _train(folder / "run", "disk", "checkpoint.steps=10")

    def no_room() -> None:  # files of more than 100 kB: checkpoints; the record's lines are smaller
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

    ended = subprocess.run(command, capture_output=True, text=True, preexec_fn=no_room, check=False)
    told = ended.stderr.count("goes on without this checkpoint")
    last = ended.stderr.strip().splitlines()[-1]
    print(f"  status {ended.returncode}; checkpoints that failed and were told: {told}; last line: {last}")
    left = sorted(p.name for p in (folder / "run" / "checkpoints").iterdir())
    print(f"  left in checkpoints/: {left}")
    _run(command)
    return told > 0 and ended.returncode == 2 and not left and _sound(folder / "run")


def _in_this_process(folder: Path, settings: list[str], task: Any = None) -> Any:
    from scalerl.rl.config.recipe import load_recipe
    from scalerl.rl.model.named import find_model
    from scalerl.rl.train import train

    recipe = load_recipe("demo", settings)
    model, _ = find_model(recipe, lambda progress: None)
    return train(replace(recipe, task=task) if task else recipe, folder, model)


# -- what is checked ---------------------------------------------------------------------------------------

_FILES = ("config.json", "evals.jsonl", "eval_prompts.jsonl", "steps.jsonl", "groups.jsonl")


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _timeless(path: Path) -> str:
    if path.suffix == ".json":
        return path.read_text()
    rows = [{k: v for k, v in row.items() if k not in TIMES} for row in _rows(path)]
    for row in rows:
        if sync := row.get("weight_sync"):
            row["weight_sync"] = sync["bytes"]
    return json.dumps(rows)


def _last_step(folder: Path) -> int:
    return _lines(folder / "steps.jsonl")


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _sound(folder: Path) -> bool:
    """Return whether the tests' checker finds the record to follow docs/reference/run-folder.md."""
    checker = [sys.executable, "-m", "record_checker", str(folder.resolve())]
    found = subprocess.run(checker, cwd=SUPPORT, capture_output=True, text=True, check=False)
    fates = Counter(fate for row in _rows(folder / "groups.jsonl") for fate in row["fate"])
    print(f"  {_last_step(folder)} steps, {fates.total()} groups {dict(fates)}; the record is")
    print("".join(f"    {line}\n" for line in (found.stdout + found.stderr).splitlines()), end="")
    return found.returncode == 0


CASES = {case.__name__: case for case in (inline, local, generators, evaluators, verifiers, disk)}

if __name__ == "__main__":
    main()
