"""Runs with vLLM, over Ray with two trainers and without Ray: what is recorded, though a server dies.

Over Ray, the nodes have room for the trainers on one and the worker on another.
"""

import json
import os
import signal
import time
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path

import answering
import numpy as np
import psutil
import pytest
from cluster_runs import check, check_record, when_step
from own_vllm import SETTINGS, needs_vllm
from ray_nodes import Run, simulated, until
from replayed_rollouts import TEMPERATURE, difference, models_of, replay

from scalerl.rl.algo.curriculum import Uniform
from scalerl.rl.config.cluster import Cluster, ClusterTimeouts, Fsdp2
from scalerl.rl.config.recipe import load_recipe
from scalerl.rl.config.settings import Local
from scalerl.rl.evaluate import evaluate
from scalerl.rl.train import train

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def recipe():
    """The demonstration, small, with completions long enough to be in flight at updates."""
    small = [
        *("task.k_max=2", "task.heldout_per_length=20", "context.prompt=6", "context.thinking=200"),
        *("length.low=150", "length.high=200", "batch.prompts=4", "batch.samples=8", "decode_slots=16"),
        *("optimiser.lr=3e-3", "budget.kind=steps", "budget.amount=10", "evaluation.count=2"),
        *("evaluation.samples=8", "schedule.k=4", "checkpoint.steps=4", f"temperature={TEMPERATURE}"),
    ]
    cluster = Cluster(trainers=2, learner=Fsdp2(), timeouts=ClusterTimeouts(start=240))
    return replace(load_recipe("demo", small), cluster=cluster, engine=SETTINGS, curriculum=Uniform())


def killing(generator):
    """Its `submit`, which kills the server once, as soon as the group is being sampled."""
    submit, (server,), (pid,) = generator.submit, generator._servers, servers()
    process = server.process

    def submit_and_kill(*group):
        place = submit(*group)
        ends = time.monotonic() + 0.5  # on a busy machine it may be complete before this thread looks
        while not server.in_flight and time.monotonic() < ends:
            time.sleep(0.001)
        if server.process is process and server.in_flight:
            os.killpg(pid, signal.SIGKILL)
            until(lambda: server.process is not process)
        return place

    return submit_and_kill


def test_what_is_trained_was_sampled_by_the_versions_on_record_though_a_server_dies(
    recipe, base, tmp_path, monkeypatch
):
    with simulated(2, 1) as nodes, ExitStack() as closing:
        run = Run(recipe, base, closing, tmp_path)
        generator, loop = run.generator, run.pipeline.steps()
        (worker,), first = generator._servers, servers()
        assert worker.node not in {rank.node for rank in run.learner._actors.actors}
        weights, steps, lines = [run.learner.weights().fetch()], [], []

        def go_on(n):
            while len(steps) < n:
                step = next(loop)
                steps.append(step)
                weights.append(run.learner.weights().fetch())
                lines.extend(run.timeline.lines(step.index, step.trained_at, step.train_seconds))

        go_on(6)
        monkeypatch.setattr(generator, "submit", killing(generator))
        go_on(12)
        assert generator.restarts == 1
        assert generator.counters.restarted >= 1
        check(recipe, run, steps)
        lost, second = worker.node, servers()
        nodes.add(1)
        nodes.kill_node_of(lost)
        go_on(18)
        assert generator.restarts >= 2  # one may be placed there before Ray has noticed
        until(lambda: worker.node != lost)
        check(recipe, run, steps)
        rollouts = [r for step in steps for group in step.groups for r in group.rollouts]
        models = models_of(base, weights)
        several = [r for r in rollouts if r.version_T[0] != r.version_T[-1]]
        found = [difference(r, replay(models, r, r.version_T)) for r in [*several[:40], *rollouts[::8]]]
        print(
            f"\n{len(rollouts)} completions, {len(several)} across updates: off by {max(found):.1e} at most"
        )
        assert max(found) < 1e-4
        assert several
        events = [line["event"] for line in lines if "event" in line and line["role"] == "generate"]
        assert events[0] == "vLLM worker 0 takes part from version 0"
        assert events[1].startswith("vLLM worker 0 is lost: ")
        assert "is lost: its process was killed by SIGKILL" in events[1]
        assert events[2].startswith("vLLM worker 0 takes part from version ")
        assert f"on {lost} is lost: " in events[3]
        spans = [line for line in lines if line["role"] == "generate" and "busy" in line]
        assert sum(span["busy"] for span in spans) <= generator.counters.seconds
        assert sum(span["busy"] > 0 for span in spans) >= 10
        assert generator.counters.tokens >= sum(r.length for r in rollouts)
        assert len(generator.update_seconds) >= 3  # versions may be passed over
        assert (tmp_path / "vllm-0.log").stat().st_size > 0
        third = servers()
    until(lambda: not {*first, *second, *third} & groups(), what="the end of all workers")
    assert not list(Path(SETTINGS.weights_folder).glob("scalerl-*/weights-*"))


def groups():
    """The groups of all processes."""
    return {os.getpgid(p.pid) for p in psutil.process_iter() if p.status() != psutil.STATUS_ZOMBIE}


def servers():
    """The servers that this process has started."""
    below = psutil.Process().children(recursive=True)
    return [
        p.pid for p in below if os.getpgid(p.pid) == p.pid and "workers.processes" in " ".join(p.cmdline())
    ]


def check_evaluations(record, recipe):
    """They are of the steps' versions; the last is what the built-in engine makes of the final weights."""
    assert [(point.step, point.version) for point in record.evals] == [(0, 0), (5, 5), (10, 10)]
    served, here = record.evals[-1], evaluate(recipe, record.path)
    n = served.n_prompts * served.n_samples
    of_prompts = here.correct_P / served.n_samples
    # Of the difference of two means over the same prompts, whose completions are independent.
    error = np.sqrt(
        2 * np.mean(of_prompts * (1 - of_prompts)) * served.n_samples / (served.n_samples - 1) / n
    )
    difference = served.pass_rate - of_prompts.mean()
    print(f"\nvLLM {served.pass_rate:.3f}, built-in {of_prompts.mean():.3f} +- {error:.3f}; ", end="")
    print(
        f"entropy {served.entropy:.4f} and {here.entropy:.4f}, length {served.mean_length:.2f} and ", end=""
    )
    print(f"{here.mean_length:.2f}; seconds {served.device_seconds.evaluate:.1f} in all evaluations")
    assert abs(difference) < 4 * error
    assert served.entropy == pytest.approx(here.entropy, rel=0.15)
    assert served.device_seconds.evaluate > 0


@pytest.mark.parametrize("place", ["cluster", "local"])
def test_a_run_is_stopped_and_goes_on_though_a_server_dies(recipe, base, tmp_path, place):
    folder, around = tmp_path / "run", simulated(2, 1)
    if place == "local":
        recipe, around = replace(recipe, cluster=None, placement=Local()), nullcontext()

    def kill():
        killed.append(servers()[-1])
        os.killpg(killed[-1], signal.SIGKILL)

    killed = []
    with around:
        train(recipe, folder, base, until=5)
        killer = when_step(folder, 7, kill)
        train(recipe, folder, base, resume=True)
        killer.join()
    record = check_record(folder, 10)
    check_evaluations(record, recipe)
    assert record.steps()[-1]["restarted"] >= 1
    assert (folder / "vllm-0.log").stat().st_size > 0
    assert not servers()
    if place == "cluster":
        lines = [json.loads(line) for line in (folder / "timeline.jsonl").read_text().splitlines()]
        assert {line["who"] for line in lines if line.get("role") == "generate"} == {"vLLM worker 0"}
        assert sum("is lost" in line.get("event", "") for line in lines) == 1


def test_turns_are_trained_and_evaluated_over_ray(recipe, base, tmp_path):
    """The task is a class of a file; what its tools answer is no sampled token."""
    small = [
        *(f"task={answering.__file__}:Answering", "length.kind=none", "batch.prompts=2", "batch.samples=4"),
        *("context.prompt=8", "context.thinking=60", "context.answer=60", "decode_slots=16", "schedule.k=2"),
        *("budget.kind=steps", "budget.amount=4", "evaluation.count=2", "evaluation.samples=2"),
        *("samples.every=1", "curriculum.kind=uniform"),
    ]
    folder = tmp_path / "run"
    with simulated(2, 1):
        whole = replace(load_recipe("demo", small), cluster=recipe.cluster, engine=recipe.engine)
        train(whole, folder, base)
    record = check_record(folder, 4)
    assert [point.version for point in record.evals] == [0, 2, 4]
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    # Its reward is the number of turns; the text has what the tool answered.
    turned = [line for line in lines if line["reward"] == 3.0]
    assert {line["source"] for line in turned} == {"evaluation", "training"}
    assert all("1+2" in line["completion"].replace(" ", "") for line in turned)
