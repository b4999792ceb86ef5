"""Averagings, advantages, curricula and length controls of one's own, which no page of docs/extend has."""

import json
import sys

import pytest
from extensions import OWN, SMALL

from scalerl.errors import InputError
from scalerl.rl import load_recipe, train

PARTS = """
from dataclasses import dataclass
import numpy as np
from scalerl.rl import ForcedInterruption, LengthControl

@dataclass(frozen=True)
class Even:
    def __call__(self, length_N, group_N, budget):
        return np.full(len(length_N), 1 / length_N.sum())[:{weights}]

@dataclass(frozen=True)
class Signs:
    def __call__(self, centred):
        return [np.sign(a_G) for a_G in centred]

@dataclass(frozen=True)
class Twice:
    def retires(self, history):
        return history.n >= 2 * 8

@dataclass(frozen=True)
class Short(LengthControl):
    price: float = 0.1

    def penalty(self, length, correct):
        return -self.price * length

    def interruption(self):
        return ForcedInterruption(3, 4)
"""


def test_a_run_with_an_averaging_an_advantage_a_curriculum_and_a_length_control(here, small_base):
    (here / "parts.py").write_text(PARTS.format(weights=""))
    kinds = {"averaging": "Even", "advantage": "Signs", "curriculum": "Twice", "length": "Short"}
    small = [one for one in SMALL if not one.startswith(("length.", "curriculum."))] + OWN[3:]
    own = [f"{key}.kind=parts.py:{name}" for key, name in kinds.items()]
    record = train(
        load_recipe("demo", [f"model={small_base}", *small, *own, "length.price=0.25"]), here / "run"
    )
    assert record.evals[-1].step == 3
    recipe = json.loads((here / "run" / "config.json").read_text())["recipe"]
    assert {key: recipe[key]["kind"] for key in kinds} == {
        key: f"{here}/parts.py:{name}" for key, name in kinds.items()
    }
    steps = [json.loads(line) for line in (here / "run" / "steps.jsonl").read_text().splitlines()]
    # A reward of -1 to 1, less a quarter for each of 2 to 7 tokens.
    assert all(-1 - 7 / 4 <= step["reward_mean"] <= 1 - 2 / 4 for step in steps)


def test_an_averaging_that_is_wrong_for_some_batches_alone_ends_the_run(here, small_base):
    (here / "parts.py").write_text(PARTS.format(weights="8"))
    recipe = load_recipe(
        "demo",
        [f"model={small_base}", *SMALL, *OWN[3:], "averaging.kind=parts.py:Even", "zero_variance=keep"],
    )
    with pytest.raises(InputError, match=r"^averaging: Even returns numbers of shape \(8,\): \(16,\) is"):
        train(recipe, here / "run", evaluate_aside=False)


def test_a_class_that_has_got_a_field_goes_on_with_its_default(here, small_base, caplog):
    """As by any other change of its code; another value of it, or of what was there, is another recipe."""
    (here / "parts.py").write_text(PARTS.format(weights=""))
    own = [f"model={small_base}", *SMALL, *OWN[3:], "length.kind=parts.py:Short"]
    own = [one for one in own if not one.startswith(("length.low", "length.high"))]
    train(load_recipe("demo", own), here / "run", evaluate_aside=False, until=2)
    more = PARTS.format(weights="").replace("price: float = 0.1", "price: float = 0.1\n    free: int = 0")
    (here / "parts.py").write_text(more)
    for module in [name for name in sys.modules if name.startswith("scalerl.own_code.")]:
        del sys.modules[module]
    for change, difference in {
        "length.free=1": r"length.free = 0, and this recipe 1; ",
        "length.price=0.2": r"length.price = 0.1, and this recipe 0.2; ",
    }.items():
        with pytest.raises(InputError, match=difference):
            train(load_recipe("demo", [*own, change]), here / "run", resume=True, evaluate_aside=False)
    record = train(load_recipe(here / "run"), here / "run", resume=True, evaluate_aside=False)
    assert record.evals[-1].step == 3
    assert "parts.py:Short has changed since the run began: it goes on by the new code" in caplog.text
