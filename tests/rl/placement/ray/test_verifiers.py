"""Verification in actors: the outcomes are those of processes beside the driver, whoever is lost."""

import logging
import os
import signal
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice

import numpy as np
import psutil
import pytest
from ray_nodes import Run, simulated, until

from scalerl.errors import InputError
from scalerl.rl.config.cluster import Cluster, Fsdp2
from scalerl.rl.model.causal_lm import load_tokenizer
from scalerl.rl.placement.ray.parts import RayVerifier
from scalerl.rl.tasks.dataset import Dataset
from scalerl.rl.tasks.verifiers import Function
from scalerl.rl.types import Limits, Reward
from scalerl.rl.verify.verifier import PoolVerifier
from scalerl.rl.workers.ray.session import Session
from scalerl.rl.workers.timeline import Timeline

CODE = '''
import os, time

def judge(prompt, text):
    """As the id of the prompt asks for."""
    if prompt.id == "raises":
        raise KeyError("no")
    while prompt.id == "waits" and not os.path.exists(prompt.answer):
        time.sleep(0.01)
    return len(text) % 2 == 0
'''


@pytest.fixture(scope="module")
def nodes():
    with simulated(2, 2, 2) as three:
        yield three


@pytest.fixture
def task(tmp_path):
    path = tmp_path / "code.py"
    path.write_text(CODE)
    return Dataset("unread", verifier=Function(f"{path}:judge"), limits=Limits(seconds=120.0, workers=1))


@pytest.fixture
def start(recipe, small_base):
    """A function that starts two verifiers for a task."""
    made = []

    def make(task):
        cluster = Cluster(generators=1, verifiers=2, timeouts=recipe.cluster.timeouts)
        recipe_ = replace(recipe, task=task, cluster=cluster)
        session = Session(cluster)
        made.append(session)
        made.append(RayVerifier(recipe_, str(small_base), session, Timeline()))
        return made[-1]

    yield make
    for part in reversed(made):
        part.close()


def asking(make_rollout, name, answer, length=3):
    rollout = make_rollout(length=length, prompt=name)
    return replace(rollout, prompt=replace(rollout.prompt, answer=answer))


@pytest.mark.slow
def test_rewards_and_failures_are_those_of_processes_beside_the_driver(
    nodes, task, start, make_rollout, small_base
):
    groups = [[make_rollout(length=1 + i + j, prompt=f"p{i}") for j in range(4)] for i in range(9)]
    groups[2][1] = make_rollout(prompt="raises")
    groups[5][3] = make_rollout(truncated=True)
    here, there = PoolVerifier(task, load_tokenizer(small_base), task.limits), start(task)
    for _ in range(2):
        assert there.verify(groups) == here.verify(groups)
    assert there.verify([]) == []
    here.close()
    assert there.failures == here.failures == {"raised": 2}
    assert there.new_failures() == here.new_failures() != []
    assert len({worker.process.node for worker in there.pool._workers}) == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, None])
def test_a_verifier_that_is_lost_is_replaced_and_its_share_is_judged_by_another(
    nodes, task, start, make_rollout, tmp_path, caplog, number
):
    """Killed while it judges; or its node dies."""
    free = tmp_path / "free"
    verifier = start(task)
    groups = [[asking(make_rollout, "waits", str(free), length) for length in (2, 3)] for _ in range(8)]
    judging = verifier.start(groups)
    worker = verifier.pool._workers[0]
    pid, node = worker.process.pid, worker.process.node
    children = until(lambda: psutil.Process(pid).children(recursive=True))
    assert not judging.wait(0.5)
    with caplog.at_level(logging.WARNING, logger="scalerl"):
        if number is None:
            nodes.kill_node_of(node)
        else:
            os.kill(pid, number)
        until(lambda: judging.wait(0.1) or verifier.pool.lost)
        if number is None:
            nodes.add(2)
    free.touch()
    assert until(lambda: judging.wait(1.0))
    assert judging.result() == [[Reward(1.0, True), Reward(-1.0, False)]] * 8  # a token is a character
    assert "verifier 0 on " + node in verifier.pool.lost[0]
    assert caplog.records[0].getMessage() == verifier.pool.lost[0] + "; others verify what it was given"
    until(lambda: not any(child.is_running() and child.status() != "zombie" for child in children))
    until(lambda: verifier.verify(groups) and worker.taking_part)  # another has come in its place
    events = [(e["kind"], e["role"], e["who"]) for e in verifier.pool._events.events()]
    came = [("arrived", "verify", f"verifier {i}") for i in (0, 1)]
    assert [*sorted(events[:2]), events[2]] == [*came, ("lost", "verify", "verifier 0")]
    assert events[-1] == ("arrived", "verify", "verifier 0")
    assert worker.process.pid != pid


@pytest.mark.slow
def test_a_function_that_is_not_there_is_said_before_anything_is_judged(nodes, task, start):
    wrong = replace(task, verifier=Function(task.verifier.name + "_not"))
    with pytest.raises(InputError, match="has no judge_not; it has judge"):
        start(wrong)


@pytest.mark.slow
def test_the_driver_works_while_the_ranks_step(nodes, recipe, small_base):
    cluster = replace(recipe.cluster, generators=1, trainers=2, learner=Fsdp2(), verifiers=2)
    recipe = replace(recipe, cluster=cluster)
    with ExitStack() as closing:
        run = Run(recipe, small_base, closing)
        steps, verified_ahead = [], 0
        for step in islice(run.pipeline.steps(), 20):
            steps.append(step)
            verified_ahead += run.pipeline.queue()["verified"]
            ledger = run.pipeline.ledger({"consumed": len(steps) * recipe.batch.prompts})
            assert ledger["admitted"] == ledger["consumed"] + ledger["in_flight"]
    ages = [s.index - 1 - np.concatenate([r.version_T for g in s.groups for r in g.rollouts]) for s in steps]
    assert min(age.min() for age in ages) >= 0
    assert max(age.max() for age in ages) <= recipe.schedule.max_staleness
    assert verified_ahead > 0
    print(f"\nmean age {np.mean(np.concatenate(ages)):.2f}")


@pytest.mark.slow
def test_a_replacement_that_hangs_as_it_starts_is_replaced(nodes, recipe, small_base, make_rollout, tmp_path):
    """What it loads waits for ever; on its node alone, so that the other verifier goes on."""
    path, hangs = tmp_path / "code.py", tmp_path / "hangs"
    path.write_text(f"import os, time\nwhile os.path.exists({str(hangs)!r}):\n    time.sleep(0.1)\n" + CODE)
    task = Dataset("unread", verifier=Function(f"{path}:judge"), limits=Limits(seconds=120.0, workers=1))
    timeouts = replace(recipe.cluster.timeouts, start=30, heartbeat=60)
    cluster = Cluster(generators=1, verifiers=2, timeouts=timeouts)
    groups = [[make_rollout(length=2, prompt="a")] for _ in range(8)]
    with ExitStack() as closing:
        session = Session(cluster)
        closing.callback(session.close)
        recipe = replace(recipe, task=task, cluster=cluster)
        verifier = RayVerifier(recipe, str(small_base), session, Timeline())
        closing.callback(verifier.close)
        hangs.touch()
        worker = verifier.pool._workers[0]
        os.kill(worker.process.pid, signal.SIGKILL)
        until(lambda: verifier.verify(groups) and len(verifier.pool.lost) == 2)
        assert "verifier 0 on node " in verifier.pool.lost[1]
        assert "it has not started within 30 s" in verifier.pool.lost[1]
        hangs.unlink()
        until(lambda: verifier.verify(groups) and worker.taking_part)
