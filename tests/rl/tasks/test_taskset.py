"""Tasksets that are written for the package verifiers, as they are."""

import json
from dataclasses import replace
from typing import Any

import pytest
from byte_model import save_byte_model

from scalerl.errors import InputError
from scalerl.rl.config.recipe import from_dict, load_recipe
from scalerl.rl.train import train
from scalerl.rl.types import Reward, UserText

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
    return load_recipe(
        "scalerl", ["task=verifiers:my-sums", "task.heldout=4", "length.kind=none", *overrides]
    ).task


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
        (["task.heldout=16"], "task.heldout: my-sums has 16 different prompts, and 16 are held out"),
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


TURNS = """
import verifiers.v1 as vf

__all__ = ["Shop", "Count"]

class Spent(vf.State):
    coins: int = 0

class Data(vf.TaskData):
    money: int

class Buy(vf.Toolset[vf.ToolsetConfig, Spent]):
    TOOL_PREFIX = None

    async def setup_task(self, data):
        self.money = data.money

    @vf.tool
    async def buy(self, price: int) -> str:
        \"""Buy something.\"""
        if price > self.money - self.state.coins:
            raise ValueError("too expensive")
        self.state.coins += price
        return f"{self.money - self.state.coins} left"

class Shopping(vf.Task[Data, Spent]):
    @classmethod
    def toolsets(cls, config):
        return [Buy(vf.ToolsetConfig())]

    @vf.stop
    def broke(self, trace: vf.Trace) -> bool:
        return trace.state.coins == self.data.money

    @vf.reward
    async def spent(self, trace) -> float:
        assert [call.name for call in trace.assistant_messages[0].tool_calls or []] in (["buy"], [])
        return trace.state.coins / self.data.money

class Shop(vf.Taskset[Shopping]):
    def load(self):
        for money in range(1, 13):
            yield Shopping(Data(prompt=f"Spend {money} coins.", money=money), self.config.task)
"""
GAME = """
import verifiers.v1 as vf

__all__ = ["Game", "GameEnv"]

class Data(vf.TaskData):
    number: int

class Guess(vf.Task[Data]):
    @vf.metric
    async def length(self, trace) -> float:
        return float(trace.num_turns)

class Config(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()

class GameEnv(vf.Env[Config]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn("Guess my number.")
            while not segment.terminated and segment.last_reply != str(task.data.number):
                segment = await interaction.turn(f"It is not {segment.last_reply}.")
        trace = interaction.trace
        trace.record_reward("won", 0.0 if segment.terminated else 1.0, 1.0)
        trace.record_reward("even", float(len(trace.last_reply) % 2), 0.5)

class Game(vf.Taskset[Guess]):
    def load(self):
        for number in range(8):
            yield Guess(Data(system_prompt=f"Play {number}.", number=number), self.config.task)
"""


@pytest.fixture
def turns(tmp_path):
    (tmp_path / "my_shop.py").write_text(TURNS)
    (tmp_path / "my_game.py").write_text(GAME)


def call(**arguments):
    return "<tool_call>" + json.dumps({"name": "buy", "arguments": arguments}) + "</tool_call>"


def test_tools_of_a_taskset_answer_calls_and_change_the_state_that_rewards_see(turns):
    task = task_of("task=verifiers:my-shop", "task.heldout=4", "task.turns=4")
    prompt = task.prompts("train")[-1]
    (_, system), (_, asked) = prompt.messages
    (schema,) = [json.loads(line) for line in system.splitlines() if line.startswith('{"type"')]
    assert schema["function"]["name"] == "buy"
    assert schema["function"]["description"] == "Buy something."
    assert schema["function"]["parameters"]["required"] == ["price"]
    assert asked == "Spend 12 coins."
    first = f"I buy. </think>{call(price=3)}"
    assert task.respond(prompt, [first]) == ["9 left"]
    assert task.respond(prompt, [first, call(price=4) + call(price=2)]) == ["5 left", "3 left"]
    (refused,) = task.respond(prompt, [first, call(price=10)])
    assert "too expensive" in refused
    assert "buy" in task.respond(prompt, ["<tool_call>sell</tool_call>"])[0]
    assert task.respond(prompt, [first, "Done."]) == []
    assert task.respond(prompt, [call(price=12)]) == []  # `broke` stops it
    assert task.verify_turns(prompt, [first, "Done."]) == Reward(0.25, False)
    assert task.verify_turns(prompt, [first, call(price=9), "Done."]) == Reward(1.0, True)
    assert task.verify_turns(prompt, [first, call(price=9)]) == Reward(0.25, False)  # the last is not made
    assert task.verify(prompt, "Nothing.") == Reward(0.0, False)


def test_an_environment_of_a_taskset_is_the_user_of_the_conversation(turns):
    task = task_of("task=verifiers:my-game", "task.heldout=4", "task.turns=3", "task.correct=won")
    prompt = task.prompts("train")[1]
    assert prompt.messages == (("system", "Play 5."), ("user", "Guess my number."))
    (said,) = task.respond(prompt, ["It may be </think> 3"])
    assert (said, type(said)) == ("It is not 3.", UserText)
    assert task.respond(prompt, ["3", "5"]) == []
    assert task.verify_turns(prompt, ["3", "5"]) == Reward(1.5, True)
    assert task.verify_turns(prompt, ["3", "4", "2"]) == Reward(0.5, False)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("my-shop", "task.turns: my-shop has tools: say how many turns"),
        ("my-game", "task.turns: my-game has turns of a user: say"),
    ],
)
def test_turns_are_to_be_given_where_one_is_not_enough(turns, name, says):
    with pytest.raises(InputError, match=says):
        task_of(f"task=verifiers:{name}").prompts("train")


def test_a_run_on_a_taskset_of_several_turns(turns, tmp_path):
    recipe = from_dict(
        {
            "model": str(save_byte_model(tmp_path / "model")),
            "budget": {"kind": "steps", "amount": 3},
            "task": {
                "kind": "verifiers",
                "id": "my-game",
                "heldout": 2,
                "turns": 3,
                "limits": {"workers": 1},
            },
            "stop": list("abcdefghijklmnopqrstuvwxyz"),  # turns of about ten tokens
            "batch": {"prompts": 2, "samples": 4},
            "context": {"prompt": 64, "thinking": 80, "answer": 80},
            "length": {"kind": "none"},
            "evaluation": {"count": 1, "samples": 1},
            "samples": {"every": 1},
            "decode_slots": 8,
        }
    )
    record = train(recipe, tmp_path / "run")
    assert [point.n_prompts for point in record.evals] == [2, 2]
    steps, texts = record.steps(), (tmp_path / "run" / "samples.jsonl").read_text()
    assert len(steps) == 3
    assert all(step["failed"] == {} for step in steps)
    assert any(step["grad_norm"] > 0 for step in steps)
    assert "It is not" in texts
