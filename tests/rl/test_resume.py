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

import numpy as np
import pytest
from cut_runs import CutError, cut_at, lines, record_and_weights, run
from record_checker import check
from small_runs import small_recipe

from scalerl.errors import InputError, WorkerError, WriteError
from scalerl.record.reader import RunRecord
from scalerl.record.saved_weights import final_folder
from scalerl.rl.algo.loss import Cispo, Kl
from scalerl.rl.algo.schedule import OffPolicy
from scalerl.rl.checkpoint.store import load_state
from scalerl.rl.config.recipe import load_recipe
from scalerl.rl.config.settings import (
    BatchSize,
    Checkpointing,
    Epochs,
    Evaluation,
    FlopsBudget,
    GpuHours,
    Local,
    Lora,
    Steps,
    TokensBudget,
)
from scalerl.rl.learner.load import load_learner
from scalerl.rl.train import train

STEPS = 14


@pytest.fixture(scope="module")
def recipe(guesser):
    # One sample a prompt: evaluations of which no spread is known.
    return small_recipe(guesser, evaluation=Evaluation(count=5, samples=1))


def timeless(folder, edited=False):
    """Its record and weights; the record must be sound unless the test has edited it."""
    assert edited or check(folder) == []
    assert sum(row["skipped"] for row in lines(folder / "steps.jsonl")) <= STEPS / 2  # it was trained
    return record_and_weights(folder)


VARIANTS = {
    "pipeline_rl": lambda r: r,
    "off_policy": lambda r: replace(r, schedule=OffPolicy(k=3)),
    "bfloat16": lambda r: replace(r, precision="bfloat16", kl=Kl(coefficient=0.01)),
    "lora": lambda r: replace(r, lora=Lora(rank=2)),
    "decay": lambda r: replace(r, optimiser=replace(r.optimiser, lr_scheduler="cosine", min_lr_ratio=0.1)),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("steps", [(1,), (7,), (8, 13)], ids=str)
def test_a_run_that_was_cut_is_the_run_that_never_was(recipe, tmp_path, variant, steps):
    recipe = VARIANTS[variant](recipe)
    run(recipe, tmp_path / "whole")
    for n, step in enumerate(steps):
        with pytest.raises(CutError):
            run(recipe, tmp_path / "cut", resume=n > 0, progress=cut_at(step))
    run(recipe, tmp_path / "cut", resume=True)
    assert timeless(tmp_path / "cut") == timeless(tmp_path / "whole")


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


def test_a_run_that_is_asked_to_stop_loses_nothing(recipe, tmp_path):
    run(recipe, tmp_path / "whole")
    stop = threading.Event()

    def watch(progress):
        if progress.step == 4:
            stop.set()

    with pytest.raises(KeyboardInterrupt):
        run(recipe, tmp_path / "run", stop=stop, progress=watch)
    assert len(lines(tmp_path / "run" / "steps.jsonl")) == 4
    run(recipe, tmp_path / "run", resume=True)
    assert not (tmp_path / "run" / "lost.jsonl").exists()
    assert timeless(tmp_path / "run") == timeless(tmp_path / "whole")


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
@pytest.mark.parametrize("looks", [(1,), (1, 30, 4), (60, 4), (70, 0, 3), (90, 5, 6)], ids=str)
def test_a_run_that_is_stopped_within_steps_is_the_run_that_never_was(recipe, tmp_path, variant, looks):
    recipe = VARIANTS[variant](recipe)
    run(recipe, tmp_path / "whole")
    parts = []
    for n, at in enumerate(looks):
        with pytest.raises(KeyboardInterrupt):
            run(recipe, tmp_path / "run", resume=n > 0, stop=SetAt(at))
        parts += [p.name for p in (tmp_path / "run" / "checkpoints").iterdir() if "." in p.name]
    assert parts  # at least one is of a step that was under way
    run(recipe, tmp_path / "run", resume=True)
    assert not (tmp_path / "run" / "lost.jsonl").exists()
    assert timeless(tmp_path / "run") == timeless(tmp_path / "whole")


def test_a_step_that_is_given_up_between_micro_batches_is_made_again(recipe, tmp_path):
    """Stopped by the learner itself, as it computes the second micro-batch of step 5."""
    run(recipe, tmp_path / "whole")
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
    assert timeless(tmp_path / "run") == timeless(tmp_path / "whole")


def test_a_run_in_parts_of_its_budget_is_the_run_in_one(recipe, tmp_path):
    run(recipe, tmp_path / "whole")
    for until, steps in ((4, 4), (9, 9), (9, 9), (STEPS, STEPS)):
        record = run(recipe, tmp_path / "run", resume=until > 4, until=until)
        assert len(lines(tmp_path / "run" / "steps.jsonl")) == steps
        assert record.evals[-1].step == max(s for s in (0, 3, 6, 9, 12, STEPS) if s <= steps)  # on record
        assert final_folder(tmp_path / "run").is_dir() == (until == STEPS)
    assert not (tmp_path / "run" / "lost.jsonl").exists()
    assert timeless(tmp_path / "run") == timeless(tmp_path / "whole")


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


def damage_arrays(path):
    data = bytearray((path / "training" / "arrays.safetensors").read_bytes())
    data[-5] ^= 1
    (path / "training" / "arrays.safetensors").write_bytes(data)


def cut_arrays(path):
    file = path / "training" / "arrays.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def cut_state(path):
    file = path / "training" / "state.json"
    file.write_bytes(file.read_bytes()[:-100])


def forget(path):
    (path / "training" / "state.json").unlink()


@pytest.mark.parametrize("damage", [damage_arrays, cut_arrays, cut_state, forget])
def test_a_damaged_checkpoint_is_passed_over_and_told(recipe, tmp_path, damage, caplog):
    run(recipe, tmp_path / "whole")
    with pytest.raises(CutError):
        run(recipe, tmp_path / "run", progress=cut_at(8))
    damage(tmp_path / "run" / "checkpoints" / "step-00006")
    run(recipe, tmp_path / "run", resume=True)
    assert "step-00006 is damaged" in caplog.text
    assert lines(tmp_path / "run" / "lost.jsonl")[0]["lost"]["steps"] == 5
    assert timeless(tmp_path / "run") == timeless(tmp_path / "whole")


def test_a_checkpoint_without_a_file_that_another_process_wrote_is_none(recipe, tmp_path, caplog):
    """A folder of the node alone, say: the older checkpoint stays."""

    def load(*arguments):
        learner = load_learner(*arguments)
        saver = learner.saver

        def of_two_nodes(near, resumable=True):
            write, whole = saver(near, resumable), learner.version <= 3
            return lambda folder: write(folder) | ({} if whole else {"learner/__1_0.distcp": [3, 4]})

        learner.saver = of_two_nodes
        return learner

    kept_one = replace(recipe, checkpoint=Checkpointing(3, keep=1))
    with pytest.raises(CutError):
        run(kept_one, tmp_path / "run", progress=cut_at(8), load=load)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00003"]
    assert "learner/__1_0.distcp: written by another process and not there" in caplog.text


def test_an_evaluation_that_a_new_process_cannot_make_leaves_a_checkpoint(recipe, tmp_path):
    """The model's folder is gone for a while, as the process that evaluates is lost."""
    model = shutil.copytree(recipe.model, tmp_path / "model")
    recipe = replace(recipe, model=str(model), checkpoint=Checkpointing(steps=0))

    def lose(progress):
        if progress.step == 1 and model.exists():
            model.rename(tmp_path / "away")
            next(p for p in multiprocessing.active_children() if p.name == "evaluation").kill()

    with pytest.raises(WorkerError, match=r"--resume goes on, and makes it"):
        train(recipe, tmp_path / "run", model, progress=lose)
    (tmp_path / "away").rename(model)
    last = lines(tmp_path / "run" / "steps.jsonl")[-1]["step"]
    assert (tmp_path / "run" / "checkpoints" / f"step-{last:05d}").is_dir()
    record = run(recipe, tmp_path / "run", resume=True)
    assert [point.step for point in record.evals] == [0, 3, 6, 9, 12, 14]
    assert check(tmp_path / "run") == []


def test_a_checkpoint_of_more_than_the_record_holds_is_passed_over(recipe, tmp_path, caplog):
    run(recipe, tmp_path / "whole")
    with pytest.raises(CutError):
        run(recipe, tmp_path / "run", progress=cut_at(8))
    steps = tmp_path / "run" / "steps.jsonl"
    kept = steps.read_bytes().splitlines(keepends=True)[:5]  # the checkpoint is of step 6
    steps.write_bytes(b"".join(kept))
    run(recipe, tmp_path / "run", resume=True)
    assert "steps.jsonl is not what it was at step 6" in caplog.text
    assert timeless(tmp_path / "run", edited=True) == timeless(tmp_path / "whole")


def test_checkpoints_that_cannot_be_used_are_kept_and_the_run_is_refused(recipe, tmp_path):
    with pytest.raises(CutError):
        run(recipe, tmp_path / "run", progress=cut_at(8))
    before = sorted(path.relative_to(tmp_path) for path in (tmp_path / "run").rglob("*"))
    (tmp_path / "run" / "evals.jsonl").write_text("")
    with pytest.raises(
        InputError, match=r"none of its checkpoints can be used; scalerl train .*run --restart begins anew"
    ):
        run(recipe, tmp_path / "run", resume=True)
    assert sorted(path.relative_to(tmp_path) for path in (tmp_path / "run").rglob("*")) == before


def test_a_stop_whose_checkpoint_fails_says_so(recipe, tmp_path):
    stop = threading.Event()

    def watch(progress):
        if progress.step == 2:
            shutil.rmtree(tmp_path / "run" / "checkpoints", ignore_errors=True)
            (tmp_path / "run" / "checkpoints").write_text("no folder")
            stop.set()

    with pytest.raises(WriteError, match="step-00002: the checkpoint could not be saved"):
        run(recipe, tmp_path / "run", progress=watch, stop=stop)


def test_what_a_resume_changes_is_kept(recipe, tmp_path):
    with pytest.raises(CutError):
        run(recipe, tmp_path / "run", progress=cut_at(8))
    changed = replace(recipe, health=replace(recipe.health, on_alarm="pause"))
    with pytest.raises(CutError):
        run(changed, tmp_path / "run", resume=True, progress=cut_at(11))
    assert load_recipe(tmp_path / "run") == changed


def test_without_a_checkpoint_the_run_begins_anew(recipe, tmp_path, caplog):
    run(recipe, tmp_path / "whole")
    with pytest.raises(CutError):
        run(recipe, tmp_path / "run", progress=cut_at(2))
    run(recipe, tmp_path / "run", resume=True)
    assert "begins anew" in caplog.text
    assert timeless(tmp_path / "run") == timeless(tmp_path / "whole")
    run(recipe, tmp_path / "new", resume=True)  # where nothing is, it starts
    assert timeless(tmp_path / "new") == timeless(tmp_path / "whole")


def test_only_the_last_checkpoints_are_kept_and_they_can_be_loaded(recipe, tmp_path):
    from scalerl.rl.model.causal_lm import load_model

    run(recipe, tmp_path / "run")
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["final", "step-00012", "step-00014"]
    load_model(tmp_path / "run" / "checkpoints" / "step-00012")


def test_a_finished_run_is_left_as_it_is(recipe, tmp_path):
    run(recipe, tmp_path / "run")
    before = (tmp_path / "run" / "evals.jsonl").read_bytes()
    assert len(run(recipe, tmp_path / "run", resume=True).evals) == 6
    assert (tmp_path / "run" / "evals.jsonl").read_bytes() == before


def test_a_finished_run_of_another_recipe_is_refused(recipe, tmp_path):
    run(recipe, tmp_path / "run")
    with pytest.raises(InputError, match="the run has seed = 0, and this recipe 1"):
        run(replace(recipe, seed=1), tmp_path / "run", resume=True)


def test_another_kind_of_budget_and_one_that_is_spent_are_refused(recipe, tmp_path):
    run(recipe, tmp_path / "run")
    with pytest.raises(
        InputError, match=r"budget.amount = 7 is less than the 14 steps that the run has spent"
    ):
        run(replace(recipe, budget=Steps(7)), tmp_path / "run", resume=True)
    with pytest.raises(InputError, match=r"budget.kind = 'steps', and this recipe 'tokens'"):
        run(replace(recipe, budget=TokensBudget(1e9)), tmp_path / "run", resume=True)
    other = replace(recipe, loss=replace(recipe.loss, max_ratio=9.0))
    with pytest.raises(InputError, match=r"loss.max_ratio = 5.0, and this recipe 9.0; .*another run \(-o\)"):
        run(other, tmp_path / "run", resume=True)


def end_of(run, axis, target):
    """A forecaster that says when it was asked, and of which end."""
    return {"axis": axis, "target": target, "of": run.evals[-1].step}


def test_a_finished_run_is_extended_to_the_run_of_the_larger_budget(recipe, tmp_path):
    """Ten steps, whose five evaluations are two steps apart, and then twenty."""
    short, long = (
        replace(recipe, budget=Steps(n), evaluation=Evaluation(count, samples=1, forecast_at=(0.5,)))
        for n, count in ((10, 5), (20, 10))
    )
    run(long, tmp_path / "whole", forecaster=end_of)
    run(short, tmp_path / "run", forecaster=end_of)
    assert (tmp_path / "run" / "checkpoints" / "step-00010").is_dir()
    with pytest.raises(CutError):  # before it has another checkpoint, and so from the same one again
        run(longer(short), tmp_path / "run", resume=True, progress=cut_at(11), forecaster=end_of)
    assert not final_folder(tmp_path / "run").is_dir()
    record = run(load_recipe(tmp_path / "run"), tmp_path / "run", resume=True, forecaster=end_of)
    assert record.config["budget"] == {"kind": "steps", "amount": 20, "before": [10]}
    assert record.config["recipe"]["budget"]["amount"] == 20
    assert [(row["target"], row["of"]) for row in record.forecasts] == [(10, 4), (20, 10)]
    (tmp_path / "run" / "forecasts.jsonl").unlink()  # which the checker would hold against one budget
    (tmp_path / "whole" / "forecasts.jsonl").unlink()
    assert timeless(tmp_path / "run") == timeless(tmp_path / "whole")


def longer(recipe):
    return replace(recipe, budget=Steps(20))


def test_a_run_under_way_is_shortened_to_what_it_has_spent(recipe, tmp_path):
    run(recipe, tmp_path / "run", until=8)
    with pytest.raises(InputError, match="less than the 8 steps"):
        run(replace(recipe, budget=Steps(7)), tmp_path / "run", resume=True)
    record = run(replace(recipe, budget=Steps(8)), tmp_path / "run", resume=True)
    assert [point.step for point in record.evals] == [0, 3, 6, 8]
    assert final_folder(tmp_path / "run").is_dir()
    assert check(tmp_path / "run") == []


def test_only_a_decay_with_steps_of_its_own_can_be_extended(recipe, tmp_path):
    """Over the budget it would be another decay with another budget, also for the steps made."""
    linear = replace(recipe.optimiser, lr_scheduler="linear", min_lr_ratio=0.2)
    recipe = replace(recipe, optimiser=linear, evaluation=Evaluation(every=5, samples=1))
    bound, own = replace(recipe, budget=Steps(5)), replace(linear, decay_steps=8)
    run(bound, tmp_path / "bound")
    with pytest.raises(InputError, match=r"decays over its budget of 5 steps.*sets optimiser.decay_steps"):
        run(replace(bound, budget=Steps(10)), tmp_path / "bound", resume=True)
    whole, short = (replace(recipe, optimiser=own, budget=Steps(n)) for n in (10, 5))
    run(short, tmp_path / "own")
    run(replace(short, budget=Steps(10)), tmp_path / "own", resume=True)
    run(whole, tmp_path / "whole")
    rates = [[row["lr"] for row in lines(tmp_path / name / "steps.jsonl")] for name in ("own", "whole")]
    trained = [rate is not None for rate in rates[0]]
    expected = [whole.lr_at(step) if trained[step] else None for step in range(10)]
    assert rates == [expected, expected]
    assert expected[-1] == pytest.approx(0.2 * linear.lr)
    assert len(set(expected[:8])) > 3


def test_a_budget_edited_in_config_json_is_refused(recipe, tmp_path):
    run(recipe, tmp_path / "run", until=8)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["recipe"]["budget"]["amount"] = 20
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"edited since the checkpoint of step 8.*budget.amount = 20"):
        run(longer(recipe), tmp_path / "run", resume=True)


def test_evaluations_every_so_many_steps_go_on_as_they_were(recipe, tmp_path):
    by_steps = replace(recipe, budget=Steps(9), evaluation=Evaluation(every=4, samples=1))
    record = run(by_steps, tmp_path / "run")
    assert [point.step for point in record.evals] == [0, 4, 8, 9]
    record = run(replace(by_steps, budget=Steps(14)), tmp_path / "run", resume=True)
    assert [point.step for point in record.evals] == [0, 4, 8, 9, 12, 14]
    assert check(tmp_path / "run") == []


@pytest.mark.parametrize("kind", [GpuHours, TokensBudget, FlopsBudget, Epochs])
def test_a_run_ends_with_its_budget_in_any_unit(recipe, tmp_path, kind):
    """At half of what a run of 14 steps has spent; of a clock, only that it ends is certain."""
    last = run(recipe, tmp_path / "whole").evals[-1]
    amount = {
        GpuHours: 1e-9,
        TokensBudget: last.tokens.generated / 2,
        FlopsBudget: (last.flops.generate + last.flops.train) / 2,
        Epochs: last.prompts / 2 / len(recipe.task.prompts("train")),
    }[kind]
    record = run(replace(recipe, budget=kind(amount)), tmp_path / "run", forecaster=end_of)
    steps = record.evals[-1].step
    assert steps == 1 if kind is GpuHours else 6 <= steps <= 8
    assert final_folder(tmp_path / "run").is_dir()
    axis = record.default_axis
    end = record.config["budget"]["amount"]
    assert record.compute(axis)[-1] >= end * (1 - 1e-9) > record.compute(axis)[-2]
    if kind is Epochs:
        assert (axis, end) == ("samples", last.samples / 2)
    (tmp_path / "run" / "forecasts.jsonl").unlink(missing_ok=True)
    assert check(tmp_path / "run") == []


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
    # One slot and many samples: to generate takes ten times as long as to train, so groups always wait.
    batch = BatchSize(prompts=3, samples=24, micro=72)
    recipe = replace(recipe, placement=Local(generators=2), decode_slots=1, batch=batch)
    with pytest.raises(CutError):
        run(recipe, tmp_path / "run", progress=cut_at(8))
    saved = load_state(tmp_path / "run" / "checkpoints" / "step-00006" / "training")
    run(recipe, tmp_path / "run", resume=True)
    record = RunRecord.read(tmp_path / "run")
    rows = lines(tmp_path / "run" / "groups.jsonl")
    ends = [pair for row in rows for pair in zip(row["prompt"], row["epoch"], strict=True)]
    assert len(ends) == len(set(ends)) == 3 * STEPS
    steps = record.steps()
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    for step in steps:
        ledger = step["ledger"]
        assert ledger["admitted"] == sum(n for name, n in ledger.items() if name != "admitted")
        assert step.get("staleness_max", 0) <= 2
    assert check(tmp_path / "run") == []
    assert steps[-1]["restarted"] == len(saved["generator"]["in_flight"]) > 0
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
