"""Rows from files that pyarrow and datasets write, and from JSONL; what is held out; what is wrong."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scalerl.errors import InputError
from scalerl.rl.tasks.dataset import Dataset
from scalerl.rl.tasks.verifiers import Function

ROWS = [{"prompt": f"What is {i} + 1?", "answer": str(i + 1), "level": i % 3} for i in range(30)]


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
    "column 'answer' must be a text or a number, found ['1']: name what is inside, e.g. answer.0": {
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
