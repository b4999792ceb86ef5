"""Recipes of every kind, sensible and not: each is refused in one clear line, or it runs.

A recipe is drawn as a person would write it, as a table of plain values: a sensible value for every key, and
then a few keys that are left out or hold something odd. What gets through is trained for three steps.
"""

import json
import math
import tempfile
from collections import Counter
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given, settings, strategies as st

from scalerl.errors import DivergedError, InputError, PausedError, WorkerError
from scalerl.forecast.best import rates_by_step
from scalerl.kinds import hints_of
from scalerl.rl.config.recipe import Recipe, from_dict
from scalerl.rl.model.demo_base import BaseModel, build_base
from scalerl.rl.tasks.chain import Chain, Demonstrations
from scalerl.rl.tasks.code import Code
from scalerl.rl.tasks.dataset import Dataset
from scalerl.rl.tasks.verifiers import Math
from scalerl.rl.train import train

TASK = Chain(k_max=3, heldout_per_length=3, train_per_length=8)

# Sensible values where the default is none, or is not all: the paper's are for models of billions of weights.
SENSIBLE: dict[str, list[Any]] = {
    "name": ["a run"],
    "seed": [0, 1, 2**31],
    "end_of_thinking": ["</think>"],
    "temperature": [1.0, 0.6, 2.0],
    "top_p": [1.0],  # less goes with some losses alone
    "top_k": [0, 5],
    "routing_replay": [False],  # the model has no experts
    "decode_slots": [1, 7, 64],
    "learner.compile": [False],  # which takes longer than these runs
    "threads": [0, 1, 2],
    "task.k_max": [1, 3],
    "task.skip": [[], [2]],
    "task.heldout_per_length": [1, 3],
    "task.train_per_length": [1, 8, 40],
    "task.seed": [1, 2],
    "task.path": ["prompts.jsonl"],
    "task.subset": [None],
    "task.split": ["train"],
    "task.heldout_path": [None, "heldout.jsonl"],
    "task.heldout_split": [None],
    "task.heldout": [1, 4],
    "task.limit": [None, 5],
    "task.prompt": ["prompt"],
    "task.answer": ["answer"],
    "task.id": [None, "id"],
    "task.system": [None],
    "task.template": [None, "{prompt} ."],
    "task.chat_template": [False],
    "task.chat_template_args": [{}],
    "task.after": ["</think>"],
    "task.python": [""],
    "task.verifier.after": ["</think>"],
    "task.verifier.name": ["judge.py:judge"],
    "task.verifier.functions": [["judge.py:reward"]],
    "task.verifier.score": ["judge.py:compute_score"],
    "task.name": ["gcd"],
    "task.environment": ["judge.py:Counting"],
    "task.turns": [2, 8],
    "task.config": [{}],
    "task.size": [5],
    "task.question": [""],
    "task.correct": [None],
    "task.tasks": [{name: {"kind": "chain", "k_max": 2, "train_per_length": 8} for name in "ab"}],
    "task.weights": [{}, {"a": 2.0, "b": 1.0}],
    "task.limits.seconds": [10.0],
    "task.limits.memory_gib": [4.0],
    "task.limits.workers": [1],
    "budget.amount": [3, 1e10],
    "schedule.k": [1, 2, 8],
    "loss.min_ratio": [0.8, 0.997],
    "loss.max_ratio": [1.005, 1.26, 5.0],
    "loss.max_weight": [1.0, 5.0],
    "loss.updates": [1, 2, 4],
    "kl.coefficient": [0.0, 0.1],
    "averaging.length": [0, 10],
    "curriculum.threshold": [0.9, 0.5, 1.0],
    "length.low": [1, 3],
    "length.high": [3, 6],
    "length.phrase": ["! </think>"],
    "length.max_length": [12],
    "length.cache": [1, 8],
    "lora.rank": [0, 2],
    "lora.alpha": [4],
    "lora.targets": ["all-linear", ["q_proj", "v_proj"]],
    "batch.prompts": [1, 3],
    "batch.samples": [2, 5],
    "batch.micro": [1, 4, 64],
    "batch.max_gen_batches": [1, 3],
    "context.prompt": [8, 12],
    "context.thinking": [6, 9],
    "context.answer": [1, 4],
    "optimiser.lr": [1e-5, 1e-2],
    "optimiser.warmup_steps": [0, 100],
    "optimiser.decay_steps": [0, 7, 200],
    "optimiser.min_lr_ratio": [0.0, 0.1],
    "optimiser.betas": [[0.9, 0.95], [0.0, 0.0]],
    "optimiser.eps": [1e-15, 1e-8],
    "optimiser.weight_decay": [0.0, 0.01],
    "optimiser.max_grad_norm": [1.0, 1e9],
    "placement.generators": [1, 2],
    "cluster.transport.kind": ["object_store", "gloo"],
    "checkpoint.steps": [0, 1, 50],
    "checkpoint.minutes": [0.0, 30.0],
    "checkpoint.keep": [1, 2],
    "evaluation.count": [1, 3],
    "evaluation.samples": [1, 2],
    "evaluation.decode_slots": [1, 100],
    "evaluation.seed": [0, 20251016],
    "evaluation.downstream": [[], [{"name": "other", "task": {"kind": "chain", "k_max": 1}, "samples": 1}]],
}
# These start processes, which take their time.
RARELY = {Dataset: 0.15, Code: 0.1, Math: 0.1}
# Large enough to be out of proportion, and small enough for three steps to end.
ODD: dict[Any, list[Any]] = {
    int: [-1, 0, 1, 2, 3, 5, 12, 17, 30, 60, 90, 250, 2**40, 2**63, -(2**70), 0.5, "3", "many", None, True],
    float: [
        -1.0,
        0.0,
        1e-300,
        1e-30,
        1e-3,
        0.999,
        1.001,
        9.0,
        1e6,
        1e30,
        1e308,
        math.inf,
        math.nan,
        "x",
        None,
    ],
    bool: [True, False, 2, "maybe", None],
    str: ["", " ", "x", "é\n\u2028", "\x00", "{", "no/such", "9 </think> </think>", 3, None, ["a"]],
    tuple: [[], [0], [0.5], [1, 2, 3], [-1, 0.5], "ab", None, [math.nan, 0.1], [0.1, 0.999999]],
    "table": [None, "x", 3, [], {}, {"kind": "no such"}, {"kin": "cispo"}],
}
WEIGHT = {int: 1.0, float: 1.0, tuple: 1.0, str: 0.6}
# What is only slow, or needs the network, is no fault: how much is asked for is the user's business.
SLOW: dict[str, list[Any]] = {
    "batch.prompts": [0, 12],
    "batch.samples": [1, 20],
    "evaluation.samples": [0, 12],
    "placement.generators": [0],
    "task.limits.workers": [0],
    "task.limits.memory_gib": [0.0, -1.0, 1e-3],
    "task.limits.seconds": [0.0, -1.0, math.inf],
    "decode_slots": [0, -1, 1500],
    "schedule.k": [-1, 0, 5, 30, 2**40],
    "task.train_per_length": [0, 90, 2**40],
    "evaluation.decode_slots": [0, -1, 1500],
    "task.path": ["", "no/such.jsonl", "judge.py", 3],
    "task.heldout_path": ["", "no/such.jsonl", "prompts.jsonl", 3],
    "model": ["", "/no/such", 3, None],
}


def keys_of(cls: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Every dotted key of a recipe with its type, those of all variants included."""
    found: list[tuple[str, Any]] = []
    for name, hint in hints_of(cls).items():
        variants = variants_of(hint)
        found += [key for variant in variants for key in keys_of(variant, f"{prefix}{name}.")]
        if not variants:
            found.append((prefix + name, hint))
    return found


def variants_of(hint: Any) -> list[Any]:
    if get_origin(hint) is tuple:  # a list of tables is a value of its key
        return []
    return [part for part in (hint, *get_args(hint)) if is_dataclass(part)]


def plain(hint: Any) -> Any:
    """int of int | None, tuple of tuple[int, ...]."""
    if get_origin(hint) is tuple:
        return tuple
    return next((part for part in (hint, *get_args(hint)) if part in ODD), None)


def sensible(rng: Random, cls: Any, prefix: str = "") -> dict[str, Any]:
    """A table with a sensible value for every key of one variant of each part."""
    table = {}
    asked = [item for item in fields(cls) if item.init]
    for item, hint in zip(asked, hints_of(cls).values(), strict=True):
        key, variants = prefix + item.name, variants_of(hint)
        if is_dataclass(item.default):  # the thresholds of a figure, which are its own
            table[item.name] = vars(item.default).copy()
        elif variants:
            chosen = rng.choices(variants, [RARELY.get(variant, 1.0) for variant in variants])[0]
            table[item.name] = sensible(rng, chosen, f"{key}.")
        elif key in SENSIBLE:
            table[item.name] = rng.choice(SENSIBLE[key])
        elif hint is bool or get_origin(hint) is Literal:
            table[item.name] = rng.choice([True, False] if hint is bool else list(get_args(hint)))
        elif key != "model":
            table[item.name] = item.default
    return table


def possible(rng: Random, table: dict[str, Any]) -> dict[str, Any]:
    """The same without one of the parts that exclude each other."""
    table.pop(rng.choice(["cluster", "placement"]))
    if table["engine"]["kind"] == "vllm":
        table.get("cluster", {}).pop("transport", None)  # it has one of its own
        if table.get("placement", {}).get("kind") == "inline":
            table["placement"] = {"kind": "local"}
    if table["task"]["kind"] == "env":
        table["length"] = {"kind": rng.choice(["none", "length_penalty"])}
    return table


def places(table: dict[str, Any], prefix: str = "") -> list[tuple[dict[str, Any], str, str]]:
    """Every key of a table and of its parts: the table that holds it, its name there, and its dotted name."""
    found = [(table, name, prefix + name) for name in table]
    for name, inside in table.items():
        found += places(inside, f"{prefix}{name}.") if isinstance(inside, dict) else []
    return found


def spoil(rng: Random, table: dict[str, Any]) -> None:
    """Leave out one key of a table or of its parts, or misspell it, or give it an odd value."""
    found = places({"model": 0, **table}) if rng.random() < 0.2 else places(table)
    weights = [1.0 if key in SLOW else WEIGHT.get(plain(TYPES.get(key)), 0.15) for *_, key in found]
    inside, name, key = rng.choices(found, weights)[0]
    inside = table if key == "model" else inside
    dice = rng.random()
    if dice < 0.05 and key not in SLOW:
        inside.pop(name, None)
    elif dice < 0.1:
        inside[f"{name}x"] = inside.pop(name, 1)
    else:
        inside[name] = rng.choice(SLOW.get(key) or ODD.get(plain(TYPES.get(key))) or ODD["table"])


TYPES = dict(keys_of(Recipe))


@st.composite
def recipes(draw: Any) -> dict[str, Any]:
    """The table of a recipe: sensible, but for up to three keys. Hypothesis draws the seed."""
    rng = draw(st.randoms(use_true_random=True))
    table = possible(rng, sensible(rng, Recipe))
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        spoil(rng, table)
    return table


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model that knows the form of an answer, and guesses: its groups have a signal."""
    spec = BaseModel(Demonstrations(TASK, 6), hidden_size=32, max_careful_steps=80, imperfect_steps=20)
    return build_base(spec, tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """A folder with data and a verifier, in which recipes are run."""
    folder = tmp_path_factory.mktemp("there")
    rows = [
        {"prompt": f"{x} + {y} =", "answer": str((x + y) % 10), "id": f"{x}{y}", "tests": [{"output": ""}]}
        for x in range(4)
        for y in (1, 2)
    ]
    for name, part in (("prompts", rows[:6]), ("heldout", rows[6:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    (folder / "judge.py").write_text(
        "def judge(prompt, text):\n    return len(text) % 2 == 0\n"
        "def reward(completions, **columns):\n    return [len(text) % 2 for text in completions]\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 0.0\n"
        "class Counting:\n    def reset(self, **row):\n        self.n = 0\n"
        "    def count(self):\n        self.n += 1\n    def get_reward(self):\n        return self.n\n"
    )
    return folder


class EnoughError(Exception):
    """Three steps have been trained."""


def outcome(table: dict[str, Any], model: Path) -> str:
    """What becomes of a recipe; anything that is not clear is raised."""

    def three_steps(progress: Any) -> None:
        if progress.step >= 3 and not progress.evaluated:
            raise EnoughError

    with tempfile.TemporaryDirectory() as folder:
        try:
            recipe = from_dict({"model": str(model), **table})
            assert from_dict(recipe.to_dict()) == recipe or math.nan in flat(table)
            here = {key: value for key, value in recipe.to_dict().items() if key != "cluster"}
            here |= {"engine": {"kind": "auto"}} if recipe.vllm else {}
            inline = from_dict(here | {"placement": {"kind": "inline"}})
            train(
                inline,
                Path(folder) / "run",
                inline.model,
                progress=three_steps,
                evaluate_aside=False,
                smooth=rates_by_step,
            )
        except (InputError, WorkerError) as error:  # the latter where verifiers do not start
            clear = str(error) and "\n" not in str(error)
            if not clear or (Path(folder) / "run").exists():  # it must come before anything is written
                raise
            return "refused"
        except DivergedError:
            return "diverged"
        except PausedError:
            return "paused by an alarm"
        except EnoughError:
            return "ran three steps"
        return "ran to its end"


def flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [part for item in value.values() for part in flat(item)]
    return [part for item in value for part in flat(item)] if isinstance(value, list) else [value]


def test_every_key_of_the_recipe_is_drawn():
    rng, drawn = Random(0), {"model"}
    for _ in range(300):
        table = sensible(rng, Recipe)
        drawn |= {key for *_, key in places(table) if key in TYPES}
        assert MISSING not in flat(table)
    assert drawn == TYPES.keys()
    assert {*SENSIBLE, *SLOW} <= TYPES.keys()


@settings(max_examples=20)
@given(table=recipes())
def test_a_recipe_is_refused_in_one_line_or_runs(table, model, there):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(there)
        outcome(table, model)


@pytest.mark.slow
def test_a_thousand_recipes(model, there, monkeypatch):
    monkeypatch.chdir(there)
    found: Counter[str] = Counter()

    @settings(max_examples=1000)
    @given(table=recipes())
    def look(table):
        found[outcome(table, model)] += 1

    look()
    print(dict(found))
    assert found["refused"] > 100
    assert found["ran three steps"] > 250
