"""The checker of records finds each fault that is put into the record of a real run, and none in the run."""

import json
import shutil
from dataclasses import replace
from functools import partial
from typing import cast

import pytest
from record_checker import RULES, check
from small_runs import small_recipe

from scalerl.rl.config.settings import Suite
from scalerl.rl.tasks.chain import Chain
from scalerl.rl.train import train


class CutError(Exception):
    """A crash, where a watcher stands."""


def straight(run, axis, target):
    """A forecast of any run, however short."""
    last = run.evals[-1].pass_rate
    curve = {"compute": [1.0, target], "median": [last] * 2, "lo": [0.0] * 2, "hi": [1.0] * 2}
    row = {"made_at_step": run.evals[-1].step, "time": 0.0, "axis": axis, "target_compute": target}
    compute = float(run.compute(axis)[-1])
    return row | {"compute": compute, "median": last, "prediction": [0, 1], "curve": curve, "fit_json": {}}


@pytest.fixture(scope="module")
def sound(guesser, tmp_path_factory):
    """A run of 14 steps that was cut twice: after steps 8 and 11, with checkpoints of 6 and 9."""
    recipe = small_recipe(guesser)
    suite = Suite("other", replace(cast(Chain, recipe.task), seed=9), every=2)
    recipe = replace(recipe, evaluation=replace(recipe.evaluation, downstream=(suite,)))
    folder = tmp_path_factory.mktemp("runs") / "run"

    def go_on(watch=lambda progress: None):
        how = {"progress": watch, "forecaster": straight, "evaluate_aside": False}
        train(recipe, folder, recipe.model, resume=True, **how)

    for step in (8, 11):

        def crash(progress, step=step):
            if progress.step == step and not progress.evaluated:
                raise CutError

        with pytest.raises(CutError):
            go_on(crash)
        assert check(folder, killed=True) == []
    go_on()
    return folder


def test_a_sound_run_has_no_faults(sound):
    assert check(sound) == []
    lost = [json.loads(line) for line in (sound / "lost.jsonl").read_text().splitlines()]
    assert [row["lost"]["steps"] for row in lost if "lost" in row] == [2, 2]
    assert len((sound / "forecasts.jsonl").read_text().splitlines()) == 2


def edit(name, change):
    """A mutation of the rows of a file: `change` takes the list of them, and returns it or changes it."""

    def mutate(folder):
        path = folder / name
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        found = change(rows)
        path.write_text("".join(json.dumps(row) + "\n" for row in (rows if found is None else found)))

    return mutate


def put(name, number, key, value):
    """A value into a row of a file; `key` is dotted, and `value` may be a function of what was there."""

    def change(rows):
        *tables, last = key.split(".")
        inner = rows[number]
        for table in tables:
            inner = inner[table]
        inner[last] = value(inner[last]) if callable(value) else value

    return edit(name, change)


step, evaluation = partial(put, "steps.jsonl"), partial(put, "evals.jsonl")
groups, prompts = partial(put, "groups.jsonl"), partial(put, "eval_prompts.jsonl")
forecast = partial(put, "forecasts.jsonl")


def move_fate(rows):
    """A group of one step has another fate, and the lists keep their lengths."""
    fates = next(row["fate"] for row in rows if "trained" in row["fate"])
    fates[fates.index("trained")] = "zero_variance"


def swap_steps(rows):
    """The groups of two steps, which keep their numbers."""
    rows[4], rows[5] = rows[5] | {"step": 5}, rows[4] | {"step": 6}


def repeat_group(rows):
    """A group of one step again in the next."""
    for key in ("prompt", "epoch", "fate", "correct", "n"):
        rows[5][key][0] = rows[4][key][0]


def keep_lines(n):
    """The first lines, counted from the end where n is negative."""
    return lambda rows: rows[:n]


def drop(number):
    """A line is gone."""
    return lambda rows: rows[:number] + rows[number + 1 :]


def again(number):
    """A line twice."""
    return lambda rows: [*rows[: number + 1], *rows[number:]]


def less(value):
    return value - 0.01


def more(value):
    return value + 1


def cut_twice(rows):
    """As when a resume was killed between the copy of what it cuts and the cut: the same block twice."""
    return [*rows[: next(i for i, row in enumerate(rows) if i and "lost" in row)], *rows]


def leave_out_a_step(rows):
    """The first line of steps.jsonl that was cut."""
    del rows[next(i for i, row in enumerate(rows) if row.get("file") == "steps.jsonl")]


def forget_queue(rows):
    del rows[2]["queue"]


def tear(folder):
    path = folder / "steps.jsonl"
    path.write_bytes(path.read_bytes()[:-20])


def not_finished(folder):
    """As when a run that had ended was cut back."""
    for name in ("steps.jsonl", "groups.jsonl"):
        edit(name, keep_lines(9))(folder)
    for name in ("evals.jsonl", "eval_prompts.jsonl"):
        edit(name, keep_lines(5))(folder)


def lose_an_evaluation(folder):
    for name in ("evals.jsonl", "eval_prompts.jsonl"):
        edit(name, drop(3))(folder)


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_recipe(folder, **changes):
    recipe = json.loads((folder / "config.json").read_text())["recipe"]
    change_config(folder, recipe=recipe | changes)


WHEN = {"role": "generator", "who": "g0", "node": "n"}
MUTATIONS = {
    # form
    "a torn line": (tear, "its last line is unfinished"),
    "a line that is no object": (edit("evals.jsonl", lambda rows: [*rows, 3]), "no JSON object"),
    "a key that is missing": (edit("steps.jsonl", forget_queue), "without queue"),
    "a file that is missing": (lambda folder: (folder / "groups.jsonl").unlink(), "groups.jsonl: missing"),
    "a null": (step(3, "groups", None), "a value is not of the kind"),
    # steps
    "a step dropped": (edit("steps.jsonl", drop(4)), "steps.jsonl: the steps are"),
    "a step twice": (edit("steps.jsonl", again(4)), "steps.jsonl: the steps are"),
    "another version": (step(4, "version", 4), "step 5: its version is 4"),
    "a skipped step": (step(4, "skipped", True), "step 5: skipped is True"),
    "groups of a step dropped": (edit("groups.jsonl", drop(4)), "have other steps"),
    "the last groups missing": (edit("groups.jsonl", keep_lines(-1)), "have other steps"),
    # evaluations
    "an evaluation lost": (lose_an_evaluation, "where [0, 2, 4, 6, 8, 10, 12, 14] are due"),
    "an evaluation without its prompts": (edit("eval_prompts.jsonl", drop(2)), "have other steps"),
    "an evaluation twice": (edit("evals.jsonl", again(2)), "not in order, or one twice"),
    "the weights of a run cut back": (not_finished, "checkpoints/final is there after 9 of 14 steps"),
    "another pass rate": (evaluation(3, "pass_rate", less), "and its prompts make it"),
    "a success more": (prompts(3, "correct", lambda c: [(c[0] + 1) % 3, *c[1:]]), "make it"),
    "another spread": (evaluation(3, "mean_p_1mp", more), "mean_p_1mp is"),
    "other prompts": (prompts(3, "prompt_set", "other"), "other held-out prompts"),
    "fewer samples": (evaluation(3, "n_samples", 1), "and eval_prompts.jsonl"),
    "failures that are correct": (evaluation(3, "failed", lambda f: 1.0 + f), "are correct and"),
    "samples that nobody consumed": (evaluation(3, "samples", more), "and the steps consumed"),
    # groups and the ledger
    "a list too short": (groups(3, "correct", lambda c: c[:-1]), "lists of groups.jsonl"),
    "a group repeated": (edit("groups.jsonl", repeat_group), "comes twice"),
    "groups in another order": (edit("groups.jsonl", swap_steps), "and the groups make it"),
    "an epoch left out": (groups(0, "epoch", lambda d: [1, *d[1:]]), "and 0 was next"),
    "another fate": (edit("groups.jsonl", move_fate), "and groups.jsonl {"),
    "a fate of no name": (groups(3, "fate", lambda f: ["lost", *f[1:]]), "unknown fates ['lost']"),
    "a correct completion more": (groups(3, "correct", lambda c: [c[0] ^ 1, *c[1:]]), "correct is"),
    "more correct than there are": (groups(3, "correct", lambda c: [7, *c[1:]]), "more correct"),
    "a smaller group": (groups(3, "n", lambda n: [n[0] - 1, *n[1:]]), "not 3 of 6"),
    "a share of zero variance": (step(3, "zero_variance", lambda z: 1 - z + 1 / 3), "zero_variance is"),
    "completions used": (step(3, "completions_used", 99), "completions_used is 99"),
    "a failure without a reason": (step(3, "failed", {"": 1}), "failed is"),
    "a ledger that does not balance": (step(3, "ledger.admitted", more), "groups were admitted"),
    "groups in flight": (step(3, "queue.generating", more), "and in the queue"),
    # counters
    "seconds that fall": (step(5, "device_seconds.train", 0.0), "device_seconds.train falls"),
    "idle seconds that fall": (step(5, "idle_seconds.train", -0.1), "idle_seconds.train falls"),
    "tokens of an evaluation": (evaluation(2, "tokens.generated", 1), "evaluation 4: tokens.generated falls"),
    "tokens after an evaluation": (evaluation(2, "tokens.trained", 1e6), "step 5: tokens.trained falls"),
    "a restart undone": (step(5, "restarted", 3), "step 7: restarted falls"),
    "a role that is gone": (step(5, "device_seconds", {"train": 9.0}), "without generate"),
    "idle seconds left out": (step(5, "device_seconds.idle", more), "trainers were held for"),
    "waits that took longer": (step(5, "idle_seconds.train", more), "and worked and waited"),
    "more trainers": (lambda f: change_config(f, devices={"trainers": 2}), "config.json has 2"),
    "tokens from nowhere": (step(5, "mean_length", 1000.0), "tokens consumed"),
    "tokens trained twice": (step(5, "tokens.trained", lambda t: t + 500), "tokens trained, of"),
    "weights of another model": (step(5, "weight_sync.bytes", more), "and there is one model"),
    "weights in no time": (step(5, "weight_sync.seconds", 0), "bytes of weights in 0 s"),
    "weights before their time": (step(5, "weight_sync.update_seconds", -1.0), "were updated before"),
    # single values
    "a share above 1": (step(5, "interrupted", 2.0), "which is no share"),
    "a mean above the largest": (step(13, "ratio_mean", 1e6), "ratio_mean is"),
    "a token too old": (step(13, "staleness_max", 3), "shares"),
    "a KV cache too old": (step(5, "kv_staleness_max", 3), "and 2 is the bound"),
    "another mean age": (step(13, "staleness_mean", less), "staleness_mean is"),
    "another seed": (lambda folder: change_config(folder, seed=7), "seed 7, and 0 in its recipe"),
    "code without a sandbox": (lambda folder: edit_recipe(folder, task={"kind": "code"}), "no sandbox that"),
    "a checkpoint of the future": (lambda f: (f / "checkpoints" / "step-00099").mkdir(), "step-00099, and"),
    # forecasts and the timeline
    "a forecast of no evaluation": (forecast(0, "made_at_step", 5), "no evaluation of that step"),
    "a forecast twice": (edit("forecasts.jsonl", again(1)), "at the shares"),
    "a forecast from elsewhere": (forecast(0, "compute", 3.5), "made at 3.5 steps"),
    "a forecast to elsewhere": (forecast(0, "target_compute", 20.0), "which is not the budget"),
    "a forecast outside": (forecast(0, "median", 2.0), "and the interval"),
    "a band the wrong way": (forecast(0, "curve.lo", [1.0, 1.0]), "leaves the band"),
    "more work than time": (
        edit("timeline.jsonl", lambda rows: [WHEN | {"began": 0.0, "ended": 1.0, "busy": 2.0}]),
        "busy for 2.0 s",
    ),
    # downstream.jsonl
    "a suite of no evaluation": (put("downstream.jsonl", 0, "step", 1), "no evaluation of that step"),
    "a suite with other counters": (put("downstream.jsonl", 1, "samples", more), "samples is not that of"),
    "a suite with another rate": (put("downstream.jsonl", 1, "pass_at_k", 0.987), "pass_at_k is 0.987"),
    "a suite twice": (edit("downstream.jsonl", again(1)), "twice"),
    # samples.jsonl
    "a sample of no evaluation": (put("samples.jsonl", 0, "step", 1), "no such prompt in the evaluation"),
    "a sample of another prompt": (put("samples.jsonl", 9, "prompt", "chain/9/9"), "no such prompt in the"),
    "a sample that never ended": (put("samples.jsonl", 0, "finish", "stopped"), "stopped after"),
    "a sample of the future": (put("samples.jsonl", 0, "versions", [0, 99]), "by the versions [0, 99]"),
    "samples in disorder": (edit("samples.jsonl", lambda rows: rows[::-1]), "not in order"),
    # lost.jsonl
    "a cost that is wrong": (put("lost.jsonl", 0, "lost.tokens.generated", more), "lost.tokens.generated is"),
    "steps that were not lost": (put("lost.jsonl", 0, "lost.steps", 3), "lost.steps is 3"),
    "a cut line left out": (edit("lost.jsonl", leave_out_a_step), "and of the groups of"),
    "what was cut recorded twice": (edit("lost.jsonl", cut_twice), "have been recorded before"),
    "a cut without its cost": (edit("lost.jsonl", drop(0)), "a line before the cost of its cut"),
    "a cost without a cut": (edit("lost.jsonl", lambda rows: rows[:1]), "no line was cut"),
    "a cut line of no file": (put("lost.jsonl", 1, "file", "config.json"), "neither the cost of a cut nor"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_is_found(sound, tmp_path, name):
    mutate, expected = MUTATIONS[name]
    folder = tmp_path / "run"
    shutil.copytree(sound, folder, ignore=shutil.ignore_patterns("*.safetensors", "tokenizer*"))
    mutate(folder)
    faults = check(folder)
    assert any(expected in fault for fault in faults), faults


def test_each_rule_finds_a_fault(sound, tmp_path):
    """No rule is there that nothing can break."""
    from record_checker.form import Record

    left = {rule.__name__ for rule in RULES}
    for number, (mutate, _) in enumerate(MUTATIONS.values()):
        folder = tmp_path / str(number)
        shutil.copytree(sound, folder, ignore=shutil.ignore_patterns("*.safetensors", "tokenizer*"))
        mutate(folder)
        record = Record(folder, killed=False)
        if not record.faults:
            left -= {rule.__name__ for rule in RULES if _finds(rule, record)}
    assert not left


def _finds(rule, record):
    try:
        return any(rule(record))
    except (KeyError, TypeError):
        return False
