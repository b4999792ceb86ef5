"""Answers judged as mathematics and as text, and a run on a data set of sums."""

import json
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from scalerl.errors import InputError
from scalerl.rl.config.recipe import from_dict
from scalerl.rl.model.causal_lm import load_model, load_tokenizer
from scalerl.rl.model.named import find_model
from scalerl.rl.model.weights import weights_of
from scalerl.rl.placement.evaluate import Evaluator
from scalerl.rl.tasks.verifiers import Exact, Math, last_box
from scalerl.rl.train import train
from scalerl.rl.types import Limits, Prompt, Reward
from scalerl.rl.verify.verifier import load_verifier


def judged(verifier, answer, text):
    reward = verifier.verify(Prompt("p", "", answer), text)
    assert reward.value == (1.0 if reward.correct else -1.0)
    assert reward.failed is None
    return reward.correct


@pytest.mark.parametrize(
    ("answer", "text", "correct"),
    [
        ("1/2", r"so it is \boxed{0.5}", True),
        ("1/2", r"so it is \boxed{\frac{2}{4}}", True),
        (r"\frac12", "it is 1/2.", True),
        ("$5$", r"\boxed{x = 5}", True),
        ("1234", r"\boxed{1,234}", True),
        ("x^2+1", r"\boxed{1 + x^2}", True),
        ("1, 2", r"\boxed{2,1}", True),
        ("(1, 2)", r"\boxed{(2,1)}", False),
        (r"\{1,2\}", r"\boxed{\left\{2, 1\right\}}", True),
        ("3", r"\boxed{1,2,3}", False),  # an answer among others is no answer
        ("7", r"first \boxed{3}, and then \boxed{7}", True),  # the last box
        ("3", r"first \boxed{3}, and then \boxed{7}", False),
        ("7", r"\boxed{7} which is not 8", True),  # a box before any other expression
        ("8", r"\boxed{7} which is not 8", False),
        ("8", "7 is not 8", True),  # else the last expression
        ("7", "7 is not 8", False),
        ("7", r"\boxed{8</think>It is 7", True),  # after the thinking
        ("8", r"It is \boxed{8}</think>It is 7", False),
        ("7", r"\boxed{7}</think>I do not know", False),
        ("7", r"</think>\boxed{7}</think>\boxed{8}", False),  # after the first end of thinking
        ("7", "", False),
        ("7", "</think>", False),
        ("7", r"\boxed{", False),
        ("50", "it is 50 %", True),
        (r"\boxed{42}", "42", True),  # an answer may be in its box
    ],
)
def test_answers_as_mathematics(answer, text, correct):
    assert judged(Math(), answer, text) is correct


def test_an_answer_of_the_data_that_is_no_mathematics_is_no_wrong_answer():
    with pytest.raises(ValueError, match=r"math-verify cannot read the answer '\?\?'"):
        Math().verify(Prompt("p", "", "??"), "5")


@pytest.mark.parametrize(
    ("answer", "text", "correct"),
    [
        ("Paris", " paris\n", True),
        ("Paris", "It is Paris", False),
        ("New  York", "x</think>new york", True),
        ("1/2", "0.5", False),
        ("B", r"Thus \boxed{ b }", True),
        ("A", r"\boxed{A} or \boxed{B}", False),
        ("ﬁve", "FIVE", True),  # a ligature
        ("5", "", False),
    ],
)
def test_answers_as_text(answer, text, correct):
    assert judged(Exact(), answer, text) is correct


def test_the_answer_begins_after_a_mark_of_ones_own():
    assert judged(Exact(after="####"), "7", "3 + 4 #### 7")
    assert judged(Math(after="####"), "7", r"\boxed{5} #### 7")
    assert judged(Exact(after=""), "7", "7")
    assert judged(Exact(after="####"), "7", "7")  # without the mark all of it


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{1}", "1"),
        (r"\boxed {1}", "1"),
        (r"\boxed{\frac{1}{2}} and \boxed{3", r"\frac{1}{2}"),
        (r"\boxed{a \} b} c}", r"a \} b"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{1 \boxed{2}}", "2"),
        (r"} \boxed{1}", "1"),
        (r"{ \boxed{1}", "1"),
        (r"\\\boxed{1}", "1"),
        ("boxed{1}", None),
        (r"\boxed{1", None),
        ("", None),
    ],
)
def test_the_last_box_that_is_closed(text, box):
    assert last_box(text) == box


def test_many_open_boxes_take_no_time():
    assert last_box("\\boxed{" * 100_000 + "1}") == "1"  # in quadratic time this would take minutes


FAST = Limits(seconds=1.5)
WORDS = [
    "<pad>", "<end>", "</think>", "<user>", "<assistant>", "!", "+", "=", "?", *map(str, range(20))
]  # fmt: skip
CHAT = (
    "{% for m in messages %}{{ '<' + m.role + '> ' + m.content + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny Qwen3 with random weights and one token per word."""
    folder = str(tmp_path_factory.mktemp("qwen3"))
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<end>", chat_template=CHAT
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(model, tmp_path):
    """Three steps on sums, with random guesses of which some are right."""
    sums = [(a, b) for a in range(6) for b in range(6)]
    rows = [
        {"problem": [{"role": "user", "content": f"{a} + {b} = ?"}], "solution": {"final": f"{a + b}.0"}}
        for a, b in sums
    ]
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return from_dict(
        {
            "model": model,
            "task": {
                "kind": "dataset",
                "path": str(path),
                "prompt": "problem",
                "answer": "solution.final",
                "heldout": 6,
            },
            "budget": {"kind": "steps", "amount": 3},
            "batch": {"prompts": 4, "samples": 16},
            "context": {"prompt": 7, "thinking": 4, "answer": 20},
            "length": {"kind": "forced_interruption", "low": 2, "high": 4, "phrase": "! </think>"},
            "optimiser": {"lr": 1e-3, "warmup_steps": 0},
            "schedule": {"k": 1},
            "evaluation": {"count": 1, "samples": 4},
            "decode_slots": 64,
        }
    )


def test_three_steps_on_a_data_set_with_the_math_verifier(recipe, model, tmp_path):
    record = train(recipe, tmp_path / "run", model)
    steps = record.steps()
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert any(row["groups_used"] for row in steps)
    assert any(row["grad_norm"] and row["grad_norm"] > 0 for row in steps)
    assert all(-1 <= row["reward_mean"] < 0 for row in steps)
    assert [point.n_prompts for point in record.evals] == [6, 6]
    assert record.config["recipe"]["task"]["verifier"] == {"kind": "math", "after": "</think>"}


def test_a_run_of_which_nothing_can_be_verified_goes_on_and_says_so(recipe, model, tmp_path):
    path = tmp_path / "unreadable.jsonl"
    rows = [{"problem": f"{n} + 0 = ?", "solution": {"final": "??"}} for n in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = replace(recipe, task=replace(recipe.task, path=str(path)))
    record = train(recipe, tmp_path / "run", model, evaluate_aside=False)
    assert [row["completions_used"] for row in record.steps()] == [0, 0, 0]
    assert all(row["skipped"] for row in record.steps())
    evaluator = Evaluator(recipe, model)
    try:
        outcome = evaluator.evaluate(weights_of(load_model(model)), 0)
    finally:
        evaluator.close()
    assert outcome.failed == pytest.approx(1 - outcome.truncated)
    assert outcome.failed > 0.1
    assert outcome.correct_P.sum() == 0


def test_rewards_of_sampled_completions_are_those_of_the_task(recipe, model, make_rollout):
    tokenizer = load_tokenizer(model)
    ids = tokenizer.convert_tokens_to_ids
    verifier = load_verifier(recipe, tokenizer)
    try:
        prompt = next(p for p in recipe.task.prompts("train") if p.answer == "7.0")
        texts = ["4 + </think> 7 <end>", "7 </think> 8 <end>", "</think> 3 7 <end>", "</think> + <end>"]
        group = [
            replace(make_rollout(len(text.split()), token_T=tuple(map(ids, text.split()))), prompt=prompt)
            for text in texts
        ]
        right, wrong = Reward(1.0, True), Reward(-1.0, False)
        assert verifier.verify([group]) == [[right, wrong, right, wrong]]
        unreadable = [replace(group[0], prompt=replace(prompt, answer="??"))]
        hanging = [replace(group[0], prompt=replace(prompt, answer="9^{9^{9^{9^9}}} - 1"))]
        quick = load_verifier(replace(recipe, task=replace(recipe.task, limits=FAST)), tokenizer)
        try:
            assert quick.verify([unreadable, hanging, group[:1]]) == [
                [Reward(-1.0, False, "raised")],
                [Reward(-1.0, False, "timeout")],
                [right],
            ]
        finally:
            quick.close()
    finally:
        verifier.close()


def test_the_base_model_of_chain_is_for_prompts_of_its_words(recipe):
    with pytest.raises(InputError, match=r"model: 'chain-base' knows <pad> .*, and prompt .*: name another"):
        find_model(replace(recipe, model="chain-base"))
