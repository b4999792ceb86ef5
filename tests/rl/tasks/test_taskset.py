"""Tasksets that are written for the package verifiers, as they are."""

from dataclasses import replace
from typing import Any

import pytest
from byte_model import save_byte_model

from scalerl.errors import InputError
from scalerl.rl.config.recipe import from_dict, load_recipe
from scalerl.rl.train import train
from scalerl.rl.types import Reward

TASKSETS = """
import itertools
import verifiers.v1 as vf

__all__ = ["Sums"]

class Data(vf.TaskData):
    answer: str

class Config(vf.TasksetConfig):
    most: int = 4
    asks: list[str] = []
    endless: bool = False

class Sum(vf.Task[Data]):
    @vf.reward
    async def right(self, trace) -> float:
        assert [m.role for m in trace.messages] == ["system", "user", "assistant"]
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.reward(weight=0.5)
    async def brief(self, trace) -> float:
        return 1.0 if len(trace.last_reply) < 4 else 0.2

class Boxed(Sum):
    NEEDS_CONTAINER = True

class Looks(Sum):
    @vf.reward
    async def ran(self, runtime) -> float:
        return 1.0

class Sums(vf.Taskset[Sum, Config]):
    @property
    def bounded(self):
        return not self.config.endless

    def load(self):
        made = {"box": Boxed, "looks": Looks}.get("".join(self.config.asks), Sum)
        for a, b in itertools.product(range(self.config.most), repeat=2):
            yield made(Data(prompt=f"{a} + {b} =", system_prompt="Add.", answer=str(a + b)), self.config.task)
"""


@pytest.fixture(autouse=True)
def my_sums(tmp_path, monkeypatch):
    pytest.importorskip("verifiers.v1")
    (tmp_path / "my_sums.py").write_text(TASKSETS)
    monkeypatch.syspath_prepend(tmp_path)


def task_of(*overrides) -> Any:
    return load_recipe("scalerl", ["task=verifiers:my-sums", "task.heldout=4", *overrides]).task


def test_a_taskset_gives_the_prompts_and_the_weighted_sum_of_its_rewards():
    task = task_of()
    heldout, to_train = task.prompts("heldout"), task.prompts("train")
    assert [prompt.text for prompt in heldout] == [f"0 + {b} =" for b in range(4)]
    assert len(to_train) == 12
    prompt = to_train[-1]
    assert prompt.messages == (("system", "Add."), ("user", "3 + 3 ="))
    assert prompt.answer == task.reference(prompt) == "6"
    assert task.verify(prompt, "3 and 3 are</think> 6") == Reward(1.5, True)
    assert task.verify(prompt, "it is 6") == Reward(0.1, False)
    assert task_of("task.correct=right").verify(prompt, "7") == Reward(0.5, False)
    assert task_of().verify(prompt, "7") == Reward(0.5, True)  # `brief` is the first by name
    few = load_recipe("scalerl", ["task=verifiers:my-sums", "task.config.most=11", "task.size=7"])
    again: Any = from_dict(few.to_dict()).task
    assert again == few.task
    assert [len(again.prompts("heldout")), len(replace(again, heldout=4).prompts("train"))] == [100, 7]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (["task.heldout=16"], "task.heldout: my-sums has 16 tasks, and 16 are held out"),
        (["task=verifiers:no-such"], "task.id: 'no-such' cannot be loaded .*no_such"),
        (["task.config.mots=3"], r"task.id: 'my-sums' cannot be loaded .*mots"),
        (["task.config.endless=true"], "task.size: my-sums has no end"),
        (['task.config.asks=["box"]'], "task.id: my-sums needs a container"),
        (['task.config.asks=["looks"]'], "task.id: my-sums has a reward that looks at a runtime"),
    ],
)
def test_what_one_turn_cannot_do_is_refused(changes, line):
    with pytest.raises(InputError, match=line):
        task_of(*changes).prompts("train")


def test_a_reward_that_is_not_there_is_named():
    task = task_of("task.correct=wright")
    with pytest.raises(ValueError, match="my-sums has no reward 'wright' among brief, right"):
        task.verify(task.prompts("train")[0], "1")


def test_a_run_on_a_taskset(tmp_path):
    recipe = from_dict(
        {
            "model": str(save_byte_model(tmp_path / "model")),
            "budget": {"kind": "steps", "amount": 2},
            "task": {"kind": "verifiers", "id": "my-sums", "heldout": 4, "correct": "brief"},
            "batch": {"prompts": 2, "samples": 2},
            "context": {"prompt": 64, "thinking": 4, "answer": 4},
            "length": {"kind": "none"},
            "evaluation": {"count": 1, "samples": 1},
            "decode_slots": 8,
        }
    )
    record = train(recipe, tmp_path / "run")
    assert [point.n_prompts for point in record.evals] == [4, 4]
    assert record.steps()[-1]["failed"] == {}
