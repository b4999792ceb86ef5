"""Whoever is lost of a run on a cluster, it goes on, and its record adds up; nothing hangs."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import psutil
import pytest
import ray
from cluster_runs import check, check_record, steps_of, when_step
from ray_nodes import Run, simulated, until

from scalerl.errors import LearnerLostError
from scalerl.rl.algo.curriculum import Uniform
from scalerl.rl.algo.schedule import PipelineRL
from scalerl.rl.config.cluster import ClusterTimeouts, Fsdp2
from scalerl.rl.train import train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def endless(recipe):
    return replace(recipe, curriculum=Uniform())


@pytest.fixture(scope="module")
def sharded(recipe):
    cluster = replace(recipe.cluster, generators=1, trainers=2, learner=Fsdp2())
    return replace(recipe, cluster=cluster)


@contextmanager
def running(recipe, model, *cpus):
    with simulated(*cpus) as nodes, ExitStack() as closing:
        yield nodes, Run(recipe, model, closing)


def take_steps(loop, steps, condition, seconds=180):
    ends = time.monotonic() + seconds
    while not condition():
        steps.append(next(loop))
        assert time.monotonic() < ends, "it did not happen"


def processes_of(actor):
    """Processes of an actor below this one."""
    return [p for p in psutil.Process().children(recursive=True) if f"ray::{actor}" in p.name() + _title(p)]


def _title(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_the_node_of_a_generator_dies_and_another_joins_late(endless, small_base):
    with running(endless, small_base, 1, 1, 1) as (nodes, run):
        loop, worker, steps = run.pipeline.steps(), run.generator._workers[0], []
        take_steps(loop, steps, lambda: len(steps) == 6)
        node = worker.process.node
        nodes.kill_node_of(node)
        take_steps(loop, steps, lambda: run.generator.lost)
        assert node in run.generator.lost[0]
        assert "generator 0" in run.generator.lost[0]
        took_part, n = run.generator.alive, len(steps)
        take_steps(loop, steps, lambda: len(steps) == n + 5)
        assert took_part == run.generator.alive == 1
        nodes.add(1)
        take_steps(loop, steps, lambda: run.generator.alive == 2)
        assert worker.process.node != node
        take_steps(loop, steps, lambda: worker.counters.tokens > 0)  # it gets work
        check(endless, run, steps)
        print(f"\n{len(steps)} steps; lost: {run.generator.lost}")


def test_the_groups_of_a_generator_that_hangs_are_sampled_by_others(endless, small_base):
    hasty = replace(endless.cluster, timeouts=ClusterTimeouts(start=240, heartbeat=15))
    recipe = replace(endless, cluster=hasty)
    with running(recipe, small_base, 3) as (_, run):
        generator, worker = run.generator, run.generator._workers[1]
        pid = worker.process.pid
        os.kill(pid, signal.SIGSTOP)
        asked = list(filter(None, (run.pool.draw() for _ in range(4))))
        for prompt, epoch in asked:
            generator.submit(prompt, epoch, 8)
        assert len(worker.in_flight) == 2
        until(lambda: generator.work() or generator.ready == 4)
        assert f"no heartbeat for 15 s (pid {pid})" in generator.lost[0]
        found = [(group[0].prompt, group[0].epoch) for group in generator.take(4)]
        assert found == asked
        assert generator.counters.restarted == 2
        until(lambda: generator.work() or generator.alive == 2)  # another has come in its place
        assert worker.process.pid != pid
        until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")


def test_one_that_hangs_while_it_loads_is_replaced(endless, small_base):
    """It has come to its place, and says nothing any more before it takes part."""
    hasty = replace(endless.cluster, timeouts=ClusterTimeouts(start=240, heartbeat=15))
    recipe = replace(endless, cluster=hasty)
    with running(recipe, small_base, 3) as (_, run):
        generator, worker = run.generator, run.generator._workers[1]
        os.kill(worker.process.pid, signal.SIGKILL)
        until(
            lambda: generator.work() or (len(generator.lost) == 1 and worker.process and worker.process.pid)
        )
        assert not worker.started
        node, pid = worker.process.node, worker.process.pid
        os.kill(pid, signal.SIGSTOP)
        until(lambda: generator.work() or len(generator.lost) == 2)
        said = f"generator 1 on {node} is lost: no heartbeat for 15 s (pid {pid})"
        assert generator.lost[1] == said
        until(lambda: generator.work() or generator.alive == 2)
        assert worker.process.pid != pid


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_trainer_is_lost_and_the_run_goes_back_to_its_checkpoint(
    sharded, small_base, tmp_path, caplog, number
):
    # As short as a busy machine allows: an actor that imports torch may be silent for 20 s.
    heartbeat = 40 if number == signal.SIGSTOP else 60
    hasty = replace(sharded.cluster, timeouts=ClusterTimeouts(start=240, heartbeat=heartbeat))
    recipe = replace(sharded, cluster=hasty)
    folder, killed = tmp_path / "run", []

    def lose_one(progress):
        # Here, and not in a thread beside it, which may come so late that step 10 has a checkpoint by then.
        if progress.step == 7 and not progress.evaluated and not killed:
            killed.append(processes_of("TrainerActor")[-1].pid)
            os.kill(killed[0], number)

    with simulated(2, 2), caplog.at_level(logging.WARNING, logger="scalerl"):
        train(recipe, folder, small_base, progress=lose_one)
    record = check_record(folder, 20)
    (heard,) = [r for r in caplog.records if "from its last checkpoint" in r.getMessage()]
    said = heard.getMessage()
    cause = "no heartbeat for 40 s" if number == signal.SIGSTOP else f"its process ended (pid {killed[0]}, "
    assert said.startswith("trainer ")
    assert cause in said
    assert "on node " in said
    lost = [json.loads(line) for line in (folder / "lost.jsonl").read_text().splitlines()]
    assert lost[0]["lost"]["steps"] >= 2
    lines = [json.loads(line) for line in (folder / "timeline.jsonl").read_text().splitlines()]
    (loss,) = [line for line in lines if line.get("kind") == "lost"]
    again = [
        x for x in lines if x.get("kind") == "arrived" and x["role"] == "train" and x["time"] > loss["time"]
    ]
    assert (loss["role"], len(again)) == ("train", 2)
    assert loss["time"] <= heard.created  # of the loss, and not of the restart
    back = int(loss["event"].partition("the run goes on from step ")[2])
    assert f"the run goes on from step {back}" in [r.getMessage() for r in caplog.records]
    assert 0 <= back < 7
    print(f"\n{said}; lost {lost[0]['lost']['steps']} steps, {len(record.evals)} evaluations")


def test_a_learner_that_is_lost_while_generators_need_its_weights_is_missed(sharded, small_base, caplog):
    """Nothing is asked of it then: the next groups wait for a version that nobody can fetch any more."""
    hasty = replace(sharded.cluster, timeouts=ClusterTimeouts(start=240, heartbeat=60))
    recipe = replace(sharded, curriculum=Uniform(), schedule=PipelineRL(k=0), cluster=hasty)
    with running(recipe, small_base, 4) as (_, run):
        update = run.generator.update

        def update_late(weights, version):
            if version == 2:
                for actor in run.learner._actors.actors:
                    os.kill(actor.pid, signal.SIGKILL)
                    until(lambda pid=actor.pid: not psutil.pid_exists(pid))
                killed.append(time.monotonic())
            update(weights, version)

        killed: list[float] = []
        run.generator.update = update_late
        with caplog.at_level(logging.WARNING, logger="scalerl"), pytest.raises(LearnerLostError) as told:
            take_steps(run.pipeline.steps(), [], lambda: False)
    said = [r.getMessage() for r in caplog.records if "did not get its weights" in r.getMessage()]
    print(f"\n{told.value}; after {time.monotonic() - killed[0]:.1f} s, {len(said)} warnings")
    assert str(told.value).startswith("trainer ")
    assert len(said) < 20


def test_the_driver_is_killed_and_a_resume_goes_on(recipe, small_base, tmp_path):
    folder = tmp_path / "run"
    code = (
        "import json, sys; from scalerl.rl.config.recipe import from_dict\n"
        "from scalerl.rl.train import train\n"
        "if __name__ == '__main__':\n"
        "    train(from_dict(json.loads(sys.argv[1])), sys.argv[2], sys.argv[3])"
    )
    with simulated(3, 1) as nodes:
        free = ray.available_resources()["CPU"]
        there = replace(recipe, cluster=replace(recipe.cluster, address=nodes.address))
        script = tmp_path / "driver.py"
        script.write_text(code)
        values = json.dumps(there.to_json())
        command = [sys.executable, str(script), values, str(folder), str(small_base)]
        driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        when_step(folder, 7, driver.kill).join()
        driver.wait()
        assert steps_of(folder) < 20
        until(lambda: ray.available_resources().get("CPU") == free)  # nothing of it is left behind
        train(there, folder, small_base, resume=True)
    check_record(folder, 20)
    assert (folder / "lost.jsonl").exists()


def test_an_evaluation_that_is_lost_is_made_again(recipe, small_base, tmp_path, caplog):
    folder = tmp_path / "run"

    def lose_it():
        for process in until(lambda: processes_of("EvaluationActor")):
            process.kill()

    with simulated(3), caplog.at_level(logging.WARNING, logger="scalerl"):
        killer = when_step(folder, 4, lose_it)
        train(recipe, folder, small_base)
        killer.join()
    record = check_record(folder, 20)
    assert [point.step for point in record.evals] == [0, 5, 10, 15, 20]
    said = [r.getMessage() for r in caplog.records]
    assert any(text.startswith("the evaluation on ") and "made again" in text for text in said)
