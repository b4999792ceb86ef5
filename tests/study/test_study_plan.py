"""The plan of a study: what is run, on what terms, and what is refused or warned of before anything is."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from scalerl.cli.main import main
from scalerl.errors import InputError
from scalerl.forecast.recipes import by_recipe
from scalerl.jsonl import plain
from scalerl.record.reader import RunRecord
from scalerl.rl.config.recipe import load_recipe
from scalerl.rl.config.settings import FlopsBudget
from scalerl.study.arms import Axis, Grid, Listed
from scalerl.study.plan import make_plan, rate_in_words, write_plan
from scalerl.study.record import StudyRecord
from scalerl.study.run.estimate import estimate, short_of_steps
from scalerl.study.spec import LearningRate, Stop, Study, load_study

DAPO = {"dapo": {"loss": {"kind": "dapo"}}}
STUDY = Study(base="demo", seeds=3, arm=DAPO)


def written(tmp_path, text):
    file = tmp_path / "lr.toml"
    file.write_text(text)
    return file


def test_a_study_file_is_read_and_its_base_may_stand_beside_it(tmp_path):
    (tmp_path / "mine.toml").write_text(
        'model = "m"\n[task]\nkind = "chain"\n[budget]\nkind = "steps"\namount = 400'
    )
    study = load_study(written(tmp_path, 'base = "mine.toml"\nseeds = [4, 7]\n[arm.a.loss]\nmax_ratio = 4'))
    assert (study.name, study.seed_list, study.rule) == (
        "lr",
        (4, 7),
        Listed({"a": {"loss": {"max_ratio": 4}}}),
    )
    assert make_plan(study).arms[0].recipe.model == "m"


def test_recipes_that_arms_are_made_of_may_stand_beside_the_study_too(tmp_path):
    (tmp_path / "other.toml").write_text(
        'model = "m"\ntask = {kind = "chain"}\nloss = {kind = "gspo"}\nbudget = {kind = "steps", amount = 9}'
    )
    (tmp_path / "demo").mkdir()  # no run: the recipe of the package it is
    study = load_study(
        written(tmp_path, 'base = "demo"\nseeds = 3\n[arms]\nkind = "leave_one_out"\nwithout = "other.toml"')
    )
    assert [arm.name for arm in make_plan(study).arms] == [
        "base",
        "loss=gspo",
        "averaging=sample",
        "advantage=prompt_std",
        "curriculum=no_positive_resampling",
        "length=forced_interruption",
    ]


def test_every_arm_has_every_seed_on_one_budget_and_one_base_model():
    study = replace(STUDY, models=("chain-base:seed=1", "chain-base:seed=2"), budgets=(5e10, 1e11, 2e11))
    study = replace(study, set={"evaluation": {"count": 32}})
    plan = make_plan(study)
    assert [(run.arm, run.seed) for run in plan.runs] == [
        (arm, seed) for seed in (0, 1, 2) for arm in ("base", "dapo")
    ]
    assert {(run.seed, run.model) for run in plan.runs} == {
        (0, "chain-base:seed=1"),
        (1, "chain-base:seed=2"),
        (2, "chain-base:seed=1"),
    }
    recipes = [plan.recipe(run, plan.arms[i % 2]) for i, run in enumerate(plan.runs)]
    assert {recipe.budget for recipe in recipes} == {FlopsBudget(2e11)}
    assert {recipe.evaluation for recipe in recipes} == {recipes[0].evaluation}
    assert [recipe.seed for recipe in recipes] == [0, 0, 1, 1, 2, 2]


def test_an_arm_with_another_budget_of_thinking_begins_from_the_same_model():
    plan = make_plan(
        replace(STUDY, arm={"short": {"context": {"thinking": 12}, "length": {"low": 12, "high": 12}}})
    )
    assert {run.model for run in plan.runs} == {"chain-base:thinking=16"}


def test_trials_of_the_learning_rate_are_alike_for_all_arms_and_use_other_seeds():
    plan = make_plan(replace(STUDY, learning_rate=LearningRate(values=(1e-5, 1e-4), budget=3e11, seeds=2)))
    trials = list(plan.trials())
    assert len(trials) == 2 * 2 * 2
    assert {run.seed for run, _ in trials} == {1_000_000, 1_000_001}
    assert {arm.recipe.optimiser.lr for _, arm in trials} == {1e-5, 1e-4}
    assert "tuned for each arm by one rule" in rate_in_words(plan)
    assert rate_in_words(make_plan(STUDY)) == "fixed, 2.5e-06 for all arms"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": 0}, "seeds must be a number from 1 to 1000"),
        ({"seeds": 50_000_000}, "seeds must be a number from 1 to 1000"),
        ({"seeds": (3, 10**20)}, "a list of whole numbers up to 999999"),
        ({"name": "a\x00b"}, "name must be that of a folder"),
        ({"seeds": (1, 1)}, "one is given twice"),
        ({"budgets": (2e11, 1e11)}, "budgets must be above 0, finite, and rise"),
        ({"retries": -1}, "retries must be 0 or more"),
        ({"target": 1.2}, "target must be a pass rate"),
        ({"budgets": (1e11, math.inf)}, "budgets must be above 0, finite, and rise"),
        ({"arm": {"base": {"decode_slots": 3}}}, "the base is an arm of its own already"),
        ({"name": "../.."}, "name must be that of a folder"),
        ({"stop": Stop(below_best=0.9)}, "there is no budget to stop at"),
    ],
)
def test_a_study_that_makes_no_sense_is_none(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(STUDY, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budgets": (5e10, 2e11)}, "falls between two of the 30 evaluations"),
        ({"budgets": (1e11, 2e12)}, "falls between two"),
        ({"budgets": (2e11, 2e12)}, "3 evaluations up to 2e.11 are too few for a curve"),
        (
            {"set": {"budget": {"kind": "steps", "amount": 10}}},
            "10 steps, of which 10 are warm-up",
        ),
        ({"set": {"evaluation": {"count": 5}}}, "5 evaluations up to"),
        ({"arm": {"a": {"seed": 3}}}, "arm a: changes seed, and all arms are compared at one"),
        ({"arm": {"a": {"evaluation": {"samples": 8}}}}, "arm a: changes evaluation"),
        ({"arm": {"a": {"budget": {"amount": 3}}}}, "arm a: changes budget"),
        ({"arm": {"a": {"health": {"on_alarm": "pause"}}}}, "arm a: changes nothing that is trained"),
        ({"arm": {"a": {"task": {"k_max": 5, "skip": []}}}}, "arm a: its held-out prompts are others"),
        (
            {"arm": {"a/b": {"decode_slots": 2}, "a b": {"decode_slots": 3}}},
            "'a/b' and 'a b' would share a folder",
        ),
        ({"set": {"seed": 4}}, "set.seed: the seeds of a study are those of `seeds`"),
        ({"combine": 2}, "combine: 2 arms are to be one, and there are 1 beside the first"),
        (
            {"combine": 2, "arm": {**DAPO, "gspo": {"loss": {"kind": "gspo"}}}},
            "combine: any two of these arms change the same",
        ),
        (
            {"arm": {"low": {"optimiser": {"lr": 1e-5}}}, "learning_rate": LearningRate((1e-5, 1e-4), 1e12)},
            "arm low: changes optimiser.lr, which .learning_rate. chooses",
        ),
        (
            {"arm": {}, "arms": Axis("optimiser.lr", (3e-4, 3e-4, 1e-4))},
            "two are named 'optimiser.lr=0.0003'",
        ),
        ({"arm": {"": {"decode_slots": 2}}}, "arm '': no name that can be printed"),
        ({"arm": {"a\nb": {"decode_slots": 2}}}, "no name that can be printed"),
        ({"arm": {"a": {"schedule": {"k": True}}}}, "arm a: schedule.k: cannot be true or false"),
        ({"arm": {}}, "one .arms. table; found neither"),
        (
            {"arm": {}, "arms": Grid({"decode_slots": tuple(range(1, 300))})},
            "299 are more than a study tells apart",
        ),
        ({"arm": {}, "arms": Grid({"lora": (1,), "lora.rank": (2, 3)})}, "which has a value of its own"),
        (
            {"models": ("m",), "arm": {"a": {"model": "other"}}},
            "models: the model of arm a is its own",
        ),
        (
            {"learning_rate": LearningRate(values=(1e-5, 1e-4), budget=1e13)},
            "learning_rate.budget: 1e.13 has 200 of the 30 evaluations",
        ),
    ],
)
def test_a_study_that_could_not_compare_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        make_plan(replace(STUDY, **changes))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('base = "demo"\nseed = 3', "unknown key 'seed'; did you mean 'seeds'"),
        ('base = "demo"', "missing key 'seeds'"),
        ('base = "demo"\nseeds = 2\n[arms]\nkind = "leave_one_in"', "expected 'arms', 'leave_one_out'"),
        (
            'base = "demo"\nseeds = 2\n[arms]\nkind = "axis"\nfield = "decode_slots"',
            "unknown key 'arms.field'",
        ),
        (
            'base = "demo"\nseeds = 2\n[arms]\nkind = "sensitivity"\n[[arms.sweeps]]\nlos = {}',
            "unknown key 'arms.sweeps.los'",
        ),
        ('base = "demo"\nseeds = 2\n[stop]\nbelow_best = 0.2', "below_best must be a probability"),
        ('base = "demo"\nseeds = 2\n[arms]\n[arm.a]\nrows = 3', "missing key 'arms.kind'"),
        ("base = ", "not TOML"),
        ('base = "demo"\nseeds = 2\nbudgets = 2e11', "budgets: expected a list, e.g. [1, 2], found 2"),
        ('base = "demo"\nseeds = "x"', "seeds: expected a whole number or a list, e.g. [1, 2], found 'x'"),
        ('base = "demo"\nseeds = ["a"]', "seeds: expected a whole number, found 'a'"),
        ('base = "demo"\nseeds = 2\nset = 3', "set: expected a table, found 3"),
        ('base = "demo"\nseeds = true', "seeds: cannot be true or false (found True)"),
        ('base = "demo"\nseeds = [0, true]', "seeds: cannot be true or false"),
        ('base = "demo"\nseeds = 2\nstop = 3', "stop: expected a table, found 3"),
    ],
)
def test_a_file_that_is_no_study_is_refused_in_a_line(tmp_path, capsys, text, message):
    assert main(["study", str(written(tmp_path, text))]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_few_seeds_and_arms_that_cannot_be_told_apart_are_warned_of():
    assert any(text.startswith("one seed") for text in make_plan(replace(STUDY, seeds=1)).warnings)
    assert any(text.startswith("2 seeds") for text in make_plan(replace(STUDY, seeds=2)).warnings)
    assert not make_plan(STUDY).warnings
    (warning,) = make_plan(replace(STUDY, set={"schedule": {"k": 0}})).warnings
    assert warning.startswith("base, dapo train on-policy, where importance ratios are 1 but for rounding")
    mixed = {"a": {"schedule": {"kind": "off_policy", "k": 1}}, "b": {"schedule": {"k": 0}}}
    assert not make_plan(replace(STUDY, arm=mixed)).warnings  # each its own schedule


def test_a_study_may_grow_and_not_become_another(tmp_path):
    write_plan(make_plan(STUDY), tmp_path)
    grown = make_plan(replace(STUDY, seeds=5, arm={**DAPO, "k1": {"schedule": {"k": 1}}}))
    write_plan(grown, tmp_path)
    record = StudyRecord.read(tmp_path)
    assert (len(record.runs), record.runs[0].outcome, record.plan["base"]) == (15, "not started", "base")
    with pytest.raises(InputError, match="holds arm k1, which is not in this study; it may grow, not shrink"):
        write_plan(make_plan(replace(STUDY, seeds=5)), tmp_path)
    with pytest.raises(InputError, match="holds arm base seed 3 of model"):
        write_plan(make_plan(replace(STUDY, arm={**DAPO, "k1": {"schedule": {"k": 1}}})), tmp_path)
    with pytest.raises(InputError, match="holds a study with rules"):
        write_plan(make_plan(replace(STUDY, models=("chain-base:seed=4",))), tmp_path)
    gspo = {"dapo": {"loss": {"kind": "gspo"}}, "k1": {"schedule": {"k": 1}}}
    with pytest.raises(InputError, match="holds arm dapo with loss"):
        write_plan(make_plan(replace(STUDY, seeds=5, arm=gspo)), tmp_path)
    slower = {**DAPO, "k1": {"schedule": {"k": 1}}, "slow": {"optimiser": {"lr": 1e-6}}}
    write_plan(make_plan(replace(STUDY, seeds=5, arm=slower)), tmp_path)  # with a rate of its own
    with pytest.raises(
        InputError, match=r"holds a study with budgets .1500000000000.0., and here .*; give .* -o"
    ):
        write_plan(make_plan(replace(STUDY, budgets=(3e11,))), tmp_path)


ROOT = Path(__file__).parents[2]
FILES = [ROOT / "examples" / "three_arms.toml", *(ROOT / "benchmarks" / "studies").glob("*.toml")]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_our_own_study_files_are_studies(file):
    plan = make_plan(load_study(file))
    assert plan.study.name == file.stem
    assert len(plan.runs) == len(plan.arms) * len(plan.seeds)


def test_the_cost_is_computed_from_runs_that_have_shown_it(tmp_path):
    plan = make_plan(replace(STUDY, price=3.0, learning_rate=LearningRate((1e-5, 1e-4), 5e11)))
    unknown = estimate(plan, tmp_path, [], cores=2)
    assert unknown.runs == 2 * (3 + 2)
    assert math.isnan(unknown.gpu_hours)
    assert math.isnan(unknown.dollars)
    assert unknown.compute == 2 * (3 * 1.5e12 + 2 * 5e11)
    like = tmp_path / "like"
    like.mkdir()
    rows = [
        {
            "step": step,
            "pass_rate": 0.2,
            "n_prompts": 100,
            "n_samples": 2,
            "device_seconds": {
                "generate": 1800 * step,
                "train": 1000 * step,
                "evaluate": 30 * step,
                "idle": 800 * step,
            },
            "flops": {"generate": 1e11 * step, "train": 3e11 * step},
        }
        for step in range(3)
    ]
    (like / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert RunRecord.read(like).compute("gpu_hours")[-1] == 2
    known = estimate(plan, tmp_path, [like], cores=2)  # an hour for 4e11
    assert known.gpu_hours == pytest.approx(unknown.compute / 4e11)
    # 60 seconds for 3 evaluations of 200 completions; 31 of 400 each here, 11 of a trial.
    hours = 2 * (3 * 31 + 2 * 11) * 400 * 60 / 600 / 3600
    assert known.evaluation_hours == pytest.approx(hours)
    assert known.wall_hours == pytest.approx((known.gpu_hours + hours) / 2)
    assert known.dollars == pytest.approx(3 * (known.gpu_hours + hours))
    base = load_recipe("demo")
    weights = 2 * (4 * 64 * 64 + 3 * 64 * 176 + 2 * 64) + 64 + 64 * 24
    # 3 tokens are guessed for the phrase, of 10 letters.
    cache = (base.decode_slots + base.evaluation.decode_slots) * (26 + 19 + 3) * 2 * 2 * 64 * 4
    assert known.arms[0].memory_bytes == pytest.approx(weights * 24 + cache, rel=0.01)
    two = {**DAPO, "k1": {"schedule": {"k": 1}}}
    more = estimate(make_plan(replace(STUDY, arm=two, combine=2)), tmp_path, [like], cores=2)
    assert [arm.arm for arm in more.arms] == ["base", "dapo", "k1", "the best 2 combined"]
    assert more.compute == 4 * 3 * 1.5e12
    assert more.arms[3].gpu_hours == pytest.approx(3 * 1.5e12 / 4e11)


def test_a_budget_of_a_few_steps_is_warned_of():
    assert list(short_of_steps(make_plan(STUDY))) == []
    (base, dapo) = short_of_steps(make_plan(replace(STUDY, budgets=(1e10,))))
    assert base.startswith("base: about 4 steps")  # a run of 43 steps took 1e11
    assert "steps up to 1e+10 flops; evaluations are made between steps, and a curve needs 6" in base
    assert dapo.startswith("dapo: about 4 steps")


def test_the_last_of_the_budgets_is_the_amount_of_the_base():
    plan = make_plan(replace(STUDY, set={"budget": {"kind": "steps"}}, budgets=(15.0, 30.0)))
    assert (plan.axis, plan.base.budget.amount) == ("steps", 30.0)


def test_a_base_model_that_is_not_there_is_said_before_the_first_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = 'base = "demo"\nseeds = 3\nmodels = ["./typo"]\n[arm.dapo]\nloss.kind = "dapo"'
    assert main(["study", str(written(tmp_path, text))]) == 2
    assert "typo" in capsys.readouterr().err
    assert not (tmp_path / "studies").exists()


def test_a_dry_run_prints_the_table_and_runs_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = written(tmp_path, 'base = "demo"\nseeds = 2\n[arm.dapo]\nloss.kind = "dapo"')
    assert main(["study", str(file), "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert [line.split() for line in out.splitlines()[1:3]] == [
        ["base", "2", "3", "TFLOP", "?", "0.0949", "GiB", "-"],
        ["dapo", "2", "3", "TFLOP", "?", "0.0949", "GiB", "loss.kind", "=", "dapo"],
    ]
    assert "fixed, 2.5e-06 for all arms" in out
    assert "--like RUN" in out
    assert err.startswith("warning: 2 seeds an arm")
    assert not (tmp_path / "studies").exists()


def test_a_dry_run_refuses_what_the_run_would(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = written(tmp_path, 'base = "demo"\nseeds = 2\n[arm.new]\nloss.kind = "dapo"')
    before = make_plan(replace(STUDY, seeds=2))
    write_plan(before, tmp_path / "old")
    combined = {"decision": "combined", "arm": "both", "of": ["dapo", "k1"]}
    (tmp_path / "old" / "decisions.jsonl").write_text(json.dumps(combined) + "\n")
    for more in (["--dry-run"], []):
        assert main(["study", str(file), "-o", "old", *more]) == 2
        assert "old: holds arm dapo, which is not in this study; it may grow" in capsys.readouterr().err
    assert StudyRecord.read(tmp_path / "old").arms[1].name == "dapo"


def test_seeds_of_a_tracked_study_are_known_as_seeds(tmp_path):
    study = replace(STUDY, set={"tracking": {"to": ["tensorboard"]}})
    plan, records = make_plan(study), []
    for run in plan.runs:
        arm = next(arm for arm in plan.arms if arm.name == run.arm)
        recipe = plain(plan.recipe(run, arm).to_json())
        assert recipe["tracking"]["name"] == f"{run.arm}-seed{run.seed}"
        records.append(RunRecord(tmp_path / run.folder, {"name": run.arm, "recipe": recipe}, ()))
    found = by_recipe(records, lambda run: run, lambda run: str(run.path))
    assert {name: len(runs) for name, runs in found.items()} == {"base": 3, "dapo": 3}
