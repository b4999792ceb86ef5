"""Environments as TRL takes them: what the model is told, what its calls answer, and what is correct."""

import json
from dataclasses import replace

import pytest
from byte_model import save_byte_model

from scalerl.errors import InputError
from scalerl.rl.config.recipe import from_dict, load_recipe
from scalerl.rl.engine.build import check_prompts
from scalerl.rl.model.causal_lm import answer_tokens, load_tokenizer
from scalerl.rl.tasks.environment import Environment, calls_in
from scalerl.rl.tasks.mix import Mix
from scalerl.rl.tasks.task import verdict
from scalerl.rl.tasks.verifiers import Exact
from scalerl.rl.types import Limits, Prompt, Reward, UserText

CODE = '''
class Shop:
    """Sells things."""

    def __init__(self):
        self.made = True

    def reset(self, money, **row):
        self.money, self.bought = money, []
        return f" You have {money} coins."

    def buy(self, thing: str, price: int = 1) -> str:
        """
        Buy something.

        Args:
            thing: what to buy.
            price: what it costs.
        """
        if price > self.money:
            raise ValueError("too expensive")
        self.money -= price
        self.bought.append(thing)
        return f"{thing}, {self.money} left"

    async def look(self) -> str:
        """Look around."""
        return "apples"

    def _secret(self):
        return 1

    def get_reward(self):
        return len(self.bought) / 2

class Plain:
    def reset(self, **row):
        self.row = row

    def keys(self) -> str:
        """Name the columns."""
        return " ".join(self.row)

class Toolless:
    def reset(self, **row):
        pass

class Bool(Plain):
    def get_reward(self):
        return True

class Undescribed(Plain):
    def add(self, a, b):
        return a + b

class Refuses(Plain):
    def reset(self, **row):
        raise KeyError("no such row")
'''


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture
def shop(tmp_path, jsonl):
    (tmp_path / "shop.py").write_text(CODE)
    rows = [{"prompt": f"Buy {n}.", "money": n, "answer": str(n)} for n in range(1, 7)]
    return Environment(jsonl(rows), environment=f"{tmp_path / 'shop.py'}:Shop", heldout=2)


def of(shop, name, **changes):
    return replace(shop, environment=shop.environment.replace("Shop", name), **changes)


def test_the_model_is_told_of_tools_as_qwen_is_and_reset_adds_to_the_prompt(shop):
    prompt = shop.prompts("train")[0]
    (system, told), (user, text) = prompt.messages
    assert (system, user) == ("system", "user")
    assert text == "Buy 1. You have 1 coins."
    tools = [
        json.loads(line) for line in told.partition("<tools>\n")[2].partition("\n</tools>")[0].split("\n")
    ]
    assert [tool["function"]["name"] for tool in tools] == ["buy", "look"]
    assert tools[0]["function"]["parameters"]["properties"]["price"] == {
        "type": "integer",
        "description": "what it costs.",
    }
    own = replace(shop, system="Be brief.", template="Do: {prompt}").prompts("train")[0]
    assert own.messages[0] == ("system", f"Be brief.\n\n{told}")
    assert own.messages[1] == ("user", "Do: Buy 1. You have 1 coins.")
    bare = replace(shop, chat_template=False).prompts("train")[0]
    assert (bare.messages, bare.text) == (None, "Buy 1. You have 1 coins.")


def test_calls_are_made_again_from_the_start_at_every_turn(shop):
    prompt = next(p for p in shop.prompts("train") if "Buy 3" in p.text)
    turns = [call("buy", thing="pear", price=2), call("buy", thing="fig")]
    assert shop.respond(prompt, turns[:1]) == ["pear, 1 left"]
    assert shop.respond(prompt, turns) == ["fig, 0 left"]
    assert shop.respond(prompt, turns) == ["fig, 0 left"]
    assert shop.respond(prompt, [*turns, "That is all."]) == []
    assert verdict(shop, prompt, [*turns, "That is all."]) == Reward(1.0, True)
    assert verdict(shop, prompt, turns) == Reward(0.5, False)  # the call of the last turn is not made
    assert verdict(replace(shop, correct_at=0.5), prompt, turns) == Reward(0.5, True)
    assert verdict(shop, prompt, ["Nothing."]) == Reward(0.0, False)


@pytest.mark.parametrize(
    ("turn", "answers"),
    [
        (call("buy", thing="fig", price=9), ["error: ValueError: too expensive"]),
        (call("sell"), ["error: ValueError: no tool sell; there are: buy, look"]),
        (call("buy", colour="red"), ["error: TypeError: Shop.buy() got an unexpected keyword"]),
        ("<tool_call>buy a fig</tool_call>", ["error: JSONDecodeError: Expecting value"]),
        ("<tool_call>7</tool_call>", ["error: ValueError: no tool 7; there are: buy, look"]),
        (call("_secret"), ["error: ValueError: no tool _secret"]),
        (call("reset", money=100), ["error: ValueError: no tool reset"]),
        (call("get_reward"), ["error: ValueError: no tool get_reward"]),
        ('Hm. <tool_call>\n{"name": "look"}\n', ["apples"]),
        (call("look") + call("buy", thing="fig"), ["apples", "fig, 2 left"]),
        ('<tool_call>[{"name": "look"}, {"name": "look"}]</tool_call>', ["apples\napples"]),
        (f"<think>Shall I {call('look')}?</think>No.", []),
        ("No.", []),
    ],
)
def test_what_a_turn_is_answered(shop, turn, answers):
    """An error is what the model reads, and not the end of anything."""
    prompt = next(p for p in shop.prompts("train") if "Buy 3" in p.text)
    found = shop.respond(prompt, [turn])
    assert len(found) == len(answers) == len(calls_in(turn))
    assert all(one.startswith(start) for one, start in zip(found, answers, strict=True))


def test_without_a_reward_of_its_own_the_verifier_takes_the_last_turn(shop):
    plain = of(shop, "Plain", answer="answer", verifier=Exact())
    prompt = plain.prompts("train")[0]
    assert plain.respond(prompt, [call("keys")]) == ["answer"]
    assert verdict(plain, prompt, [call("keys"), prompt.answer]) == Reward(1.0, True)
    assert verdict(plain, prompt, [prompt.answer, "other"]) == Reward(-1.0, False)
    assert of(shop, "Bool").respond(prompt=shop.prompts("train")[0], turns=[call("keys")]) == [
        "prompt money answer"
    ]
    assert verdict(of(shop, "Bool"), shop.prompts("train")[0], ["x"]) == Reward(1.0, True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Plain", r"task.environment: \S+:Plain has no get_reward\(\): set task.answer to the column"),
        ("Toolless", "task.environment: .*has no tool, which is a method without an underscore"),
        ("Undescribed", "task.environment: .*Undescribed.*no docstring"),
        ("Refuses", r"data.jsonl, line 1: reset of .*:Refuses raised an error .KeyError"),
        ("Nothing", "task.environment: .*has no Nothing; it has Shop, Plain"),
    ],
)
def test_a_class_that_cannot_be_an_environment_is_refused_in_a_line(shop, name, message):
    with pytest.raises(InputError, match=message) as caught:
        of(shop, name, answer="*" if name == "Plain" else "answer").prompts("train")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"length: environments of several turns do not go with an interruption; set length.kind"),
        ({"task": {"turns": 1}}, "task: turns must be at least 2"),
        ({"task": {"environment": "Shop"}}, "task: environment must be 'package.module:Class'"),
    ],
)
def test_what_is_not_supported_is_refused_before_the_run(shop, changes, message):
    task = {"kind": "env", "path": shop.path, "environment": shop.environment}
    table = {"model": "m", "budget": {"kind": "steps", "amount": 1}}
    with pytest.raises(InputError, match=message):
        from_dict({**table, **changes, "task": {**task, **changes.get("task", {})}})


def test_an_environment_in_one_line_of_a_recipe(shop):
    """`task = "env:..."`, or as the kind of a table."""
    line = f"env:{shop.environment}"
    overrides = [f"task={line}", f"task.path={shop.path}", "task.heldout=2", "length.kind=none"]
    recipe = load_recipe("demo", overrides)
    assert recipe.task == shop
    table = {key: value for key, value in recipe.to_dict().items() if key != "task"}
    again = from_dict({**table, "task": {"kind": line, "path": shop.path, "heldout": 2}})
    assert again == recipe
    assert from_dict(recipe.to_dict()) == recipe


def test_a_mixture_answers_within_the_turns_of_each_task(shop):
    mix = Mix({"short": replace(shop, turns=2), "long": shop})
    assert mix.turns == 8
    short, long = (next(p for p in mix.prompts("train") if p.id.startswith(n)) for n in ("short", "long"))
    assert mix.respond(short, [call("look")]) == mix.respond(long, [call("look")]) == ["apples"]
    assert mix.respond(short, [call("look")] * 2) == ()
    assert mix.respond(long, [call("look")] * 2) == ["apples"]
    assert mix.verify_turns(long, [call("buy", thing="fig"), "."]) == Reward(0.5, False)


QWEN = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_answers_are_what_the_chat_template_writes_behind_a_turn(tmp_path):
    """To the character: prompt, turn and answer are the template's text of the whole conversation."""
    tokenizer = load_tokenizer(save_byte_model(tmp_path / "model"))
    tokenizer.add_tokens(["<|im_end|>"], special_tokens=True)
    tokenizer.eos_token, tokenizer.chat_template = "<|im_end|>", QWEN
    messages = [{"role": "user", "content": "3 + 4?"}]
    prompt = Prompt("p", "3 + 4?", "7", (("user", "3 + 4?"),))
    shown = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    said, answers = call("add", a=3, b=4), ["7", "x <|im_end|> y"]
    follows = tokenizer.decode(answer_tokens(tokenizer, prompt, answers))
    whole = [*messages, {"role": "assistant", "content": said}]
    whole += [{"role": "tool", "content": answer} for answer in answers]
    expected = tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)
    assert shown + said + "<|im_end|>" + follows == expected
    assert tokenizer.decode(answer_tokens(tokenizer, Prompt("p", "3", "7"), answers)) == "".join(answers)
    assert len(answer_tokens(tokenizer, prompt, [])) == 0
    tokenizer.chat_template = QWEN.replace("<|im_start|>user", "{{ raise_exception('no tools') }}")
    with pytest.raises(InputError, match=r"the chat template refuses messages of tools \(no tools\)"):
        answer_tokens(tokenizer, prompt, answers)


def test_a_chat_template_without_tools_is_refused_before_the_run(shop, tmp_path):
    folder = save_byte_model(tmp_path / "model")
    recipe = load_recipe("demo", ["length.kind=none", "context.prompt=2000"])
    recipe = replace(recipe, task=replace(shop, limits=Limits(workers=1)))
    assert check_prompts(recipe, folder) is recipe
    written = (folder / "chat_template.jinja").read_text()
    refuses = "{% if m.role == 'tool' %}{{ raise_exception('no such role') }}{% endif %}"
    (folder / "chat_template.jinja").write_text(written.replace("%}{{ '<'", f"%}}{refuses}{{{{ '<'"))
    with pytest.raises(InputError, match="the chat template refuses messages of tools"):
        check_prompts(recipe, folder)


QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n\n"
    "</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("template", [QWEN, QWEN3])
def test_what_a_user_says_is_a_message_of_the_user(tmp_path, template):
    """Also where a template writes the last turn otherwise than those before."""
    tokenizer = load_tokenizer(save_byte_model(tmp_path / "model"))
    tokenizer.add_tokens(["<|im_end|>"], special_tokens=True)
    tokenizer.eos_token, tokenizer.chat_template = "<|im_end|>", template
    prompt = Prompt("p", "3 + 4?", "7", (("user", "3 + 4?"),))
    follows = tokenizer.decode(answer_tokens(tokenizer, prompt, [UserText("No.")]))
    assert follows == "\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"
