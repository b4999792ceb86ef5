"""Kinds of the user's own: how they are named, checked and kept, and what is said where they are wrong."""

import json
import math
import pickle
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from extensions import write_extensions

from scalerl import kinds, own_code
from scalerl.errors import InputError
from scalerl.rl.algo.curriculum import NoPositiveResampling
from scalerl.rl.algo.loss import Cispo
from scalerl.rl.config.recipe import changed, from_dict, load_recipe
from scalerl.study.spec import load_study

OWN = [
    "loss.kind=losses.py:Topr",
    "loss.max_ratio=2",
    "advantage.kind=advantages.py:SoftStd",
    "task.kind=tasks.py:Sums",
    "task.limits.seconds=0.5",
]
WRONG = """
from dataclasses import dataclass, field
from threading import Lock

@dataclass(frozen=True)
class Empty:
    x: int = 0

@dataclass
class Loose:
    def __call__(self, logp_NT, behaviour_logp_NT, advantage_N, sampled_NT):
        return None

@dataclass(frozen=True)
class Short:
    def __call__(self, logp_NT):
        return None

@dataclass(frozen=True)
class Held:
    lock: Lock = field(default_factory=Lock)

    def __call__(self, logp_NT, behaviour_logp_NT, advantage_N, sampled_NT):
        return None

@dataclass(frozen=True)
class Locked(Empty):
    def __post_init__(self):
        object.__setattr__(self, "lock", Lock())

    __call__ = Held.__call__

def function():
    return None
"""
LOSS = """
from dataclasses import dataclass
from scalerl.rl import TokenLoss

@dataclass(frozen=True)
class Mine:
    def __call__(self, logp_NT, behaviour_logp_NT, advantage_N, sampled_NT):
        value_NT = -advantage_N[:, None] * logp_NT
        {}
"""
LOSSES = "cispo, dapo, decoupled, grpo, gspo, reinforce"
CHOICES = f"the kinds are {LOSSES}, or your own as module:Class or file.py:Class"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working folder, with the files of docs/extend in it, and one of classes that are no losses."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    write_extensions(tmp_path)
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "syntax.py").write_text("def")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)")
    return tmp_path


def test_a_recipe_goes_through_toml_json_and_pickle(here):
    recipe = load_recipe("demo", OWN)
    assert (recipe.to_dict()["loss"], recipe.to_dict()["task"]["limits"]["seconds"]) == (
        {"kind": f"{here}/losses.py:Topr", "max_ratio": 2.0},
        0.5,
    )
    again = from_dict(json.loads(json.dumps(recipe.to_json())))
    assert again == recipe == pickle.loads(pickle.dumps(recipe)) == recipe.without_prompts()
    assert type(again.loss) is type(recipe.loss)


def test_another_process_unpickles_what_comes_from_a_file(here):
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer))"
    data = pickle.dumps(load_recipe("demo", OWN).task)
    done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, cwd="/", check=True)
    assert done.stdout.decode().startswith("Sums(terms=2, width=26, heldout=20")


@pytest.fixture
def recipes(here):
    """A folder with a recipe, a function, and a loss that imports a module beside it."""
    folder = here / "recipes"
    folder.mkdir()
    (folder / "caps_beside.py").write_text("CAP = 0.25\n")
    code = (here / "losses.py").read_text().replace("max_ratio: float = 1.0", "max_ratio: float = CAP")
    (folder / "near.py").write_text("from caps_beside import CAP\n" + code)
    (folder / "mine.toml").write_text(
        'model = "m"\nloss = {kind = "near.py:Topr"}\nbudget = {kind = "steps", amount = 1}\n'
        '[task]\nkind = "dataset"\npath = "x.jsonl"\n'
        'verifier = {kind = "function", name = "checks.py:check"}\n'
    )
    (folder / "checks.py").write_text("def check(text, answer):\n    return True\n")
    return folder


def test_a_file_beside_the_recipe_is_found_from_any_folder(here, recipes, monkeypatch):
    """Before one in the working folder; by the path in config.json a resume from elsewhere finds it."""
    (here / "near.py").write_text("raise RuntimeError('not this one')")
    recipe = load_recipe("recipes/mine.toml")
    values = recipe.to_dict()
    assert values["loss"] == {"kind": f"{recipes}/near.py:Topr", "max_ratio": 0.25}
    assert values["task"]["verifier"]["name"] == f"{recipes}/checks.py:check"
    run = here / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"recipe": recipe.to_json()}))
    monkeypatch.chdir("/")
    assert load_recipe(run) == recipe
    assert str(recipes) not in sys.path


def test_a_file_in_the_working_folder_is_found_where_none_is_beside_the_recipe(here, recipes):
    (recipes / "near.py").rename(here / "near.py")
    (here / "caps_beside.py").write_text("CAP = 0.5\n")
    assert load_recipe("recipes/mine.toml").to_dict()["loss"]["kind"] == f"{here}/near.py:Topr"


def test_another_process_finds_what_is_beside_a_file(recipes):
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer))"
    data = pickle.dumps(load_recipe(recipes / "mine.toml").loss)
    done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, cwd="/", check=True)
    assert done.stdout.decode().strip() == "Topr(max_ratio=0.25)"


def test_the_kinds_of_a_study_may_stand_beside_it(here, recipes):
    text = 'base = "mine.toml"\nseeds = 1\n[arms]\nkind = "axis"\nfields = "loss.kind"\n'
    (recipes / "study.toml").write_text(text + 'values = ["dapo", "near.py:Topr"]\n')
    study = load_study(recipes / "study.toml")
    assert isinstance(study.base, str)
    arms = {name: changes["loss"]["kind"] for name, changes in study.rule.changes(load_recipe(study.base))}
    assert arms == {"loss.kind=dapo": "dapo", "loss.kind=Topr": f"{recipes}/near.py:Topr"}


def test_an_object_in_python_is_kept_by_where_its_class_is(here):
    topr = own_code.load("losses.py:Topr")
    recipe = replace(load_recipe("demo"), loss=topr(max_ratio=3.0))
    assert recipe.to_dict()["loss"] == {"kind": f"{here}/losses.py:Topr", "max_ratio": 3.0}
    assert from_dict(recipe.to_dict()) == recipe


def test_a_class_of_the_program_is_kept_by_its_file(here):
    code = (here / "losses.py").read_text() + (
        "\nfrom dataclasses import replace\nfrom scalerl.rl import load_recipe\n"
        "if __name__ == '__main__':\n"
        "    recipe = replace(load_recipe('demo'), loss=Topr(4.0))\n"
        "    print(recipe.to_dict()['loss']['kind'], recipe.without_prompts().to_dict()['loss'])\n"
    )
    (here / "program.py").write_text(code)
    done = subprocess.run([sys.executable, "program.py"], capture_output=True, text=True, check=True)
    kind = f"{here}/program.py:Topr"
    assert done.stdout.strip() == f"{kind} {{'max_ratio': 4.0, 'kind': {kind!r}}}"


def test_a_module_in_the_working_folder_has_a_name(here):
    (here / "my_package").mkdir()
    (here / "my_package" / "parts.py").write_text((here / "losses.py").read_text())
    recipe = load_recipe("demo", ["loss.kind=my_package.parts:Topr"])
    assert recipe.to_dict()["loss"] == {"kind": "my_package.parts:Topr", "max_ratio": 1.0}


def test_an_installed_package_announces_a_name(here, monkeypatch):
    """config.json then has the module and the class."""
    (here / "announcing.py").write_text((here / "losses.py").read_text())
    info = here / "announcing-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: announcing\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[scalerl.losses]\ntopr = announcing:Topr\n")
    monkeypatch.syspath_prepend(here)
    recipe = load_recipe("demo", ["loss.kind=topr", "loss.max_ratio=7"])
    assert recipe.to_dict()["loss"] == {"kind": "announcing:Topr", "max_ratio": 7.0}
    for unknown in ("wrong.py:None_", "toprr"):
        with pytest.raises(
            InputError, match="cispo, dapo, decoupled, grpo, gspo, reinforce, topr, or your own"
        ):
            load_recipe("demo", [f"loss.kind={unknown}"])


def test_a_name_that_two_packages_announce_is_refused(here, monkeypatch, caplog):
    """Which of them comes first is an accident of the installation."""
    (here / "theirs.py").write_text((here / "losses.py").read_text())
    for name, announced in {
        "one": "topr = losses:Topr",
        "other": "topr = theirs:Topr\ncispo = theirs:Topr",
    }.items():
        info = here / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[scalerl.losses]\n{announced}\n")
    monkeypatch.syspath_prepend(here)
    both = "topr: installed packages announce losses:Topr and theirs:Topr by it: name one of these"
    with pytest.raises(InputError, match=f"loss.kind: {both}; the kinds are .*, reinforce, topr, or your"):
        load_recipe("demo", ["loss.kind=topr"])
    assert load_recipe("demo", ["loss.kind=theirs:Topr"]).to_dict()["loss"]["kind"] == "theirs:Topr"
    caches = kinds._warn_of_namesakes, kinds._announced
    for cache in caches:
        cache.cache_clear()
    for _ in range(2):
        # No package changes what the names of this one stand for.
        assert load_recipe("demo", ["loss.kind=cispo"]).loss == Cispo()
    for cache in caches:
        cache.cache_clear()
    (warned,) = caplog.messages
    assert warned.startswith("kind cispo: scalerl's own; an installed package announces one, too: ")
    assert warned.endswith(" theirs:Topr")
    # The same one, of two packages: one replaces the other.
    (here / "other-1.0.dist-info" / "entry_points.txt").write_text(
        "[scalerl.losses]\ntopr = losses:Topr [extra]\n"
    )
    assert load_recipe("demo", ["loss.kind=topr"]).to_dict()["loss"]["kind"] == "losses:Topr"


def test_a_change_of_the_same_kind_keeps_its_parameters(here):
    values = load_recipe("demo", OWN).to_dict()
    same = changed(values, {"loss": {"kind": "losses.py:Topr"}})
    assert same["loss"]["max_ratio"] == 2.0
    assert from_dict(changed(values, {"loss": {"kind": "cispo"}})).loss == Cispo()


def test_a_run_whose_code_is_gone_says_where_it_was(here):
    """Its folder has the hash of the code, and no copy."""
    (here / "run").mkdir()
    config = {"schema": 1, "recipe": load_recipe("demo", OWN).to_json()}
    (here / "run" / "config.json").write_text(json.dumps(config))
    assert load_recipe(here / "run") == load_recipe("demo", OWN)
    (here / "losses.py").rename(here / "run" / "losses.py")
    why = f"no file {here}/losses.py; a run needs its code where it was: put it back there"
    with pytest.raises(InputError, match=re.escape(f"cannot be loaded (FileNotFoundError: {why})")):
        load_recipe(here / "run")


def test_a_data_set_takes_a_verifier(here):
    recipe = load_recipe(
        "demo",
        ["task.kind=dataset", "task.path=x.jsonl", "task.verifier.kind=verifiers.py:Close"],
    )
    assert recipe.to_dict()["task"]["verifier"]["kind"] == f"{here}/verifiers.py:Close"
    assert from_dict(recipe.to_dict()) == recipe


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["nope"], f"loss.kind: no kind 'nope'; {CHOICES}"),
        (["no.such:Topr"], rf"loss.kind: no.such:Topr cannot be loaded \(ModuleNotFound.*; {CHOICES}"),
        (["missing.py:Topr"], rf"loss.kind: missing.py:Topr cannot be loaded \(FileNotFound.*; {CHOICES}"),
        (["syntax.py:Topr"], rf"loss.kind: syntax.py:Topr cannot be loaded \(SyntaxError: .*; {CHOICES}"),
        (["losses.py:Nope"], f"loss.kind: losses.py has no Nope; it has Topr; {CHOICES}"),
        (["cispoo"], f"loss.kind: no kind 'cispoo'; did you mean 'cispo'\\? {CHOICES}"),
        (["losses.py:"], f"losses.py: names nothing after the colon; losses.py has Topr; {CHOICES}"),
        (["leaves.py:Topr"], rf"loss.kind: leaves.py:Topr cannot be loaded \(SystemExit: 3\); {CHOICES}"),
        (["losses.py:Topr", "tau=1"], "unknown key 'loss.tau'; the keys here are max_ratio"),
        (["wrong.py:function"], r"loss.kind: wrong.py:function is not a class"),
        (["wrong.py:Loose"], r"loss.kind: wrong.py:Loose must be a frozen dataclass"),
        (["wrong.py:Empty"], r"wrong.py:Empty has no __call__\(logp_NT, behaviour_logp_NT, advantage_N, sa"),
        (["wrong.py:Short"], r"wrong.py:Short: __call__ must take the arguments of __call__\(logp_NT, behav"),
        (["wrong.py:Held"], r"loss.kind: .*wrong.py:Held has a field whose type no recipe can check"),
        (["wrong.py:Locked"], r"loss: .*wrong.py:Locked cannot go to another process \(TypeError: "),
        (["losses.py:Topr", "max_rato=1"], "unknown key 'loss.max_rato'; did you mean 'loss.max_ratio'"),
        (["losses.py:Topr", "max_ratio=x"], "loss.max_ratio: expected a number, found 'x'"),
        (["losses.py:Topr", "max_ratio=true"], "loss.max_ratio: cannot be true or false"),
        (["losses.py:Topr", "max_ratio=-1"], "loss: max_ratio must be positive"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_a_line(here, overrides, message):
    kind, *more = overrides
    with pytest.raises(InputError, match=f"^demo: .*{message}") as raised:
        load_recipe("demo", [f"loss.kind={kind}", *(f"loss.{one}" for one in more)])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("return value_NT", r"returns a Tensor: return TokenLoss\(value_NT, clipped_NT\)"),
        ("return None", "returns a NoneType: return TokenLoss"),
        ("return TokenLoss(value_NT.sum(1), value_NT > 0)", r"value_NT is of shape \(2,\): a tensor of the "),
        ("return TokenLoss(value_NT, value_NT[0] > 0)", r"clipped_NT is of shape \(3,\): a tensor of the "),
        ("return TokenLoss(value_NT, None)", "clipped_NT is a NoneType: a tensor of the "),
        ("return TokenLoss(value_NT, value_NT)", "clipped_NT holds torch.float32: booleans are needed"),
        ("return TokenLoss(value_NT.detach(), value_NT > 0)", "value_NT has no gradient"),
        ("raise RuntimeError('oh\\ndear')", r"raised an error \(RuntimeError: oh\)"),
        ("return TokenLoss(value_NT / 0, value_NT > 0)", r"returns -?inf: finite numbers are needed"),
        ("return TokenLoss(value_NT, value_NT > 0)", ""),
    ],
)
def test_a_loss_is_called_once_before_anything_is_trained(here, returned, message):
    (here / "mine.py").write_text(LOSS.format(returned))
    if not message:
        assert load_recipe("demo", ["loss.kind=mine.py:Mine"]).loss
        return
    with pytest.raises(InputError, match=f"^loss: Mine:? {message}") as raised:
        load_recipe("demo", ["loss.kind=mine.py:Mine"])
    assert "\n" not in str(raised.value)


PARTS = """
from dataclasses import dataclass
import numpy as np
from scalerl.rl import LengthControl

@dataclass(frozen=True)
class Mine{base}:
    def {method}:
        {body}
"""
METHODS = {
    "averaging": "__call__(self, length_N, group_N, budget)",
    "advantage": "__call__(self, centred)",
    "curriculum": "retires(self, history)",
    "length": "penalty(self, length, correct)",
}


@pytest.mark.parametrize(
    ("key", "body", "message"),
    [
        ("averaging", "return np.ones(1)", r"returns numbers of shape \(1,\): \(3,\) is needed"),
        ("averaging", "return 1.0", r"returns numbers of shape \(\): \(3,\) is needed"),
        ("averaging", "return np.full(3, np.nan)", "returns nan: finite numbers are needed"),
        ("averaging", "return -np.ones(3)", "returns a negative weight"),
        ("averaging", "return np.zeros(3)", "returns no weight above 0"),
        ("averaging", "return 1 / 0", r"raised an error \(ZeroDivisionError: division by zero\)"),
        ("averaging", "return None", "returns None: numbers are needed"),
        ("averaging", "return 'none'", "returns 'none': numbers are needed"),
        ("averaging", "return 1 / (length_N * len(length_N))", ""),
        (
            "advantage",
            "return np.concatenate(centred)",
            "returns a ndarray for 2 groups: return a list of one",
        ),
        ("advantage", "return centred[:1]", "returns 1 arrays for 2 groups"),
        (
            "advantage",
            "return [a[:2] for a in centred]",
            r"returns numbers of shape \(2,\): \(3,\) is needed",
        ),
        (
            "advantage",
            "return [a * np.inf for a in centred]",
            "returns (inf|-inf): finite numbers are needed",
        ),
        ("advantage", "return [list(a) for a in centred]", ""),
        (
            "curriculum",
            "return history.corect > 2",
            r": retires raised an error \(AttributeError: 'History' object has no",
        ),
        ("curriculum", "return None", ": retires returns None: return True or False"),
        ("curriculum", "return np.float64(history.correct) > 2", ""),
        ("length", "return None", ": penalty returns None: numbers are needed"),
        ("length", "return [0, 1]", r": penalty returns numbers of shape \(2,\): \(\) is needed"),
        (
            "length",
            "return 0.0\n    def interruption(self): return True",
            ": interruption returns True: return a",
        ),
        ("length", "return -length / 100", ""),
    ],
)
def test_every_choice_is_called_once_before_anything_is_trained(here, key, body, message):
    base = "(LengthControl)" if key == "length" else ""
    (here / "mine.py").write_text(PARTS.format(base=base, method=METHODS[key], body=body))
    if not message:
        assert type(getattr(load_recipe("demo", [f"{key}.kind=mine.py:Mine"]), key)).__name__ == "Mine"
        return
    with pytest.raises(InputError, match=f"^{key}: Mine ?{message}") as raised:
        load_recipe("demo", [f"{key}.kind=mine.py:Mine"])
    assert "\n" not in str(raised.value)


def test_the_hash_of_a_file_is_that_of_what_it_holds(here):
    """Of every table, a function's included; a module's once it is loaded."""
    overrides = ["task.kind=dataset", "task.path=x.jsonl", "loss.kind=wrong_module:Mine"]
    (here / "wrong_module.py").write_text(LOSS.format("return TokenLoss(value_NT, value_NT > 0)"))
    for verifier in ("kind=verifiers.py:Close", "name=verifiers.py:Close"):
        function = ["task.verifier.kind=function"] if verifier.startswith("name") else []
        values = load_recipe("demo", [*overrides, *function, f"task.verifier.{verifier}"]).to_dict()
        before = own_code.code_of(values)
        assert set(before) == {f"{here}/verifiers.py:Close", "wrong_module:Mine"}
    (here / "verifiers.py").write_text("")
    assert [name for name, code in own_code.code_of(values).items() if code != before[name]] == [
        f"{here}/verifiers.py:Close"
    ]


def test_an_object_without_the_protocol_is_refused_in_python():
    with pytest.raises(InputError, match=r"^loss: NoPositiveResampling has no __call__"):
        replace(load_recipe("demo"), loss=NoPositiveResampling())  # pyright: ignore[reportArgumentType]


def test_a_value_that_no_file_holds_is_refused(here):
    topr = own_code.load("losses.py:Topr")
    recipe = replace(load_recipe("demo"), loss=topr(math.inf))
    object.__setattr__(recipe.loss, "max_ratio", {1, 2})
    with pytest.raises(InputError, match=r"Topr.max_ratio: \{1, 2\} cannot be in a recipe"):
        recipe.to_dict()
