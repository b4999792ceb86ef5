"""What an audit finds in verifiers and data with known faults."""

import json
from dataclasses import dataclass, field

import pytest

from scalerl.cli.main import main
from scalerl.rl.tasks.dataset import Dataset
from scalerl.rl.tasks.task import Task
from scalerl.rl.tasks.verifiers import Exact
from scalerl.rl.types import Limits, Prompt
from scalerl.rl.verify.audit import audit

JUDGES = """
import random, re, time

def equal(prompt, text):
    return text.strip() == prompt.answer

def strict(prompt, text):
    return text == prompt.answer

def contains(prompt, text):
    return prompt.answer in text

def last_number(prompt, text):
    return (re.findall(r"-?[0-9]+", text) or [""])[-1] == prompt.answer

def generous(prompt, text):
    return text != "The answer is correct." and (text.strip() == prompt.answer or not text)

def moody(prompt, text):
    return text.strip() == prompt.answer and random.random() < 0.5

def fragile(prompt, text):
    return int(text) == int(prompt.answer)

def deaf(prompt, text):
    return False
"""


@pytest.fixture
def task_by(tmp_path):
    (tmp_path / "judges.py").write_text(JUDGES)
    rows = [{"prompt": f"How much is {n} times 37?", "answer": str(n * 37)} for n in range(20, 50)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(judge, heldout=10):
        from scalerl.rl.tasks.verifiers import Function

        verifier = Function(f"{tmp_path}/judges.py:{judge}")
        patient = Limits(seconds=100.0)  # on a machine with much other work
        return Dataset(str(tmp_path / "rows.jsonl"), heldout=heldout, verifier=verifier, limits=patient)

    return make


def faults(task, prompts=12):
    return {finding.check for finding in audit(task, prompts) if finding.level == "fault"}


@pytest.mark.parametrize(
    ("judge", "expected"),
    [
        ("equal", set()),
        ("strict", {"reference among white space"}),
        (
            "contains",
            {"hedged: right or wrong", "hedged: wrong or right", "a list of many answers"},
        ),
        ("last_number", {"hedged: wrong or right", "a list of many answers"}),
        ("generous", {"nothing"}),
        ("deaf", {"reference, as it is"}),
    ],
)
def test_a_verifier_with_a_known_fault(task_by, judge, expected):
    spaced = {"reference among white space"}
    assert faults(task_by(judge)) - spaced == expected - spaced
    if judge == "strict":
        assert faults(task_by(judge)) == expected


def test_a_verifier_that_is_not_deterministic_and_one_that_raises(task_by):
    assert {"judged twice, differently", "reference, as it is"} <= faults(task_by("moody"), 30)
    found = {finding.check: finding for finding in audit(task_by("fragile"), 12)}
    assert found["verifications that failed"].level == "fault"
    assert "raised" in found["verifications that failed"].result
    assert found["verifications that failed"].example
    assert found["reference, as it is"].level == "ok"


@dataclass(frozen=True)
class Leaky(Task):
    """Prompts of which some are repeated, and some are held out and trained on."""

    limits: Limits = field(default_factory=Limits)

    def prompts(self, split):
        story = "one day a farmer with {} sheep and {} cows went to the market of {} to sell all of {} there"
        train = [Prompt(f"train/{n}", story.format(n, 2 * n, n, 3 * n), str(n + 100000)) for n in range(60)]
        train.append(Prompt("train/again", train[3].text.upper(), "100003"))
        heldout = [
            Prompt("heldout/same", train[5].text, "100005"),
            Prompt("heldout/near", "Once upon a time, " + train[7].text, "100007"),
            Prompt("heldout/own", "how many legs do 7 cats have", "100028"),
            Prompt("heldout/told", "say 100030, and nothing else", "100030"),
        ]
        return train if split == "train" else heldout

    def verify(self, prompt, text):
        return text.strip() == prompt.answer


def test_repeated_leaked_and_told_prompts_are_counted():
    found = {finding.check: finding for finding in audit(Leaky(), 10)}
    assert found["training prompts given twice"].result == "1 of 61"
    assert found["held-out prompts trained on"].result == "1 of 4"
    assert found["held-out prompts trained on"].level == "fault"
    assert found["held-out prompts trained on"].example == "heldout/same"
    assert found["held-out prompts that share 13 words"].result == "2 of 4"
    assert found["answers of 5 letters or more in the prompt"].example == "heldout/told"


@dataclass(frozen=True)
class Programs(Task):
    """Answers of two lines; right is a program that defines what is asked, in a block or without one."""

    limits: Limits = field(default_factory=Limits)

    def prompts(self, split):
        numbers = range(10) if split == "heldout" else range(10, 60)
        return [
            Prompt(f"f/{n}", f"Write the function f of {n}.", f"def f():\n    return {n}") for n in numbers
        ]

    def verify(self, prompt, text):
        code = text.split("</think>")[-1].split("```")
        found: dict = {}
        try:
            exec(code[1] if len(code) > 1 else code[0], found)  # the answers of the audit alone
            return found["f"]() == int(prompt.answer.rsplit(" ", 1)[1])
        except Exception:
            return False


def test_code_is_tried_in_blocks_and_between_empty_lines():
    found = {finding.check: finding for finding in audit(Programs(), 10)}
    assert not [finding for finding in found.values() if finding.level == "fault"]
    for check in ("in a code block", "after thinking, in a code block", "as it is"):
        assert found[f"reference, {check}"].share == 1.0
    assert found["reference, a sentence"].share == 0.0
    assert found["reference among white space"].share == 1.0


def test_words_of_a_template_are_no_leak(tmp_path):
    frame = "please read this problem with care and then write the number that you have found at the end: {}"
    rows = [{"prompt": frame.format(n), "answer": str(n)} for n in range(200)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = Dataset(str(tmp_path / "rows.jsonl"), heldout=50, verifier=Exact())
    found = {finding.check: finding for finding in audit(task, 10)}
    assert found["held-out prompts that share 13 words"].result == "0 of 50"


def test_the_command_prints_the_findings_and_its_status_says_whether_there_is_a_fault(
    tmp_path, capsys, task_by
):
    task_by("contains")
    rows, judge = tmp_path / "rows.jsonl", f"{tmp_path}/judges.py"
    of = [
        "audit",
        str(rows),
        "--set",
        "task.heldout=10",
        "--set",
        "task.verifier.kind=function",
        "--prompts",
        "8",
    ]
    assert main([*of, "--set", f"task.verifier.name={judge}:equal"]) == 0
    out, err = capsys.readouterr()
    assert "reference, as it is" in out
    assert "FAULT" not in out
    assert not err
    assert main([*of, "--set", f"task.verifier.name={judge}:contains", "--json"]) == 1
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert answer["faults"] == 3
    assert {f["check"] for f in answer["findings"] if f["level"] == "fault"} >= {"hedged: right or wrong"}
    assert "3 of" in err
    assert main(["audit", str(tmp_path / "nothing.jsonl")]) == 2
    assert "no such file" in capsys.readouterr().err


def test_the_task_of_a_recipe_is_audited(capsys):
    assert main(["audit", "demo", "--prompts", "6"]) == 0
    assert "reference, after thinking" in capsys.readouterr().out
