"""A pretrained language model takes a step on every kind of task that a line names."""

import json
from importlib.util import find_spec

import pytest
from sandboxes import backend_or_skip

from scalerl.rl.config.recipe import load_recipe
from scalerl.rl.train import train

FUNCTIONS = """
def digits(prompts, completions, **kwargs):
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in completions]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.strip().startswith(ground_truth))
"""
TASKSET = """
import verifiers.v1 as vf

__all__ = ["Sums"]

class Data(vf.TaskData):
    answer: str

class Sum(vf.Task[Data]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply.strip().startswith(self.data.answer))

class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        for n in range(20):
            shown = f"2 + 3 = 5\\n4 + 1 = 5\\n{n} + 1 ="
            yield Sum(Data(prompt=shown, answer=str(n + 1)), self.config.task)
"""
SHOTS = "2 + 3 = 5\n4 + 1 = 5\n"


@pytest.fixture
def lines(tmp_path, monkeypatch):
    """Task lines by kind, with the keys that each needs."""
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    (tmp_path / "my_sums.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(str(tmp_path))
    sums = [{"prompt": f"{SHOTS}{n} + 1 =", "answer": str(n + 1)} for n in range(12)]
    verl = [
        {"data_source": "sums", "prompt": row["prompt"], "reward_model": {"ground_truth": row["answer"]}}
        for row in sums
    ]
    code = [
        {
            "prompt": f'def add{n}(x):\n    """Return x + {n}."""\n',
            "entry_point": f"add{n}",
            "test": _check(n),
            "task_id": str(n),
        }
        for n in range(8)
    ]
    for name, rows in (("sums", sums), ("verl", verl), ("code", code)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain, held = "task.chat_template=false", "task.heldout=4"
    return {
        "reasoning-gym": ["task=reasoning-gym:chain_sum", "task.size=20", held, plain],
        "data set": [f"task={tmp_path}/sums.jsonl", held, plain],
        "trl": [f"task=trl:{tmp_path}/rewards.py:digits", f"task.path={tmp_path}/sums.jsonl", held, plain],
        "verl": [
            *(f"task=verl:{tmp_path}/rewards.py:compute_score", f"task.path={tmp_path}/verl.jsonl"),
            *(held, plain),
        ],
        "verifiers": ["task=verifiers:my_sums", held],
        "code": [f"task=code:{tmp_path}/code.jsonl", held, plain],
    }


def _check(n):
    return f"def check(candidate):\n    assert candidate(1) == {n + 1}\n"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["reasoning-gym", "data set", "trl", "verl", "verifiers", "code"])
def test_smollm2_takes_a_step_on_a_task_of_this_kind(kind, lines, tmp_path):
    if kind == "code":
        backend_or_skip("auto")
    if kind == "verifiers" and find_spec("verifiers") is None:
        pytest.skip("pip install 'scalerl[verifiers]'")
    small = ["budget.amount=1", "batch.prompts=2", "batch.samples=4", "decode_slots=8", "zero_variance=keep"]
    evaluation = ["evaluation.count=1", "evaluation.samples=1", "evaluation.decode_slots=8"]
    recipe = load_recipe("smollm2", [*small, *evaluation, *lines[kind]])
    record = train(recipe, tmp_path / "run", evaluate_aside=False)
    (step,) = record.steps()
    assert step["failed"] == {}  # every completion has a verdict
    assert [(point.step, point.n_prompts) for point in record.evals] == [(0, 4), (1, 4)]
    samples = [json.loads(line) for line in (record.path / "samples.jsonl").read_text().splitlines()]
    assert any(sample["completion"].strip() for sample in samples)
