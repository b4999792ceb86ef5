"""A task of the user's own: what is checked before a run, what its verdicts may be, and that it is learnt."""

import re
import sys
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

import pytest
from extensions import PAGES, write_extensions

from scalerl.cli.main import main
from scalerl.errors import InputError
from scalerl.own_code import load
from scalerl.rl import Limits, Prompt, Task, load_recipe, train
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.config.settings import Context, Steps
from scalerl.rl.engine.build import check_prompts
from scalerl.rl.model.causal_lm import load_tokenizer
from scalerl.rl.model.named import find_model, is_to_be_built, model_shape
from scalerl.rl.types import Reward
from scalerl.rl.verify.verifier import DirectVerifier, PoolVerifier

GOOD = {
    "heldout": (("h/1", "1 + 1 ="), ("h/2", "1 + 2 =")),
    "train": (("t/1", "2 + 1 ="), ("t/2", "2 + 2 =")),
}


@dataclass(frozen=True)
class Told(Task):
    """Prompts as they are given, as (id, text)."""

    told: MappingProxyType = field(default_factory=lambda: MappingProxyType(GOOD), repr=False)

    def prompts(self, split):
        told = self.told[split]
        if not isinstance(told, tuple):
            return told
        return [Prompt(one[0], one[1], "2") if isinstance(one, tuple) else one for one in told]

    def verify(self, prompt, text):
        return prompt.answer in text


def recipe_of(model, **splits):
    task = Told(MappingProxyType({**GOOD, **splits}))
    return Recipe(model=str(model), task=task, budget=Steps(3), context=Context(prompt=8, thinking=4))


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"train": ()}, r"task: prompts\('train'\) is empty: there is no training prompt"),
        ({"heldout": ()}, r"task: prompts\('heldout'\) is empty: there is no held-out prompt"),
        ({"heldout": None}, r"task: prompts\('heldout'\) returns None: expected a list of Prompt"),
        (
            {"train": ("2 + 1 =",)},
            r"task: prompts\('train'\) holds '2 \+ 1 =': expected a Prompt",
        ),
        ({"train": (("t", "1 ="), ("t", "2 ="))}, "task: training prompts share the id 't': each must have"),
        ({"heldout": (("h", "1 ="), ("h", "2 ="))}, "task: held-out prompts share the id 'h'"),
        (
            {"train": (*GOOD["train"], ("t/3", "1 + 2 ="))},
            r"task: prompt 't/3' is in both splits \(1 of 3 training prompts are held out, too\)",
        ),
        (
            {"train": (("t/1", "What is 1 ?"),)},
            "prompt t/1: the tokenizer does not know 'What'; it knows <pad>",
        ),
        (
            {"train": (("t/1", "1 + 1 + 1 + 1 + 1 ="),)},
            "context.prompt: 8 tokens are allowed, and prompt t/1",
        ),
    ],
)
def test_prompts_that_no_run_can_use_are_a_line_at_its_start(llama_folder, tmp_path, splits, message):
    recipe = recipe_of(llama_folder, **splits)
    with pytest.raises(InputError, match=f"^{message}"):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()


def test_prompts_are_checked_before_the_vocabulary_of_the_demonstration_is():
    with pytest.raises(InputError, match=r"^task: prompts\('train'\) holds '1 \+ 1 =': expected a Prompt"):
        model_shape(recipe_of("chain-base", train=("1 + 1 =",)))


def test_a_word_for_padding_may_be_meant(llama_folder):
    recipe = recipe_of(llama_folder, train=(("t/1", "<pad> 2 + 1 ="),))
    assert check_prompts(recipe, llama_folder) is recipe


def test_answers_that_would_be_cut_are_warned_of(llama_folder, caplog):
    """One digit takes two tokens with its end, four take five, which the tokenizer knows one by one."""
    recipe = recipe_of(llama_folder)
    short = replace(recipe, context=replace(recipe.context, answer=1))
    check_prompts(replace(recipe, context=replace(recipe.context, answer=2)), llama_folder)
    assert not caplog.messages
    check_prompts(short, llama_folder)
    of_four = [Prompt("h/1", "1 + 1 =", "1234"), Prompt("h/2", "1 + 2 =", "2")]
    check_prompts(
        replace(recipe_of(llama_folder, heldout=of_four), context=replace(recipe.context, answer=4)),
        llama_folder,
    )
    assert caplog.messages == [
        "context.answer: 1 tokens are sampled of an answer, and that of prompt h/1 takes 2 with its end "
        "token; 2 of 2 held-out prompts have such answers, which are cut and count as wrong",
        "context.answer: 4 tokens are sampled of an answer, and that of prompt h/1 takes 5 with its end "
        "token; 1 of 2 held-out prompts have such answers, which are cut and count as wrong",
    ]


def test_the_base_model_of_the_demonstration_serves_any_task_of_its_words(monkeypatch, tmp_path):
    monkeypatch.setenv("SCALERL_CACHE", str(tmp_path))
    demo, own = load_recipe("demo"), recipe_of("chain-base:thinking=16")
    assert is_to_be_built(own)
    shapes = [{name: p.shape for name, p in model_shape(one).named_parameters()} for one in (demo, own)]
    assert shapes[0] == shapes[1]
    with pytest.raises(InputError, match=r"^model: 'chain-base' knows <pad> .*, and prompt t/1 holds 'What'"):
        find_model(recipe_of("chain-base", train=(("t/1", "What is 1 ?"),)))


@pytest.mark.parametrize("verifier", [DirectVerifier, partial(PoolVerifier, limits=Limits(workers=1))])
def test_a_bool_stands_for_one_and_minus_one(llama_folder, make_rollout, monkeypatch, tmp_path, verifier):
    (tmp_path / "yes.py").write_text(
        "from dataclasses import dataclass\nfrom scalerl.rl import Task\n\n@dataclass(frozen=True)\n"
        "class Yes(Task):\n    def prompts(self, split):\n        return []\n\n"
        "    def verify(self, prompt, text):\n        return '7' in text\n"
    )
    monkeypatch.chdir(tmp_path)
    tokenizer = load_tokenizer(llama_folder)
    right, wrong = (tokenizer.convert_tokens_to_ids(word) for word in "78")
    rollouts = [make_rollout(length=1, token_T=(token,)) for token in (right, wrong)]
    with closing(verifier(load("yes.py:Yes")(), tokenizer)) as judge:
        assert judge.verify([rollouts]) == [[Reward(1.0, True), Reward(-1.0, False)]]
        assert not judge.failures


@pytest.mark.slow
def test_the_task_of_the_page_is_learnt(monkeypatch, tmp_path):
    """By the model of the demonstration and with the settings of the page, in ten steps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    write_extensions(tmp_path)
    page = (PAGES / "task.md").read_text()
    own = re.findall(r"--set (\S+)", page)
    assert "task.kind=tasks.py:Sums" in own
    recipe = load_recipe("demo", [*own, "budget.kind=steps", "budget.amount=10", "evaluation.count=1"])
    before, after = (point.pass_rate for point in train(recipe, "run", evaluate_aside=False).evals)
    assert before < 0.6
    assert after > 0.8


FAILING = """
from dataclasses import dataclass
from scalerl.rl import Prompt, Task

@dataclass(frozen=True)
class Failing(Task):
    def prompts(self, split):
        {}

    def verify(self, prompt, text):
        return True
"""


@pytest.mark.parametrize("command", ["train", "audit"])
@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("raise ConnectionError('no network')", "ConnectionError: no network"),
        ("raise OSError('no disk')", "OSError: no disk"),
        ("raise BrokenPipeError(32, 'gone')", "BrokenPipeError: [Errno 32] gone"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_prompts_that_raise_are_a_line_of_the_task(tmp_path, monkeypatch, capsys, command, body, cause):
    """An error of a socket has the type of one of standard output, and is none."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "failing.py").write_text(FAILING.format(body))
    recipe = 'model = "chain-base"\ntask = "failing.py:Failing"\nbudget = {kind = "steps", amount = 1}\n'
    (tmp_path / "mine.toml").write_text(recipe)
    assert main([command, "mine.toml"]) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(r"scalerl: task Failing: prompts\('(train|heldout)'\) raised an error \(.*\)\n", said)
    assert f"({cause})\n" in said
