"""Verifiers that fork, exit, replace builtins and leave processes behind: every other verdict is right."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from scalerl.rl.algo.length import ForcedInterruption
from scalerl.rl.config.optimiser import AdamW
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.config.settings import BatchSize, Context, Evaluation, Steps
from scalerl.rl.model.causal_lm import load_tokenizer
from scalerl.rl.tasks.chain import Chain
from scalerl.rl.tasks.dataset import Dataset
from scalerl.rl.tasks.verifiers import Function
from scalerl.rl.train import train
from scalerl.rl.types import Limits
from scalerl.rl.verify.supervisor import MAX_UNSTEADY
from scalerl.rl.verify.verifier import PoolVerifier

JUDGE = Path(__file__).parents[2] / "support" / "hostile_judge.py"
linux = pytest.mark.skipif(sys.platform != "linux", reason="what is left behind is found by /proc")
WRONG, RIGHT = (9,), (16,)  # the digits 0 and 7, the answer


@pytest.fixture
def start(llama_folder):
    """A function that starts a verifier by a function of the hostile judge."""
    made = []

    def make(name="judge", **limits):
        task = Dataset("unread", verifier=Function(f"{JUDGE}:{name}"))
        limits = Limits(**({"seconds": 20.0, "memory_gib": 1.0, "workers": 1} | limits))
        made.append(PoolVerifier(task, load_tokenizer(llama_folder), limits))
        return made[-1]

    yield make
    for verifier in made:
        verifier.close()


@pytest.fixture
def rollouts(make_rollout):
    """A function that makes completions from pairs of what the verifier is to do, and whether it is right."""

    def make(*pairs):
        return [
            make_rollout(1, token_T=RIGHT if right else WRONG, prompt=f"{name}/{number}")
            for number, (name, right) in enumerate(pairs)
        ]

    return make


def plain(n, seed):
    rng = random.Random(seed)
    return [("plain", rng.random() < 0.5) for _ in range(n)]


def below(pid):
    """The processes below one, by a look at all there are."""
    parents = {}
    for entry in [path for path in Path("/proc").iterdir() if path.name.isdigit()]:
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            parents.setdefault(int(parent), []).append(int(entry.name))
    found, waiting = set(), [pid]
    while waiting:
        new = parents.get(waiting.pop(), [])
        found.update(new)
        waiting += new
    return found


def gone(pid, seconds=30.0):
    """Whether a process has ended within `seconds`."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


REASONS = {
    "fork": "left",
    "fork_and_exit": None,  # the child has ended by the time that is looked for it
    "steal": "left",
    "json": "changed",
    "builtins": "changed",
    "prompt": "changed",
    "spoil": "check",
    "thread": "left",
    "daemon": "left",
}


@linux
@pytest.mark.parametrize("deed", REASONS)
def test_what_a_completion_does_to_its_process_reaches_no_other(start, rollouts, deed):
    verifier = start()
    pairs = [("plain", True), ("plain", False)]
    assert [r.correct for r in verifier.verify([rollouts(*pairs)])[0]] == [True, False]
    for number, right in enumerate((True, False)):
        pairs = [*plain(6, number), (deed, right), *plain(12, 10 + number)]
        rewards = verifier.verify([rollouts(*pairs)])[0]
        assert [reward.correct for reward in rewards] == [right for _, right in pairs]
        assert not any(reward.failed for reward in rewards)
    if REASONS[deed]:
        assert verifier.restarts[REASONS[deed]] > 0
        assert f"({REASONS[deed]})" in "".join(verifier.new_failures())
        assert verifier.new_failures() == []


@linux
def test_a_verifier_that_cannot_be_forked_is_started_anew(start, rollouts, monkeypatch):
    """It has a thread of its own from its start on; or the system is not Linux."""
    monkeypatch.setenv("HOSTILE_THREAD", "1")
    verifier = start()
    for deed in ("plain", "spoil", "daemon"):
        pairs = [("plain", True), ("plain", False), (deed, True), ("plain", False)]
        rewards = verifier.verify([rollouts(*pairs)])[0]
        assert [reward.correct for reward in rewards] == [right for _, right in pairs]
    assert not verifier.failures
    assert {"check", "left"} <= verifier.restarts.keys()


@linux
@pytest.mark.parametrize(
    ("deed", "reason"),
    [("exit", "raised"), ("leave", "died"), ("guess", "died"), ("template", "died"), ("supervisor", "died")],
)
def test_a_completion_that_ends_processes_costs_itself_alone(start, rollouts, deed, reason):
    verifier = start()
    pairs = [*plain(6, 1), (deed, True), *plain(6, 2)]
    rewards = verifier.verify([rollouts(*pairs)])[0]
    assert rewards[6].failed == reason
    assert [r.correct for i, r in enumerate(rewards) if i != 6] == [
        c for i, (_, c) in enumerate(pairs) if i != 6
    ]
    assert verifier.failures == {reason: 1}


@linux
@pytest.mark.parametrize("end", ["judged", "closed", "killed"])
def test_no_descendant_outlives_its_worker(start, rollouts, tmp_path, monkeypatch, end):
    """In a session of its own, its parent gone: once the next is judged, or the supervisor was killed."""
    pids = tmp_path / "pids"
    monkeypatch.setenv("HOSTILE_PIDS", str(pids))
    verifier = start()
    deed = "supervisor" if end == "killed" else "daemon"
    rewards = verifier.verify([rollouts((deed, True), ("plain", True))])[0]
    assert rewards[1].correct
    if end == "closed":
        verifier.close()
    daemons = [int(line) for line in pids.read_text().split()]
    assert daemons
    assert all(map(gone, daemons))
    verifier.close()
    assert not below(os.getpid()) & set(daemons)


@linux
def test_a_worker_ends_with_all_below_it_when_the_trainer_is_killed(tmp_path):
    code = f"""
import json
from dataclasses import asdict
from scalerl.rl.tasks.dataset import Dataset
from scalerl.rl.tasks.verifiers import Function
from scalerl.rl.types import Limits, Prompt
from scalerl.rl.verify.verifier_pool import SupervisedVerifiers
workers = SupervisedVerifiers(Dataset("unread", verifier=Function({f"{JUDGE}:judge"!r})), Limits(seconds=600))
print("ready", flush=True)
jobs = [json.dumps([asdict(Prompt("crowd", "", "")), [""]]).encode()] * 2
workers.submit(jobs).wait(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "ready\n"
        until = time.monotonic() + 60
        while len(found := below(trainer.pid)) < 2 * (3 + 4) and time.monotonic() < until:
            time.sleep(0.05)
        trainer.kill()
    assert len(found) >= 2 * (3 + 4)  # supervisor, template, worker, and four children of it
    assert all(map(gone, found))


@linux
def test_the_bound_on_memory_is_for_all_processes_of_a_worker_together(start, rollouts):
    verifier = start(memory_gib=0.6, seconds=60.0)
    rewards = verifier.verify([rollouts(("plain", True), ("crowd", True), ("plain", False))])[0]
    assert [reward.failed for reward in rewards] == [None, "died", None]
    assert [reward.correct for reward in rewards] == [True, False, False]
    assert "memory_gib" in verifier.examples["died"]
    assert not start(memory_gib=3.0, seconds=5.0).verify([rollouts(("plain", True))])[0][0].failed


@linux
def test_a_worker_that_waits_holds_no_memory_of_another(start, rollouts):
    """A failure is judged again by a new worker, while the first holds as much."""
    verifier = start(memory_gib=1.0)
    rewards = verifier.verify([rollouts(*plain(40, 1))])[0]
    assert not any(reward.failed for reward in rewards)
    before = verifier.restarts.copy()
    rewards = verifier.verify([rollouts(("plain", True), ("fill", True))])[0]
    assert [reward.failed for reward in rewards] == [None, "raised"]
    assert verifier.restarts == before


@linux
def test_a_program_that_a_verifier_starts_has_no_channel_of_its_worker(start, rollouts):
    verifier = start()
    rewards = verifier.verify([rollouts(*plain(4, 1), ("shell", True), *plain(4, 1), ("shell", True))])[0]
    assert not any(reward.failed for reward in rewards), verifier.examples


@linux
def test_a_template_that_was_ended_costs_one_start(start, rollouts, tmp_path, monkeypatch):
    """The worker that waits was forked from the old one, and ends with it."""
    starts = tmp_path / "starts"
    monkeypatch.setenv("HOSTILE_STARTS", str(starts))
    verifier = start()
    rewards = verifier.verify([rollouts(("template", True), *plain(40, 1))])[0]
    assert [reward.failed for reward in rewards] == ["died", *[None] * 40]
    assert "None" not in verifier.examples["died"]
    assert len({*starts.read_text().split()} - {str(os.getpid())}) == 2


@linux
def test_the_status_of_a_worker_that_was_not_forked_is_told(start, rollouts, monkeypatch):
    monkeypatch.setenv("HOSTILE_THREAD", "1")
    verifier = start()
    assert verifier.verify([rollouts(("crash", True))])[0][0].failed == "died"
    assert verifier.examples["died"].endswith("ended with status -11")


@linux
def test_a_late_answer_of_a_template_is_taken_for_no_other():
    code = f"""
import base64, contextlib, os, pickle, select, signal
from scalerl.rl.verify import forks
from scalerl.rl.tasks.dataset import Dataset
from scalerl.rl.tasks.verifiers import Function
greeting = base64.b64encode(pickle.dumps(Dataset("unread", verifier=Function({f"{JUDGE}:judge"!r}))))
wait = lambda channel, seconds: bool(select.select([channel], [], [], seconds)[0])
made = forks.Forks(greeting + b"\\n", wait, 20.0, 2**30)
one = made.fresh()
template = int(open(f"/proc/{{one.pid}}/stat").read().rpartition(")")[2].split()[1])
assert template != os.getpid()
os.kill(template, signal.SIGSTOP)
forks.START_SECONDS = 0.3
made.end(one)
forks.START_SECONDS = 120.0
with contextlib.suppress(ProcessLookupError):
    os.kill(template, signal.SIGCONT)
two = made.fresh()
if two.pid <= 0:
    os._exit(2)
prompt = {{"id": "plain/0", "text": "", "answer": "7", "messages": None}}
print(made.verify(two, (prompt, "7")).outcome["correct"])
made.close()
"""
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # with more it cannot be forked
    command, env = [sys.executable, "-c", code], os.environ | threads
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


@linux
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process that it then may not kill")
def test_a_supervisor_with_a_process_that_cannot_be_killed_comes_to_its_end():
    code = """
import os, subprocess, sys
from scalerl.rl.verify import proc
child = subprocess.Popen(["sleep", "600"])
print(child.pid, flush=True)
os.setresuid(65534, 65534, 65534)
proc.end(os.getpid(), ())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        child = int(supervisor.stdout.readline())
        try:
            assert supervisor.wait(60) == 1
        finally:
            supervisor.kill()
            os.kill(child, signal.SIGKILL)


def test_workers_are_renewed_and_counted(start, rollouts):
    verifier = start()
    pairs = plain(2500, 1)
    rewards = verifier.verify([rollouts(*pairs)])[0]
    assert [reward.correct for reward in rewards] == [right for _, right in pairs]
    assert verifier.restarts.keys() == {"age"}
    assert verifier.restarts["age"] >= 2


def test_a_verifier_that_is_not_steady_is_said_to_be_and_comes_to_an_end(start, rollouts):
    verifier = start("judge_at_random")
    for seed in range(40):
        assert len(verifier.verify([rollouts(*plain(40, seed))])[0]) == 40
        if verifier.restarts["unsteady"] == MAX_UNSTEADY:
            break
    assert verifier.restarts["unsteady"] == MAX_UNSTEADY
    verifier.verify([rollouts(*plain(40, 0))])  # every one by a worker of its own
    assert verifier.restarts["unsteady"] == MAX_UNSTEADY
    assert "does not give one answer the same verdict twice" in "".join(verifier.new_failures())
    assert not verifier.failures


# -- in a run --------------------------------------------------------------------------------------------


def trained(folder, model, function, steps, heldout):
    """The record of a run whose completions are judged by a function of the hostile judge."""
    chain = Chain(k_max=2, heldout_per_length=20)
    path = folder.with_suffix(".jsonl")
    lines = [json.dumps({"prompt": p.text, "answer": p.answer}) for p in chain.prompts("train")[:200]]
    path.write_text("\n".join(lines) + "\n")
    task = Dataset(
        str(path),
        verifier=Function(f"{JUDGE}:{function}"),
        heldout=heldout,
        chat_template=False,
        limits=Limits(seconds=60.0, workers=min(steps // 4, 2)),
    )
    recipe = Recipe(
        model=str(model),
        task=task,
        budget=Steps(steps),
        batch=BatchSize(prompts=2, samples=4, micro=8),
        context=Context(prompt=6, thinking=4, answer=3),
        length=ForcedInterruption(low=4, high=4, phrase="! </think>"),
        optimiser=AdamW(lr=1e-3, warmup_steps=2),
        evaluation=Evaluation(count=2, samples=4),
        decode_slots=16,
    )
    return train(recipe, folder, model, evaluate_aside=steps > 10)


def rows(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def verdicts(folder):
    """What is recorded of verdicts: groups by their fate and correct completions, evaluations by prompt."""
    groups = [(r["step"], r["prompt"], r["fate"], r["correct"], r["n"]) for r in rows(folder, "groups.jsonl")]
    failed = [sum(row["failed"].values()) for row in rows(folder, "steps.jsonl")]
    shares = [(row["step"], row["failed"]) for row in rows(folder, "evals.jsonl")]
    return groups, rows(folder, "eval_prompts.jsonl"), failed, shares


@linux
@pytest.mark.parametrize(("steps", "heldout"), [(4, 5), pytest.param(100, 20, marks=pytest.mark.slow)])
def test_every_verdict_of_a_run_with_a_hostile_verifier_is_that_of_an_honest_one(
    tmp_path, small_base, steps, heldout
):
    """One seed gives one run, as long as all verdicts are the same; the honest function is the truth."""
    names = ("judge_by_text", "judge_honestly")
    for name in names:
        trained(tmp_path / name, small_base, name, steps, heldout)
    hostile, honest = (verdicts(tmp_path / name) for name in names)
    assert hostile == honest
    groups, evaluations, failed, _ = hostile
    assert len(groups) == steps
    assert len(evaluations) >= 2
    reasons = Counter[str]()
    for row in rows(tmp_path / "judge_by_text", "steps.jsonl"):
        reasons.update(row["failed"])
    print(f"\n{8 * steps} completions, failed {dict(reasons)}")
    if steps == 100:
        assert reasons.keys() == {"raised", "died"}
        assert sum(failed) > 20
