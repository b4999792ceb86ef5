"""A data set in a recipe: its keys, what is wrong with them, and its prompts as tokens."""

import json
import pickle
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from scalerl.errors import InputError
from scalerl.rl.config.recipe import from_dict
from scalerl.rl.engine.build import check_prompts
from scalerl.rl.model.causal_lm import prompt_tokens
from scalerl.rl.tasks.dataset import Dataset
from scalerl.rl.tasks.verifiers import Exact, Function, Math
from scalerl.rl.types import Limits, Prompt

CHAT = (
    "{% for m in messages %}{{ '<' + m.role + '> ' + m.content + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %} <pad> <pad>{% endif %}"
)


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


def test_arguments_of_the_chat_template_reach_the_tokens_and_survive_a_checkpoint(jsonl, tokenizer):
    path = jsonl([{"prompt": f"What is {i} + 1 ?", "answer": i + 1} for i in range(3)])
    values = {"kind": "dataset", "path": path, "heldout": 1, "chat_template_args": {"enable_thinking": False}}
    recipe = from_dict({"model": "m", "task": values, "budget": {"kind": "steps", "amount": 1}})
    assert from_dict(json.loads(json.dumps(recipe.to_json()))) == recipe
    for prompt in recipe.task.prompts("train") + recipe.task.prompts("heldout"):
        assert words_of(tokenizer, prompt)[-3:] == ["<assistant>", "<pad>", "<pad>"]
        assert Prompt.from_json(json.loads(json.dumps(vars(prompt)))) == prompt
    task: Any = recipe.task
    thinking = replace(task, chat_template_args={"enable_thinking": True})
    assert words_of(tokenizer, thinking.prompts("train")[0])[-1] == "<assistant>"
    assert thinking.heldout_hash != recipe.task.heldout_hash  # it is asked something else
    # Checkpoints of earlier versions do not have them.
    assert Prompt.from_json({"id": "d/1", "text": "1", "answer": "1", "messages": None}).template_args == ()


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
        (
            {"kind": "csv", "path": "x"},
            "task.kind: no kind 'csv'; the kinds are chain, dataset, code, env, reasoning_gym,",
        ),
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
            "task.verifier.kind: no kind 'maths'; did you mean 'math'. the kinds are math",
        ),
        (
            {"kind": "dataset", "path": "x", "limits": {"seconds": -1}},
            "task.limits: seconds must be positive",
        ),
        (
            {"kind": "dataset", "path": "x", "verifier": {"kind": "function", "name": "judge"}},
            "task.verifier: name must be",
        ),
        (
            {"kind": "dataset", "path": "x", "system": "S", "chat_template": False},
            "task: system needs chat_template = true",
        ),
        (
            {"kind": "dataset", "path": "x", "chat_template": False, "chat_template_args": {"a": 1}},
            "task: chat_template_args needs chat_template = true",
        ),
        (
            {"kind": "dataset", "path": "x", "chat_template_args": {"tokenize": False}},
            "task: chat_template_args: tokenize is not a variable of a chat template; leave it out",
        ),
    ],
)
def test_a_mistake_in_the_recipe_is_named(recipe, task, message):
    with pytest.raises(InputError, match=message) as caught:
        from_dict(recipe.to_dict() | {"task": task})
    assert "\n" not in str(caught.value)
