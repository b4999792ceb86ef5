"""Averagings, advantages, curricula and length controls of one's own, which no page of docs/extend has."""

import json

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
