"""Prompts from files that pyarrow and datasets write, and from JSONL."""

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from scalerl.errors import InputError
from scalerl.rl.prompt_tokens import prompt_tokens
from scalerl.rl.recipe import from_dict
from scalerl.rl.setup import check_prompts
from scalerl.rl.tasks.dataset import Dataset
from scalerl.rl.tasks.verifiers import Exact, Function, Math
from scalerl.rl.types import Limits, Prompt

ROWS = [{"prompt": f"What is {i} + 1?", "answer": str(i + 1), "level": i % 3} for i in range(30)]
CHAT = (
    "{% for m in messages %}{{ '<' + m.role + '> ' + m.content + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def jsonl(tmp_path):
    """A function that writes rows to a JSONL file and returns its path."""

    def write(rows, name="data.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def pairs(prompts):
    return [(prompt.text, prompt.answer) for prompt in prompts]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "folder", "folder of splits", "folder of files"])
def test_the_same_rows_from_every_kind_of_data(tmp_path, jsonl, kind, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    if kind == "jsonl":
        path = jsonl(ROWS)
    elif kind == "parquet":
        path = str(tmp_path / "data.parquet")
        pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=7)
    elif kind == "folder of files":
        path = str(tmp_path / "files")
        Path(path).mkdir()
        pq.write_table(pa.Table.from_pylist(ROWS), f"{path}/train-00000-of-00001.parquet")
    else:
        path = str(tmp_path / "saved")
        saved = datasets.Dataset.from_list(ROWS)
        if kind == "folder of splits":
            saved = datasets.DatasetDict({"train": saved, "test": saved.select(range(3))})
        saved.save_to_disk(path)
    task = Dataset(path, heldout=5, chat_template=False)
    train, heldout = task.prompts("train"), task.prompts("heldout")
    assert (len(train), len(heldout)) == (25, 5)
    assert sorted(pairs(train + heldout)) == sorted((row["prompt"], row["answer"]) for row in ROWS)
    assert len({prompt.id for prompt in train + heldout}) == 30
    assert {prompt.id for prompt in train + heldout} == {f"dataset/{n}" for n in range(1, 31)}
    assert task.prompts("train") is train
    assert not task.dropped
    # By the texts alone: the same whatever the data is in.
    assert pairs(heldout) == pairs(Dataset(jsonl(ROWS), heldout=5, chat_template=False).prompts("heldout"))


def test_what_is_held_out_depends_on_the_seed_and_not_on_the_order_of_the_rows(jsonl):
    task = Dataset(jsonl(ROWS), heldout=8)
    shuffled = replace(task, path=jsonl(ROWS[::-1], "shuffled.jsonl"))
    assert set(pairs(shuffled.prompts("heldout"))) == set(pairs(task.prompts("heldout")))
    other = replace(task, seed=1)
    assert set(pairs(other.prompts("heldout"))) != set(pairs(task.prompts("heldout")))
    assert other.heldout_hash != task.heldout_hash
    assert replace(task).heldout_hash == task.heldout_hash
    assert replace(task, system="Be brief.").heldout_hash != task.heldout_hash
    more = replace(task, path=jsonl([*ROWS, {"prompt": "new?", "answer": "1"}], "more.jsonl"))
    assert len(set(pairs(more.prompts("heldout"))) & set(pairs(task.prompts("heldout")))) >= 7


def test_a_limit_changes_nothing_of_what_is_held_out(jsonl):
    task = Dataset(jsonl(ROWS), heldout=8)
    few = replace(task, limit=4)
    assert few.prompts("heldout") == task.prompts("heldout")
    assert len(few.prompts("train")) == 4
    assert set(few.prompts("train")) < set(task.prompts("train"))
    assert few.prompts("train") != task.prompts("train")[:4]  # drawn, not the first
    assert len(replace(task, limit=99).prompts("train")) == 22


def test_a_text_that_occurs_twice_is_never_on_both_sides(jsonl):
    twice = [*ROWS, *({**row, "prompt": f"  {row['prompt'].replace(' ', '  ')}\n"} for row in ROWS)]
    for seed in range(5):
        task = Dataset(jsonl(twice), heldout=10, seed=seed)
        train, heldout = ({" ".join(p.text.split()) for p in task.prompts(s)} for s in ("train", "heldout"))
        assert (len(train), len(heldout)) == (20, 10)
        assert not train & heldout
        assert task.dropped == {"duplicate": 30}
    same = Dataset(heldout=10, path=jsonl([{**row, "id": i} for i, row in enumerate(ROWS)] * 2), id="id")
    assert same.dropped == {"duplicate": 30}  # the same row twice is not another row of its id


def test_what_is_held_out_does_not_depend_on_what_is_put_around_it(jsonl):
    task = Dataset(jsonl(ROWS), heldout=8)
    dressed = replace(task, system="Be brief.", template="Q: {prompt}")
    assert [p.id for p in dressed.prompts("heldout")] == [p.id for p in task.prompts("heldout")]


def test_a_system_prompt_of_the_data_tells_prompts_apart(jsonl):
    rows = [{"prompt": chat(("system", f"Add {n}."), ("user", "To 1?")), "answer": n + 1} for n in range(4)]
    task = Dataset(jsonl(rows), heldout=1)
    assert len(task.prompts("train")) == 3
    with pytest.raises(InputError, match="there are 1 different prompts"):
        replace(task, system="Be brief.").prompts("train")


def test_held_out_data_of_its_own_is_kept_out_of_the_training_data(jsonl):
    held = [ROWS[3], {**ROWS[4], "prompt": ROWS[4]["prompt"] + " "}, {"prompt": "else?", "answer": 0}]
    task = Dataset(jsonl(ROWS), heldout_path=jsonl(held, "held.jsonl"))
    assert [prompt.id for prompt in task.prompts("heldout")] == ["heldout/1", "heldout/2", "heldout/3"]
    assert not {ROWS[3]["prompt"], ROWS[4]["prompt"]} & {p.text for p in task.prompts("train")}
    assert len(task.prompts("train")) == 28
    assert task.dropped == {"heldout": 2}
    fewer = replace(task, heldout=1)  # the two others are not trained on either
    assert len(fewer.prompts("heldout")) == 1
    assert fewer.prompts("train") == task.prompts("train")


def test_the_held_out_split_of_a_data_set(tmp_path):
    train, test = datasets.Dataset.from_list(ROWS), datasets.Dataset.from_list(ROWS[:4])
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "saved")
    task = Dataset(str(tmp_path / "saved"), heldout_split="test")
    assert pairs(task.prompts("heldout")) == [(row["prompt"], row["answer"]) for row in ROWS[:4]]
    assert (len(task.prompts("train")), task.dropped) == (26, {"heldout": 4})
    with pytest.raises(InputError, match=r"saved: no split 'validation'; there are: train, test"):
        replace(task, heldout_split="validation").prompts("train")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_columns_inside_columns(tmp_path, jsonl, kind):
    rows = [
        {
            "problem": [{"role": "system", "content": "Think."}, {"role": "user", "content": f"{i} + {i}?"}],
            "reward_model": {
                "style": "rule",
                "ground_truth": [2 * i, "spare"] if kind == "jsonl" else [2 * i],
            },
            "meta": {"level": f"level {i % 2}", "index": i},
            "key": f"level {i % 2}/{i}",
        }
        for i in range(6)
    ]
    if kind == "jsonl":
        path = jsonl(rows)
    else:
        path = str(tmp_path / "data.parquet")
        pq.write_table(pa.Table.from_pylist(rows), path)
    task = Dataset(path, prompt="problem", answer="reward_model.ground_truth.0", id="key", heldout=1)
    prompts = task.prompts("train") + task.prompts("heldout")
    assert {p.id: (p.text, p.answer) for p in prompts} == {
        f"dataset/level {i % 2}/{i}": (f"{i} + {i}?", str(2 * i)) for i in range(6)
    }
    assert prompts[0].messages == (("system", "Think."), ("user", prompts[0].text))
    named = replace(task, id="meta.index", system="Be brief.", template="Q: {prompt}\n\\boxed{}")
    prompt = named.prompts("train")[0]
    number = int(prompt.id.removeprefix("dataset/"))
    text = f"Q: {number} + {number}?\n\\boxed{{}}"
    assert prompt.messages == (("system", "Be brief."), ("user", text))
    assert prompt.text == text


@pytest.fixture(scope="module")
def tokenizer():
    """One token per word, with a chat template."""
    words = ["<pad>", "<user>", "<system>", "<assistant>", "What", "is", "+", "1", "?", "Be", "brief.", "Q:"]
    words += [str(n) for n in range(40) if n != 1]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", chat_template=CHAT)


def words_of(tokenizer, prompt):
    return tokenizer.convert_ids_to_tokens(prompt_tokens(tokenizer, prompt).tolist())


def test_tokens_come_by_the_chat_template_or_from_the_text_as_it_is(jsonl, tokenizer):
    path = jsonl([{"prompt": f"What is {i} + 1 ?", "answer": i + 1} for i in range(3)])
    task = Dataset(path, heldout=1, system="Be brief.", template="Q: {prompt}")
    (prompt,) = [p for p in task.prompts("train") + task.prompts("heldout") if " 2 " in p.text]
    chat = "<system> Be brief. <user> Q: What is 2 + 1 ? <assistant>"
    assert words_of(tokenizer, prompt) == chat.split()
    plain = replace(task, system=None, chat_template=False)
    (prompt,) = [p for p in plain.prompts("train") + plain.prompts("heldout") if " 2 " in p.text]
    assert words_of(tokenizer, prompt) == ["Q:", "What", "is", "2", "+", "1", "?"]
    assert prompt_tokens(tokenizer, prompt).dtype == "int64"


def test_a_tokenizer_without_a_template_and_one_that_refuses(tokenizer):
    prompt = Prompt("dataset/1", "1", "1", (("system", "Be"), ("user", "1")))
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(InputError, match=r"no chat template: task\.chat_template must be false"):
        prompt_tokens(bare, prompt)
    strict = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        chat_template="{{ raise_exception('System role not supported') }}",
    )
    with pytest.raises(InputError, match=r"refuses prompt dataset/1 \(System role not supported\)"):
        prompt_tokens(strict, prompt)


@pytest.fixture
def recipe(jsonl, tokenizer, tmp_path):
    """A recipe of 20 prompts of 7 words and 3 of more, 5 of them held out; its model is but a tokenizer."""
    rows = [{"prompt": f"What is {i} + 1 ?", "answer": i + 1} for i in range(20)]
    rows += [{"prompt": f"What is {i} + 1 + 1 + 1 ?", "answer": i + 3} for i in range(3)]
    tokenizer.save_pretrained(tmp_path / "model")
    return from_dict(
        {
            "model": str(tmp_path / "model"),
            "task": {"kind": "dataset", "path": jsonl(rows), "heldout": 5},
            "budget": {"kind": "steps", "amount": 1},
            "context": {"prompt": 8},
        }
    )


def test_prompts_that_are_too_long_are_an_error_or_left_out(recipe):
    message = (
        r"context\.prompt: 8 tokens are allowed, and prompt dataset/2[123] has 12 "
        r"\(3 of 23 prompts are too long; task\.too_long = 'drop' leaves them out\)"
    )
    with pytest.raises(InputError, match=message):
        check_prompts(recipe, recipe.model)
    dropping = replace(recipe, task=replace(recipe.task, too_long="drop"))
    checked: Any = check_prompts(dropping, recipe.model)
    assert checked == dropping  # config.json says the same
    for split in ("train", "heldout"):
        assert checked.task.prompts(split) == [
            p for p in recipe.task.prompts(split) if p.text.count("+") == 1
        ]
    assert checked.task.dropped == {"too_long": 3}
    assert not dropping.task.dropped
    there = pickle.loads(pickle.dumps(checked))  # as the evaluation process gets it
    assert there.task.prompts("train") == checked.task.prompts("train")
    assert there.task.heldout_hash == checked.task.heldout_hash
    roomy = replace(recipe, context=replace(recipe.context, prompt=12))
    assert check_prompts(roomy, recipe.model) is roomy
    with pytest.raises(InputError, match="every prompt of the heldout split is too long"):
        check_prompts(replace(dropping, context=replace(recipe.context, prompt=3)), recipe.model)


def test_a_recipe_says_it_all_and_goes_through_json_and_back(recipe):
    task = {
        "kind": "dataset", "path": "org/name", "subset": "main", "split": "train[:90%]",
        "heldout_split": "test", "heldout": 10, "limit": 5, "seed": 3,
        "prompt": "q", "answer": "a.b", "id": "n", "system": "S", "template": "{prompt}!",
        "too_long": "drop", "verifier": {"kind": "function", "name": "a.b:c"},
        "limits": {"seconds": 3.0, "memory_gib": 2.0, "workers": 5},
    }  # fmt: skip
    full: Any = from_dict(recipe.to_dict() | {"task": task})
    assert full.task.verifier == Function("a.b:c")
    assert full.task.limits == Limits(3.0, 2.0, 5)
    assert from_dict(json.loads(json.dumps(full.to_dict()))) == full
    assert recipe.task.verifier == Math()
    exact: Any = from_dict(recipe.to_dict() | {"task": {**task, "verifier": {"kind": "exact"}}})
    assert exact.task.verifier == Exact()


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({}, "missing key 'task.kind'"),
        ({"kind": "dataset"}, "missing key 'task.path'"),
        ({"kind": "csv", "path": "x"}, "task: found .*csv.*expected 'chain', 'dataset'"),
        (
            {"kind": "dataset", "path": "x", "promt": "q"},
            "unknown key 'task.promt'; did you mean 'task.prompt'",
        ),
        ({"kind": "dataset", "path": "x", "heldout": 0}, "task: heldout and limit must be at least 1"),
        ({"kind": "dataset", "path": "x", "template": "Q"}, r"task: template must hold \{prompt\}"),
        (
            {"kind": "dataset", "path": "x", "too_long": "cut"},
            "task.too_long: found 'cut', expected 'error' or",
        ),
        (
            {"kind": "dataset", "path": "x", "verifier": {"kind": "maths"}},
            "task.verifier: found .*expected 'math'",
        ),
        (
            {"kind": "dataset", "path": "x", "limits": {"seconds": -1}},
            "task.limits: seconds and memory_gib must",
        ),
        (
            {"kind": "dataset", "path": "x", "verifier": {"kind": "function", "name": "judge"}},
            "task.verifier: name must be",
        ),
        (
            {"kind": "dataset", "path": "x", "system": "S", "chat_template": False},
            "task: system needs chat_template = true",
        ),
    ],
)
def test_a_mistake_in_the_recipe_is_named(recipe, task, message):
    with pytest.raises(InputError, match=message) as caught:
        from_dict(recipe.to_dict() | {"task": task})
    assert "\n" not in str(caught.value)


def chat(*messages):
    return [{"role": role, "content": content} for role, content in messages]


BAD_ROWS = {
    "no column 'prompt'; there are: question, answer": {"question": "x", "answer": "1"},
    "column 'prompt' must be a text or messages, found None": {"prompt": None, "answer": "1"},
    "column 'prompt' must be a text or messages, found ' '": {"prompt": " ", "answer": "1"},
    "column 'prompt': the last message must be of role 'user', found": {
        "prompt": chat(("user", "a"), ("assistant", "b")),
        "answer": "1",
    },
    "column 'prompt': messages must be {role, content}, both texts": {
        "prompt": chat(("user", [{"type": "image"}])),
        "answer": "1",
    },
    "column 'prompt': the last message must be of role 'user', found []": {"prompt": [], "answer": "1"},
    "'\\ud83d' is no character": {"prompt": "half of \ud83d", "answer": "1"},
    "column 'answer' must be a text or a number, found None": {"prompt": "x", "answer": None},
    "column 'answer' must be a text or a number, found ''": {"prompt": "x", "answer": ""},
    "column 'answer' must be a text or a number, found True": {"prompt": "x", "answer": True},
    "column 'answer' must be a text or a number, found ['1']: name what is inside, as in answer.0": {
        "prompt": "x",
        "answer": ["1"],
    },
}


@pytest.mark.parametrize(("message", "row"), BAD_ROWS.items(), ids=range(len(BAD_ROWS)))
def test_a_bad_row_is_named_by_file_line_and_column(jsonl, message, row):
    path = jsonl([*ROWS[:2], row, *ROWS[2:]])
    with pytest.raises(InputError) as caught:
        Dataset(path, heldout=1).prompts("train")
    assert str(caught.value).startswith(f"{path}, line 3: {message}")
    assert "\n" not in str(caught.value)


def test_other_errors_of_the_data_are_one_line(tmp_path, jsonl):
    (tmp_path / "torn.jsonl").write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b"')
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\nno\n{}\n')
    (tmp_path / "no.parquet").write_text("this is no Parquet")
    (tmp_path / "data.csv").write_text("prompt,answer\n1,2\n")
    (tmp_path / "empty").mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "data.parquet")
    good = jsonl(ROWS)
    for task, message in [
        (Dataset(str(tmp_path / "torn.jsonl")), "torn.jsonl: the last line is unfinished: not JSON"),
        (Dataset(str(tmp_path / "bad.jsonl")), "bad.jsonl, line 2: not JSON"),
        (Dataset(str(tmp_path / "none.jsonl")), "none.jsonl: no such file"),
        (Dataset(str(tmp_path / "none.parquet")), "none.parquet: no such file"),
        (Dataset(str(tmp_path / "no.parquet")), "no.parquet: not Parquet ("),
        (Dataset(str(tmp_path / "data.csv")), "data.csv: expected a .jsonl or .parquet file, a folder"),
        (Dataset(str(tmp_path / "none" / "such")), "such: no such file or folder"),
        (Dataset(str(tmp_path / "empty")), "empty: cannot be loaded ("),
        (Dataset(str(tmp_path / "data.parquet"), prompt="q"), "data.parquet: no column 'q'; "
         "there are: prompt, answer, level"),
        (Dataset(good, heldout=30), "data.jsonl: there are 30 different prompts, and task.heldout holds"),
        (Dataset(good, id="level", heldout=3), "data.jsonl, line 4: the id 'dataset/0' is also that of"),
        (Dataset(good, heldout_path=good), "data.jsonl: no training prompt"),
    ]:  # fmt: skip
        with pytest.raises(InputError) as caught:
            task.prompts("train")
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_name_of_the_hub_is_asked_for_there_and_offline_that_is_one_line():
    code = """
from scalerl.errors import InputError
from scalerl.rl.tasks.dataset import Dataset
try:
    Dataset("some-org/some-name").prompts("train")
except InputError as error:
    print(error)
"""
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(
        "some-org/some-name: cannot be loaded from the Hub, and there is no such file or folder ("
    )
    assert done.stdout.count("\n") == 1


def test_libraries_that_are_not_there_are_named(tmp_path, monkeypatch):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "data.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"needs pyarrow: pip install 'scalerl\[data\]'"):
        Dataset(str(tmp_path / "data.parquet")).prompts("train")
    with pytest.raises(InputError, match=r"needs datasets: pip install 'scalerl\[data\]'"):
        Dataset(str(tmp_path)).prompts("train")


def test_answers_of_many_parts_go_to_a_function_as_json(jsonl):
    cases = {"inputs": ["1 2"], "outputs": ["3"]}
    path = jsonl([{"prompt": f"add {i}", "answer": cases} for i in range(3)])
    task = Dataset(path, heldout=1, verifier=Function("a:b"))
    assert [json.loads(p.answer) for p in task.prompts("train")] == [cases] * 2
