"""Runs that are cut and resumed: the record, the weights and the ledger are those of a run that never was."""

import json
import math
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from cut_runs import CutError, cut_at, lines, run, timeless
from record_checker import check
from small_runs import small_recipe

from scalerl.errors import InputError
from scalerl.record.reader import RunRecord
from scalerl.record.saved_weights import final_folder
from scalerl.rl.algo.loss import Cispo, Kl
from scalerl.rl.algo.schedule import OffPolicy
from scalerl.rl.checkpoint.store import load_state
from scalerl.rl.config.cluster import Cluster
from scalerl.rl.config.recipe import load_recipe
from scalerl.rl.config.settings import (
    BatchSize,
    Checkpointing,
    Evaluation,
    Local,
    Lora,
    Steps,
)
from scalerl.rl.learner.load import load_learner
from scalerl.rl.loop.resume import check_saved, find_checkpoint
from scalerl.rl.train import train

STEPS = 14


@pytest.fixture(scope="module")
def recipe(guesser):
    # One sample a prompt: evaluations of which no spread is known.
    return small_recipe(guesser, evaluation=Evaluation(count=5, samples=1))


VARIANTS = {
    "pipeline_rl": lambda r: r,
    "off_policy": lambda r: replace(r, schedule=OffPolicy(k=3)),
    "bfloat16": lambda r: replace(r, precision="bfloat16", kl=Kl(coefficient=0.01)),
    "lora": lambda r: replace(r, lora=Lora(rank=2)),
    "decay": lambda r: replace(r, optimiser=replace(r.optimiser, lr_scheduler="cosine", min_lr_ratio=0.1)),
}


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory):
    """A function that returns what a run of a variant leaves that is never cut."""

    @cache
    def of(variant="pipeline_rl"):
        folder = tmp_path_factory.mktemp("whole") / "run"
        run(VARIANTS[variant](recipe), folder)
        return timeless(folder)

    return of


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_that_was_cut_is_the_run_that_never_was(recipe, whole, tmp_path, variant):
    """Before its first checkpoint, between two of them, and behind the last but one."""
    recipe = VARIANTS[variant](recipe)
    for n, step in enumerate((1, 7, 13)):
        with pytest.raises(CutError):
            run(recipe, tmp_path / "cut", resume=n > 0, progress=cut_at(step))
    run(recipe, tmp_path / "cut", resume=True)
    assert timeless(tmp_path / "cut") == whole(variant)


def test_what_was_run_twice_is_kept_apart_with_its_cost(recipe, tmp_path):
    with pytest.raises(CutError):
        run(recipe, tmp_path / "run", progress=cut_at(8))
    before = lines(tmp_path / "run" / "steps.jsonl")
    run(recipe, tmp_path / "run", resume=True)
    head, *lost = lines(tmp_path / "run" / "lost.jsonl")
    assert head["lost"]["steps"] == 2  # the checkpoint was of step 6
    assert head["lost"]["tokens"]["generated"] == (
        before[7]["tokens"]["generated"] - before[5]["tokens"]["generated"]
    )
    assert [json.loads(row["line"])["step"] for row in lost if row["file"] == "steps.jsonl"] == [7, 8]


def test_a_run_that_is_asked_to_stop_loses_nothing(recipe, whole, tmp_path):
    stop = threading.Event()

    def watch(progress):
        if progress.step == 4:
            stop.set()

    with pytest.raises(KeyboardInterrupt):
        run(recipe, tmp_path / "run", stop=stop, progress=watch)
    assert len(lines(tmp_path / "run" / "steps.jsonl")) == 4
    run(recipe, tmp_path / "run", resume=True)
    assert not (tmp_path / "run" / "lost.jsonl").exists()
    assert timeless(tmp_path / "run") == whole()


class SetAt(threading.Event):
    """Set once it has been looked at so often: at a decode step, of an evaluation too, or between two
    micro-batches."""

    def __init__(self, looks):
        super().__init__()
        self.looks = looks

    def is_set(self):
        self.looks -= 1
        return self.looks < 0


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("looks", [(1, 30, 4), (70, 0, 3)], ids=str)
def test_a_run_that_is_stopped_within_steps_is_the_run_that_never_was(
    recipe, whole, tmp_path, variant, looks
):
    recipe = VARIANTS[variant](recipe)
    parts = []
    for n, at in enumerate(looks):
        with pytest.raises(KeyboardInterrupt):
            run(recipe, tmp_path / "run", resume=n > 0, stop=SetAt(at))
        parts += [p.name for p in (tmp_path / "run" / "checkpoints").iterdir() if "." in p.name]
    assert parts  # at least one is of a step that was under way
    run(recipe, tmp_path / "run", resume=True)
    assert not (tmp_path / "run" / "lost.jsonl").exists()
    assert timeless(tmp_path / "run") == whole(variant)


def test_a_step_that_is_given_up_between_micro_batches_is_made_again(recipe, whole, tmp_path):
    """Stopped by the learner itself, as it computes the second micro-batch of step 5."""
    stop = threading.Event()

    def load(*arguments):
        learner = load_learner(*arguments)
        accumulate, passes = learner._accumulate, []

        def second(batch, rows, *proximal):
            passes.append(learner.version)
            if passes.count(4) == 2:
                stop.set()
            return accumulate(batch, rows, *proximal)

        learner._accumulate = second
        return learner

    with pytest.raises(KeyboardInterrupt):
        run(recipe, tmp_path / "run", stop=stop, load=load)
    assert (tmp_path / "run" / "checkpoints" / "step-00004.1").is_dir()
    run(recipe, tmp_path / "run", resume=True)
    assert timeless(tmp_path / "run") == whole()


def test_a_run_in_parts_of_its_budget_is_the_run_in_one(recipe, whole, tmp_path):
    for until, steps in ((4, 4), (9, 9), (9, 9), (STEPS, STEPS)):
        record = run(recipe, tmp_path / "run", resume=until > 4, until=until)
        assert len(lines(tmp_path / "run" / "steps.jsonl")) == steps
        assert record.evals[-1].step == max(s for s in (0, 3, 6, 9, 12, STEPS) if s <= steps)  # on record
        assert final_folder(tmp_path / "run").is_dir() == (until == STEPS)
    assert not (tmp_path / "run" / "lost.jsonl").exists()
    assert timeless(tmp_path / "run") == whole()


def test_the_ledger_balances_and_every_group_ends_once(recipe, tmp_path):
    record = run(recipe, tmp_path / "run")
    consumed = Counter()
    for step, groups in zip(record.steps(), lines(tmp_path / "run" / "groups.jsonl"), strict=True):
        consumed.update(groups["fate"])
        ledger = step["ledger"]
        assert {name: n for name, n in ledger.items() if consumed[name]} == consumed
        assert ledger["admitted"] == sum(consumed.values()) + ledger["in_flight"]
        assert ledger["in_flight"] == 6  # of three batches of tickets, one is consumed and not admitted anew
    ends = [
        pair
        for row in lines(tmp_path / "run" / "groups.jsonl")
        for pair in zip(row["prompt"], row["epoch"], strict=True)
    ]
    assert len(ends) == len(set(ends)) == 3 * STEPS


def test_what_a_resume_changes_is_kept(recipe, tmp_path):
    with pytest.raises(CutError):
        run(recipe, tmp_path / "run", progress=cut_at(8))
    changed = replace(recipe, health=replace(recipe.health, on_alarm="pause"))
    with pytest.raises(CutError):
        run(changed, tmp_path / "run", resume=True, progress=cut_at(11))
    assert load_recipe(tmp_path / "run") == changed


def test_without_a_checkpoint_the_run_begins_anew(recipe, whole, tmp_path, caplog):
    with pytest.raises(CutError):
        run(recipe, tmp_path / "run", progress=cut_at(2))
    run(recipe, tmp_path / "run", resume=True)
    assert "begins anew" in caplog.text
    assert timeless(tmp_path / "run") == whole()
    run(recipe, tmp_path / "new", resume=True, until=1)  # where nothing is, it starts
    assert len(lines(tmp_path / "new" / "steps.jsonl")) == 1


def test_only_the_last_checkpoints_are_kept_and_they_can_be_loaded(recipe, tmp_path):
    from scalerl.rl.model.causal_lm import load_model

    run(recipe, tmp_path / "run")
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["final", "step-00012", "step-00014"]
    load_model(tmp_path / "run" / "checkpoints" / "step-00012")


def test_a_recipe_with_an_infinite_bound_is_resumed_and_run_again(recipe, tmp_path):
    recipe = replace(recipe, loss=Cispo(max_ratio=math.inf))
    with pytest.raises(CutError):
        run(recipe, tmp_path / "run", progress=cut_at(4))
    run(recipe, tmp_path / "run", resume=True)
    assert load_recipe(tmp_path / "run") == recipe


def test_another_recipe_and_a_second_writer_are_refused(recipe, tmp_path):
    with pytest.raises(CutError):
        run(recipe, tmp_path / "run", progress=cut_at(4))
    with pytest.raises(InputError, match="the run has seed = 0, and this recipe 1"):
        run(replace(recipe, seed=1), tmp_path / "run", resume=True)

    def resume_too(progress):
        with pytest.raises(InputError, match="another process is writing this run"):
            run(recipe, tmp_path / "run", resume=True)
        raise CutError

    with pytest.raises(CutError):
        run(recipe, tmp_path / "run", resume=True, progress=resume_too)
    run(replace(recipe, checkpoint=Checkpointing(steps=5)), tmp_path / "run", resume=True)


def test_a_run_in_one_process_does_not_go_on_in_others(recipe, tmp_path):
    """Refused before config.json takes the cluster over, by which no resume would go on."""
    run(recipe, tmp_path / "run", until=2)
    saved = find_checkpoint(tmp_path / "run")
    assert saved
    check_saved(tmp_path / "run", saved, recipe)
    with pytest.raises(
        InputError, match=r"run: the run generates in the trainer's process \(placement inline\)"
    ):
        check_saved(tmp_path / "run", saved, replace(recipe, cluster=Cluster()))
    apart = {**saved, "generator": {key: v for key, v in saved["generator"].items() if key != "slots"}}
    with pytest.raises(InputError, match=r"run: the run generates in other processes \(\[cluster\]\)"):
        check_saved(tmp_path / "run", apart, recipe)


@pytest.mark.parametrize("trainers", [(4, 1), (1, 4)], ids=str)
def test_a_resume_on_another_number_of_trainers_counts_the_past_as_it_was(recipe, tmp_path, trainers):
    def on(n):
        def load(*arguments):
            learner = load_learner(*arguments)
            learner.trainers = n
            return learner

        return load

    with pytest.raises(CutError):
        run(recipe, tmp_path / "run", progress=cut_at(8), load=on(trainers[0]))
    run(recipe, tmp_path / "run", resume=True, load=on(trainers[1]))
    assert check(tmp_path / "run") == []  # no counter falls
    steps, used = lines(tmp_path / "run" / "steps.jsonl"), (0.0, 0.0)
    for row in steps:
        n = trainers[0] if row["step"] <= 6 else trainers[1]  # the checkpoint is of step 6
        held = sum(row["device_seconds"][role] for role in ("generate", "train", "idle"))
        assert held - used[0] == pytest.approx(n * (row["wall_seconds"] - used[1]))
        used = held, row["wall_seconds"]


def test_a_local_run_is_resumed_and_nothing_is_lost_or_trained_twice(recipe, tmp_path):
    # One slot and many samples: to generate takes much longer than to train, so groups always wait.
    batch, steps = BatchSize(prompts=3, samples=16, micro=48), 7
    recipe = replace(recipe, placement=Local(generators=2), decode_slots=1, batch=batch, budget=Steps(steps))
    with pytest.raises(CutError):
        run(recipe, tmp_path / "run", progress=cut_at(4))
    saved = load_state(tmp_path / "run" / "checkpoints" / "step-00003" / "training")
    run(recipe, tmp_path / "run", resume=True)
    record = RunRecord.read(tmp_path / "run")
    rows = lines(tmp_path / "run" / "groups.jsonl")
    ends = [pair for row in rows for pair in zip(row["prompt"], row["epoch"], strict=True)]
    assert len(ends) == len(set(ends)) == 3 * steps
    found = record.steps()
    assert [step["step"] for step in found] == list(range(1, steps + 1))
    for step in found:
        ledger = step["ledger"]
        assert ledger["admitted"] == sum(n for name, n in ledger.items() if name != "admitted")
        assert step.get("staleness_max", 0) <= 2
    assert check(tmp_path / "run") == []
    assert found[-1]["restarted"] == len(saved["generator"]["in_flight"]) > 0
    assert not np.isnan(record.evals[-1].pass_rate)
    shutil.rmtree(tmp_path / "run")


def test_a_run_that_is_stopped_at_a_milestone_freezes_that_forecast_first(recipe, tmp_path):
    """After step 2 of 3: the step after that is the last one, for which nothing is to be forecast."""
    recipe = replace(recipe, budget=Steps(3), evaluation=Evaluation(count=3, samples=1, forecast_at=(0.6,)))

    def forecaster(run, axis, target):
        return {"axis": axis, "target": target, "of": [point.step for point in run.evals]}

    run(recipe, tmp_path / "whole", forecaster=forecaster)
    stop = threading.Event()

    def suspend(progress):
        if progress.step == 1 and not waiting:
            evaluation = next(p for p in multiprocessing.active_children() if p.name == "evaluation")
            assert evaluation.pid
            os.kill(evaluation.pid, signal.SIGSTOP)  # so that the milestone waits for it
            waiting.append(threading.Thread(target=stop_at_two))
            waiting[0].start()

    def stop_at_two():
        while len(lines(tmp_path / "run" / "steps.jsonl")) < 2:
            time.sleep(0.01)
        stop.set()

    waiting = []
    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path / "run", recipe.model, forecaster=forecaster, progress=suspend, stop=stop)
    assert not (tmp_path / "run" / "forecasts.jsonl").exists()
    run(recipe, tmp_path / "run", resume=True, forecaster=forecaster)
    forecasts = [lines(tmp_path / name / "forecasts.jsonl") for name in ("run", "whole")]
    assert forecasts[0] == forecasts[1] == [{"axis": "steps", "target": 3.0, "of": [0, 1, 2]}]
