"""What a run has spent: it only rises, and the start of processes is no part of the compute axis."""

import json
import multiprocessing
import os
import signal
from dataclasses import replace

import pytest
from record_checker import check

from scalerl.record.reader import RunRecord
from scalerl.rl.algo.length import ForcedInterruption
from scalerl.rl.algo.schedule import OffPolicy, PipelineRL
from scalerl.rl.config.optimiser import AdamW
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.config.settings import BatchSize, Context, Evaluation, Inline, Local, Steps
from scalerl.rl.loop.counters import RunCounters
from scalerl.rl.tasks.chain import Chain
from scalerl.rl.train import train


@pytest.fixture(scope="module")
def recipe(small_base):
    return Recipe(
        model=str(small_base),
        task=Chain(k_max=2, heldout_per_length=40),
        budget=Steps(40),
        length=ForcedInterruption(phrase="! </think>", low=3, high=4),
        context=Context(prompt=6, thinking=4, answer=4),
        batch=BatchSize(prompts=4, samples=8),
        optimiser=AdamW(lr=1e-3),
        schedule=PipelineRL(k=4),
        decode_slots=32,
        evaluation=Evaluation(count=8, samples=1),
    )


PLACEMENTS = {
    "inline": (Inline(), PipelineRL(k=4)),
    "inline, in phases": (Inline(), OffPolicy(k=3)),
    "one generator": (Local(1), PipelineRL(k=4)),
    "two generators, in phases": (Local(2), OffPolicy(k=3)),
    "three generators": (Local(3), PipelineRL(k=4)),
}


SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("inline, in phases", "one generator", "three generators")
]


@pytest.mark.parametrize("where", ["inline", "two generators, in phases", *SLOW])
def test_cumulative_counters_only_rise_over_pauses_and_losses(recipe, tmp_path, where):
    placement, schedule = PLACEMENTS[where]
    recipe = replace(recipe, placement=placement, schedule=schedule)

    def lose_a_generator(progress):
        if progress.step == 30 and not progress.evaluated:
            for process in multiprocessing.active_children():
                if process.name == "generator" and process.pid:
                    os.kill(process.pid, signal.SIGKILL)
                    break

    folder = tmp_path / "run"
    train(recipe, folder, recipe.model, until=20, evaluate_aside=False)
    before = RunRecord.read(folder).steps()[-1]["device_seconds"]["startup"]
    train(recipe, folder, recipe.model, resume=True, evaluate_aside=False, progress=lose_a_generator)
    assert check(folder) == []
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert steps[20]["device_seconds"]["startup"] > before  # the resume has started all of it anew
    assert len(steps) == 40


def test_a_pause_costs_start_up_and_nothing_on_the_axis(recipe, tmp_path, monkeypatch):
    """The axis goes on where it was: what a resume starts, a second or more for each process, is apart."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # processes are then started afresh, and not forked
    recipe = replace(recipe, placement=Local(1))
    folder = tmp_path / "run"
    train(recipe, folder, recipe.model, until=20)
    train(recipe, folder, recipe.model, resume=True)
    steps = [row["device_seconds"] for row in RunRecord.read(folder).steps()]
    axis = [row["generate"] + row["train"] + row["idle"] for row in steps]
    started = steps[20]["startup"] - steps[19]["startup"]
    assert axis[0] < 0.5 * steps[0]["startup"]
    assert started > 1
    assert axis[20] - axis[19] < 0.5 * started  # as long as the start takes, so much longer is a loaded step
    last = RunRecord.read(folder).evals[-1].device_seconds
    assert RunRecord.read(folder).compute("gpu_hours")[-1] == pytest.approx(
        (last.generate + last.train + last.idle) / 3600
    )
    assert last.startup >= steps[20]["startup"]


def test_the_state_of_the_counters_stays_as_it_was():
    """A thread writes it while the run goes on."""
    counters = RunCounters()
    state = counters.state()
    counters.fates["trained"] += 3
    assert state["fates"]["trained"] == 0
