"""Tasks in one line: problems of reasoning-gym, and reward functions of TRL and verl as they are."""

import json
from dataclasses import replace
from typing import Any

import pyarrow
import pytest
from byte_model import save_byte_model
from pyarrow import parquet

from scalerl.errors import InputError
from scalerl.rl.config.recipe import from_dict, load_recipe, read_toml
from scalerl.rl.train import train
from scalerl.rl.types import Reward

FUNCTIONS = """
def accuracy(prompts, completions, solution, **kwargs):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [1.0 if s in text else 0.0 for text, s in zip(texts, solution)]

def spaces(completions, level, **kwargs):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [None if hard > 1 else text.count(" ") / 10 for text, hard in zip(texts, level)]

def vowels(prompts, completions, **kwargs):
    return [sum(map(text.count, "aeiou")) / 4 for text in completions]

def roles(prompts, completions, **kwargs):
    assert [m["role"] for m in prompts[0]] == ["system", "user"]
    return [len(completions[0]) + (completions[0][0]["role"] == "assistant")]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert extra_info["index"] >= 0
    score = float(solution_str == ground_truth)
    return score if data_source == "plain" else {"score": score - 0.5, "acc": score > 0}

NOT_CALLABLE = 3
"""


@pytest.fixture
def functions(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(FUNCTIONS)
    return str(path)


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    found = [{"prompt": f"What is {n} + 1?", "solution": str(n + 1), "level": n % 3} for n in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


def task_of(*overrides) -> Any:
    return load_recipe("scalerl", overrides).task


def test_trl_functions_are_called_with_columns_and_weighted(functions, rows):
    task = task_of(f"task=trl:{functions}:accuracy", f"task.path={rows}", "task.heldout=2")
    prompt = next(p for p in task.prompts("train") if json.loads(p.answer)["level"] == 1)
    solution = json.loads(prompt.answer)["solution"]
    assert task.verify(prompt, f"it is {solution}").correct
    assert task.verify(prompt, f"it is {solution}").value == 1.0
    assert not task.verify(prompt, "no").correct
    two = replace(
        task.verifier, functions=(*task.verifier.functions, f"{functions}:spaces"), weights=(2.0, 0.5)
    )
    reward = replace(task, verifier=two).verify(prompt, f"it is {solution}")
    assert reward.value == pytest.approx(2.0 * 1.0 + 0.5 * 0.2)
    assert reward.correct
    by_spaces = replace(two, correct="spaces", correct_at=0.3)
    assert not by_spaces.verify(prompt, f"it is {solution}").correct  # .2 of .3
    assert by_spaces.verify(prompt, f"it is  {solution}").correct
    hard = next(p for p in task.prompts("train") if json.loads(p.answer)["level"] == 2)
    assert two.verify(hard, "a b c").value == 0.0  # None counts nothing


def test_trl_functions_get_messages_where_the_data_has_messages(functions, tmp_path):
    path = tmp_path / "chats.jsonl"
    chats = [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{n}?"}] for n in range(3)
    ]
    path.write_text("".join(json.dumps({"prompt": chat}) + "\n" for chat in chats))
    task = task_of(f"task=trl:{functions}:roles", f"task.path={path}", "task.heldout=1")
    assert task.verify(task.prompts("train")[0], "yes").value == 2.0


def test_verl_data_and_function_as_they_are(functions, tmp_path):
    path = tmp_path / "train.parquet"
    found = [
        {
            "data_source": "plain" if n % 2 else "graded",
            "prompt": [{"role": "user", "content": f"What is {n} + 1?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
            "extra_info": {"split": "train", "index": n},
        }
        for n in range(6)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(found), path)
    task = task_of(f"task=verl:{functions}:compute_score", f"task.path={path}", "task.heldout=1")
    for prompt in task.prompts("train"):
        row = json.loads(prompt.answer)
        assert prompt.messages == (("user", f"What is {row['extra_info']['index']} + 1?"),)
        right, wrong = row["reward_model"]["ground_truth"], "none"
        values = [task.verify(prompt, text).value for text in (right, wrong)]
        assert values == ([1.0, 0.0] if row["data_source"] == "plain" else [0.5, -0.5])
        assert [task.verify(prompt, text).correct for text in (right, wrong)] == [True, False]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("trl:{functions}:accuracy", "missing key 'task.path'"),
        ("reasoning-gym:chain_sums", "no data set 'chain_sums'.*did you mean 'chain_sum'"),
        ("nothing", "no kind 'nothing'"),
    ],
)
def test_what_is_wrong_in_a_line_is_said(line, message, functions):
    with pytest.raises(InputError, match=message):
        task_of(f"task={line.format(functions=functions)}").prompts("train")


def test_a_function_that_cannot_be_called_is_said_before_the_run(functions, rows):
    for name, message in (("missing", "has no 'missing'|missing"), ("NOT_CALLABLE", "is no function")):
        task = task_of(f"task=trl:{functions}:{name}", f"task.path={rows}", "task.heldout=2")
        with pytest.raises(InputError, match=message):
            task.prepare()


def test_a_line_is_the_whole_task_and_can_be_changed_by_key(rows, tmp_path):
    task = task_of(f"task={rows}", "task.answer=solution", "task.heldout=2")
    assert task.template is None  # that of the recipe `scalerl` was of its own data
    assert task.verifier.kind == "math"
    file = tmp_path / "mine.toml"
    file.write_text('model = "smollm2"\ntask = "reasoning-gym:gcd"\nbudget = {kind = "steps", amount = 1}\n')
    assert read_toml(file)["task"] == {"kind": "reasoning_gym", "name": "gcd"}
    other: Any = from_dict({**read_toml(file), "task": "reasoning-gym:lcm"}).task
    assert other.name == "lcm"
    changed: Any = load_recipe(file, ["task.size=7"]).task
    assert (changed.name, changed.size) == ("gcd", 7)


EASY = {"name": "chain_sum", "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}


def test_problems_of_reasoning_gym_are_split_and_scored():
    values = {"kind": "reasoning_gym", "size": 60, "heldout": 20, **EASY}
    recipe = from_dict({"model": "m", "task": values, "budget": {"kind": "steps", "amount": 1}})
    task: Any = recipe.task
    heldout, train_ = task.prompts("heldout"), task.prompts("train")
    assert (len(heldout), len(train_)) == (20, 60)
    assert len({p.text for p in (*heldout, *train_)}) == 80
    for prompt in heldout:
        texts = (
            f"x</think>so <answer> {prompt.answer} </answer>",
            f"\\boxed{{{prompt.answer}}}",
            prompt.answer,
        )
        for text in texts:
            assert task.verify(prompt, text).correct, (prompt, text)
        wrong = task.verify(prompt, f"<answer>{int(prompt.answer) + 1}</answer>")
        assert (wrong.value, wrong.correct) == (-1.0, False)
        last = f"<answer>{prompt.answer}</answer> no: <answer>0.5</answer>"
        assert not task.verify(prompt, last).correct
    again: Any = from_dict(recipe.to_dict()).task
    assert again == task
    assert again.prompts("train") == train_
    assert replace(task, seed=1).prompts("train") != train_


def test_partial_credit_is_the_score_of_the_data_set():
    task = replace(
        task_of("task=reasoning-gym:spell_backward", "task.heldout=3", "task.size=5"), partial_credit=True
    )
    prompt = task.prompts("heldout")[0]
    assert task.verify(prompt, prompt.answer) == Reward(1.0, True)
    almost = task.verify(prompt, prompt.answer[:-1])
    assert 0 < almost.value < 1
    assert not almost.correct


def test_a_text_of_the_metadata_is_asked_in_place_of_the_question():
    whole = replace(task_of("task=reasoning-gym:chain_sum"), config=EASY["config"], heldout=3, size=5)
    short = replace(whole, question="expression", template="1 + 1 = 2\n{prompt} =")
    for asked, prompt in zip(whole.prompts("heldout"), short.prompts("heldout"), strict=True):
        expression = asked.text.removeprefix("State the final answer to the following arithmetic problem: ")
        assert prompt == replace(asked, text=f"1 + 1 = 2\n{expression}", messages=prompt.messages)
        assert short.verify(prompt, f" {prompt.answer}").correct
    with pytest.raises(InputError, match=r"task.question: chain_sum has .*expression.*, and no 'expresion'"):
        replace(short, question="expresion").prompts("train")


def test_what_is_wrong_in_a_data_set_of_reasoning_gym_is_said():
    few = replace(task_of("task=reasoning-gym:chain_sum"), config=EASY["config"], heldout=5000)
    with pytest.raises(InputError, match="different prompts, and 5000 are held out"):
        few.prompts("train")
    with pytest.raises(InputError, match=r"task.config: gcd cannot be made .*max_nubers"):
        task_of("task=reasoning-gym:gcd", "task.config.max_nubers=2").prompts("train")
    with pytest.raises(InputError, match=r"config.seed: set task.seed"):
        task_of("task=reasoning-gym:gcd", "task.config.seed=2")


def test_a_run_on_a_reward_function_of_trl_and_one_on_reasoning_gym(functions, rows, tmp_path):
    model = str(save_byte_model(tmp_path / "model"))
    common = {
        "model": model,
        "budget": {"kind": "steps", "amount": 2},
        "batch": {"prompts": 2, "samples": 8},
        "context": {"prompt": 120, "thinking": 8, "answer": 8},
        "length": {"kind": "none"},
        "truncated": "keep",
        "schedule": {"k": 1},
        "evaluation": {"count": 1, "samples": 2},
        "decode_slots": 16,
    }
    verifier = {"kind": "trl", "functions": [f"{functions}:vowels"], "correct_at": 0.25}
    trl = {"kind": "dataset", "path": str(rows), "heldout": 2, "answer": "*", "verifier": verifier}
    record = train(from_dict({**common, "task": trl}), tmp_path / "trl", model)
    assert all(row["grad_norm"] > 0 for row in record.steps())
    assert -1 < record.steps()[0]["reward_mean"] < 2  # vowels, of which random bytes have some
    gym = {"kind": "reasoning_gym", "size": 8, "heldout": 4, **EASY, "template": "{prompt} "}
    record = train(from_dict({**common, "task": gym}), tmp_path / "gym", model)
    assert [row["step"] for row in record.steps()] == [1, 2]
    assert [point.n_prompts for point in record.evals] == [4, 4]
