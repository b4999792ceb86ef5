"""The arms of a study: what is compared, and what is refused before anything is spent."""

import json
from dataclasses import replace

import pytest

from scalerl.errors import InputError
from scalerl.rl.algo.averaging import SampleAverage
from scalerl.rl.algo.loss import Cispo, Dapo, Grpo
from scalerl.rl.algo.schedule import OffPolicy, PipelineRL
from scalerl.rl.config.optimiser import AdamW
from scalerl.rl.config.recipe import load_recipe
from scalerl.study.arms import (
    Axis,
    Grid,
    LeaveOneOutArms,
    Listed,
    SensitivityArms,
    SweepArms,
    Systems,
    combine,
    expand,
)
from scalerl.study.plan import make_plan
from scalerl.study.spec import Study


@pytest.fixture(scope="module")
def base():
    return load_recipe("demo")


def test_leaving_out_takes_one_part_of_the_other_recipe_at_a_time(base):
    arms = {arm.name: arm.recipe for arm in expand(base, LeaveOneOutArms("deepseek_grpo"))}
    assert list(arms) == [
        "base",
        "schedule=off_policy",
        "loss=grpo",
        "fp32_logits=neither",
        "averaging=sample",
        "advantage=prompt_std",
        "zero_variance=keep",
        "truncated=keep",
        "curriculum=uniform",
        "length=none",
    ]
    assert arms["schedule=off_policy"].schedule == OffPolicy(k=8)
    assert arms["schedule=off_policy"].loss == base.loss
    assert arms["averaging=sample"].averaging == SampleAverage()
    assert arms["length=none"].task == base.task


def test_a_table_says_what_takes_the_place_of_each_part(base):
    without = {"loss": {"kind": "dapo", "max_ratio": 1.3}, "schedule": {"k": 2}}
    arms = {arm.name: arm.recipe for arm in expand(base, LeaveOneOutArms(without))}
    assert arms["loss=dapo"].loss == Dapo(max_ratio=1.3)
    assert len(arms) == 3


def test_systems_are_whole_recipes_on_the_bases_ground(base):
    arms = {arm.name: arm.recipe for arm in expand(base, Systems(("magistral", "minimax_m1")))}
    assert arms["magistral"].loss == Dapo()
    assert arms["minimax_m1"].schedule == OffPolicy(k=8)
    assert arms["minimax_m1"].batch.prompts == 80
    for recipe in arms.values():
        assert (recipe.model, recipe.task, recipe.context) == (base.model, base.task, base.context)


def test_systems_without_a_name_have_that_of_their_file(base, tmp_path):
    text = 'model = "m"\ntask = {kind = "chain"}\nbudget = {kind = "steps", amount = 9}\n'
    for name, loss in (("one", "dapo"), ("two", "gspo")):
        (tmp_path / f"{name}.toml").write_text(f'{text}loss = {{kind = "{loss}"}}')
    files = tuple(str(tmp_path / f"{name}.toml") for name in ("one", "two"))
    assert [arm.name for arm in expand(base, Systems(files))] == ["one", "two"]
    (tmp_path / "one.toml").write_text(f'name = "two"\n{text}loss = {{kind = "dapo"}}')
    with pytest.raises(InputError, match="two are named 'two'"):
        expand(base, Systems(files))


def test_axes_sweeps_and_grids(base):
    ks = expand(base, Axis("schedule.k", (0, 8)))
    assert [(arm.name, arm.recipe.schedule) for arm in ks] == [
        ("schedule.k=0", PipelineRL(0)),
        ("schedule.k=8", PipelineRL(8)),
    ]
    pairs = expand(base, Axis(("batch.prompts", "batch.samples"), ((16, 16), (32, 8))))
    assert [arm.recipe.batch.samples for arm in pairs] == [16, 8]
    sweep = SensitivityArms(
        (
            SweepArms({"kind": "dapo"}, "max_ratio", (1.2, 1.3)),
            SweepArms({"kind": "cispo"}, "max_ratio", (3.0,)),
        )
    )
    found = [(arm.name, arm.recipe.loss) for arm in expand(base, sweep)]
    assert found == [
        ("dapo max_ratio=1.2", Dapo(max_ratio=1.2)),
        ("dapo max_ratio=1.3", Dapo(max_ratio=1.3)),
        ("cispo max_ratio=3.0", Cispo(max_ratio=3.0)),
    ]
    beside = SensitivityArms(
        (
            SweepArms({"kind": "dapo", "min_ratio": 0.8}, "max_ratio", (1.2,)),
            SweepArms({"kind": "dapo", "min_ratio": 0.5}, "max_ratio", (1.2, 1.4)),
        )
    )
    assert [arm.name for arm in expand(base, beside)] == [
        "dapo min_ratio=0.8 max_ratio=1.2",
        "dapo min_ratio=0.5 max_ratio=1.2",
        "dapo min_ratio=0.5 max_ratio=1.4",
    ]
    grid = expand(base, Grid({"schedule.k": (1, 4), "optimiser.lr": (1e-5, 1e-4, 1e-3)}))
    assert len({(arm.recipe.schedule, arm.recipe.optimiser) for arm in grid}) == 6


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        (Listed({"same": {"loss": {"max_ratio": 5.0}}}), "arms 'base' and 'same' are the same recipe"),
        (
            Listed({"a": {"decode_slots": 2}, "b": {"decode_slots": 2}}),
            "arms 'a' and 'b' are the same recipe",
        ),
        (Listed({}), "two recipes at least"),
        (Listed({"a": {"los": {"max_ratio": 2}}}), r"arm a: unknown key 'los'; did you mean 'loss'\?"),
        (Axis("schedule.q", (1, 2)), "unknown key 'schedule.q'"),
        (Axis("schedule.k", (1, -2)), "k must be between 0 and 1000"),
        (Axis(("decode_slots", "seed"), ((1,), (2,))), "is not one value for each of 2 fields"),
        (LeaveOneOutArms({"los": 1}, ("los",)), "'los' is no part of the two recipes"),
        (LeaveOneOutArms({"loss": {"max_ratio": 5.0}}), "does not differ from the base"),
    ],
)
def test_a_study_that_cannot_compare_is_refused(base, arms, message):
    with pytest.raises(InputError, match=message):
        expand(base, arms)


def test_the_best_single_changes_combined(base):
    arms = {arm.name: arm for arm in expand(base, LeaveOneOutArms("deepseek_grpo"))}
    both = combine(base, [arms["loss=grpo"], arms["averaging=sample"]])
    assert both.name == "loss=grpo + averaging=sample"
    assert (both.recipe.loss, both.recipe.averaging) == (Grpo(), SampleAverage())
    assert both.recipe.schedule == base.schedule
    listed = expand(base, Listed({"a": {"optimiser": {"lr": 1e-4}}, "b": {"optimiser": {"warmup_steps": 3}}}))
    assert combine(base, listed[1:]).changes == {"optimiser": {"lr": 1e-4, "warmup_steps": 3}}


def test_what_cannot_be_combined_is_refused(base):
    listed = expand(base, Listed({"a": {"optimiser": {"lr": 1e-4}}, "b": {"optimiser": {"lr": 3e-4}}}))
    with pytest.raises(InputError, match=r"'a' and 'b' both change optimiser\.lr"):
        combine(base, listed[1:])
    listed = expand(base, Listed({"a": {"loss": {"kind": "dapo"}}, "b": {"loss": {"max_ratio": 2.0}}}))
    with pytest.raises(InputError, match="'a' and 'b' both change loss: one of them at a time"):
        combine(base, listed[1:])


def test_objects_in_python_are_the_tables_that_they_stand_for(base):
    """In every rule; study.json then has what a study file would have given."""
    rules = [
        (Listed({"a": {"loss": Dapo(max_ratio=1.3)}}), {"a": {"loss": {"kind": "dapo", "max_ratio": 1.3}}}),
        (Listed({"a": {"optimiser": AdamW(lr=1e-4)}}), {"a": {"optimiser": {"lr": 1e-4}}}),
        (Axis("loss", (Dapo(), Grpo())), {"loss=dapo": {"loss": {"kind": "dapo"}}, "loss=grpo": {}}),
        (Grid({"loss": (Dapo(), Cispo(3.0))}), {"loss=dapo": {"loss": {"kind": "dapo"}}, "loss=cispo": {}}),
        (LeaveOneOutArms({"loss": Dapo()}), {"loss=dapo": {"loss": {"kind": "dapo"}}}),
        (LeaveOneOutArms(replace(base, loss=Dapo())), {"loss=dapo": {"loss": {"kind": "dapo"}}}),
        (SensitivityArms((SweepArms(Dapo(), "max_ratio", (1.2, 1.4)),)), {"dapo max_ratio=1.2": {}}),
        (Systems((base, replace(base, name="b", loss=Dapo()))), {"b": {"loss": {"kind": "dapo"}}}),
    ]
    for rule, expected in rules:
        arms = {arm.name: arm for arm in expand(base, rule)}
        for name, changes in expected.items():
            found = json.loads(json.dumps(arms[name].to_json()["changes"]))
            for key, table in changes.items():
                assert found[key].items() >= table.items(), (rule, name)
    with pytest.raises(InputError, match=r"^arm a: expected its changes by the keys of a recipe, found 3"):
        expand(base, Listed({"a": 3}))  # pyright: ignore[reportArgumentType]


def test_a_base_may_be_a_recipe(base):
    changed = replace(base, loss=Dapo())
    plan = make_plan(
        Study(base=changed, seeds=1, arm={"g": {"loss": Grpo()}}, set={"optimiser": AdamW(lr=1e-4)})
    )
    assert [type(arm.recipe.loss) for arm in plan.arms] == [Dapo, Grpo]
    assert {arm.recipe.optimiser.lr for arm in plan.arms} == {1e-4}
    with pytest.raises(InputError, match=r"^recipe x: "):
        make_plan(Study(base="recipe x", seeds=1, arm={"g": {"loss": Grpo()}}))
