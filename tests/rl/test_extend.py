"""The pages of docs/extend: their code is what runs here, in every kind of process that a run has."""

import inspect
import json
import os
import re
import subprocess
import sys
from contextlib import closing
from dataclasses import replace

import pytest
from extensions import OWN, PAGES, SMALL, extensions

from scalerl.cli.main import main
from scalerl.errors import InputError
from scalerl.own_code import load
from scalerl.record.reader import RunRecord
from scalerl.rl import Function, Limits, Prompt, evaluate, load_recipe, train
from scalerl.rl.model.causal_lm import load_tokenizer
from scalerl.rl.tasks.dataset import Dataset
from scalerl.rl.types import Reward
from scalerl.rl.verify.verifier import DirectVerifier, PoolVerifier, load_verifier
from scalerl.study.entry import run, verdict
from scalerl.study.spec import load_study


@pytest.fixture
def own(here, small_base):
    """What is set in the demonstration's recipe."""
    return [f"model={small_base}", *SMALL, *OWN]


def check_run(folder, here, steps=3):
    """The run came to its end by the kinds of the pages."""
    recipe = json.loads((folder / "config.json").read_text())["recipe"]
    assert recipe["loss"] == {"kind": f"{here}/losses.py:Topr", "max_ratio": 0.9}
    assert recipe["advantage"]["kind"] == f"{here}/advantages.py:SoftStd"
    assert recipe["task"]["kind"] == f"{here}/tasks.py:Sums"
    record = RunRecord.read(folder)
    assert record.evals[-1].step == steps
    assert record.evals[0].n_prompts == 5


def test_pages_are_short_and_of_one_file():
    pages = extensions()
    assert set(pages) == {"loss", "advantage", "task", "verifier", "importer", "family", "tracker"}
    for name, code in pages.values():
        assert len(code.splitlines()) <= 60, name


def test_topr_is_reinforce_on_what_is_right_and_tapered_on_what_is_wrong(here):
    import torch

    from scalerl.rl.algo.loss import Reinforce

    generator = torch.Generator().manual_seed(0)
    logp_NT = torch.rand(4, 3, generator=generator).log().requires_grad_()
    behaviour_NT = torch.rand(4, 3, generator=generator).log()
    sampled_NT = torch.ones(4, 3, dtype=torch.bool)
    advantage_N = torch.tensor([1.0, -1.0, 2.0, -0.5])
    found = load("losses.py:Topr")()(logp_NT, behaviour_NT, advantage_N, sampled_NT)
    truncated = Reinforce(max_ratio=1.0)(logp_NT, behaviour_NT, advantage_N, sampled_NT)
    wrong_N = advantage_N < 0
    torch.testing.assert_close(found.value_NT[wrong_N], truncated.value_NT[wrong_N])
    expected_NT = -advantage_N[:, None] * logp_NT
    torch.testing.assert_close(found.value_NT[~wrong_N], expected_NT[~wrong_N])
    assert not found.clipped_NT[~wrong_N].any()
    # On-policy, ratios differ from 1 by rounding alone: nothing is clipped.
    rounded_NT = logp_NT.detach() * (1 + 2e-6)
    assert not load("losses.py:Topr")()(logp_NT, rounded_NT, advantage_N, sampled_NT).clipped_NT.any()


def test_a_run_with_a_tracker_and_its_resume(here, own, caplog):
    """The evaluations have a process of their own, and the verifier's others. Changed code is a warning."""
    recipe = load_recipe("demo", own)
    tracker = load("my_tracker.py:LinesTracker")()
    train(recipe, here / "run", until=1, trackers=[tracker])
    (here / "losses.py").write_text((here / "losses.py").read_text().replace("-(weight_N", "(weight_N"))
    assert main(["train", str(here / "run"), "--resume"]) == 0
    (said,) = [one.getMessage() for one in caplog.records if "code" in one.getMessage()]
    assert f"{here}/losses.py:Topr has changed since the run began" in said
    check_run(here / "run", here)
    code = json.loads((here / "run" / "config.json").read_text())["code"]
    assert {name.rpartition("/")[2]: len(set(codes)) for name, codes in code.items()} == {
        **{"losses.py:Topr": 2, "advantages.py:SoftStd": 1, "tasks.py:Sums": 1}
    }
    lines = [json.loads(line) for line in (here / "run" / "lines.jsonl").read_text().splitlines()]
    assert {"step", "time"} < set(lines[0])
    changed = load_recipe(here / "run", ["loss.max_ratio=0.5"])
    with pytest.raises(InputError, match="loss"):
        train(changed, here / "run", resume=True)


def test_generators_in_processes_of_their_own(here, own):
    train(load_recipe("demo", [*own, "placement.kind=local"]), here / "run", evaluate_aside=False)
    check_run(here / "run", here)


@pytest.mark.slow
def test_ranks_of_torchrun(here, own):
    overrides = [word for one in own for word in ("--set", one)]
    start = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d"]
    start += ["--rdzv-endpoint", "127.0.0.1:0", "--nnodes", "1", "--nproc-per-node", "2", "-m", "scalerl"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run([*start, "train", "demo", *overrides, "-o", "run"], env=env, check=True, timeout=500)
    check_run(here / "run", here)


@pytest.mark.slow
def test_actors_of_ray(here, own):
    cluster = ["cluster.address=local", "cluster.verifiers=1", "cluster.timeouts.start=480"]
    overrides = [word for one in [*own, *cluster] for word in ("--set", one)]
    start = [sys.executable, "-m", "scalerl", "train", "demo", *overrides, "-o", "run"]
    subprocess.run(start, check=True, timeout=900)
    check_run(here / "run", here)


STUDY = """
base = "demo"
seeds = 1
budgets = [{budgets}]

[set]
model = "{model}"
{changes}

[arm.topr]
loss.kind = "losses.py:Topr"
loss.max_ratio = 0.9
"""


def check_changed_code(here):
    """A study that goes on by another loss says so, and its verdict where a run was trained by both."""
    (here / "losses.py").write_text((here / "losses.py").read_text() + "# changed")
    said = []
    run(load_study("study.toml"), "study", progress=lambda progress: said.append(progress.notice))
    topr = f"{here}/losses.py:Topr"
    assert [text for text in said if "changed" in text] == [
        f"{topr} has changed since runs of this study were made, which are kept as they are; "
        "-o FOLDER runs all by the new code"
    ]
    path = here / "study" / "runs" / "topr" / "seed0" / "config.json"
    config = json.loads(path.read_text())
    config["code"][topr].append("0123")
    path.write_text(json.dumps(config))
    assert f"between them {topr} was changed." in " ".join(verdict("study").cautions)


def test_a_study_of_the_loss_and_the_task_beside_a_log_by_the_importer(here, own, small_base):
    changes = "\n".join(
        f'{key} = "{value}"' if not value.replace(".", "").isdigit() else f"{key} = {value}"
        for key, _, value in (one.partition("=") for one in [*SMALL, *OWN[2:]])
    )
    text = STUDY.format(budgets="8", model=small_base, changes=changes)
    (here / "study.toml").write_text(text.replace("evaluation.count = 1", "evaluation.count = 8"))
    run(load_study("study.toml"), "study", cores=2)
    plan = json.loads((here / "study" / "study.json").read_text())
    assert plan["arms"][1]["recipe"]["loss"] == {"kind": f"{here}/losses.py:Topr", "max_ratio": 0.9}
    check_run(here / "study" / "runs" / "topr" / "seed0", here, steps=8)
    assert not any("code" in caution for caution in verdict("study").cautions)
    check_changed_code(here)
    log = "started\n" + "".join(
        f"[2026-01-05T10:{step:02}:00Z] iter {step} | eval/accuracy {0.2 + 0.4 * step / (step + 9):.3f}\n"
        for step in range(0, 40, 2)
    )
    (here / "theirs.barlog").write_text(log)
    asked = ["--format", "importers.py:BarLog", "--y", "eval/accuracy"]
    assert main(["ingest", "theirs.barlog", "-o", "theirs", *asked]) == 0
    assert main(["fit", "theirs.barlog", *asked]) == 0
    theirs = RunRecord.read(here / "theirs")
    assert [point.step for point in theirs.evals] == list(range(0, 40, 2))
    assert theirs.evals[-1].pass_rate == pytest.approx(0.2 + 0.4 * 38 / 47, abs=1e-3)
    assert main(["report", "study/runs/topr/seed0", "theirs", "-o", "both.html", "--x", "steps"]) == 0
    assert {arm.name for arm in verdict("study").arms} == {"base", "topr"}


def test_the_verifier_judges_in_its_workers(here, llama_folder):
    close = load("verifiers.py:Close")(tolerance=0.1)
    assert close.verify(Prompt("p", "", "7"), "x </think> 7.5") == Reward(1.0, True)
    assert close.verify(Prompt("p", "", "7"), "x </think> 8.5") == Reward(-1.0, False)
    task = Dataset("unread", verifier=close)
    with closing(PoolVerifier(task, load_tokenizer(llama_folder), Limits(workers=1))) as verifier:
        assert not verifier.verify([])
    assert not isinstance(task.verifier, Function)


def blocks(page, language):
    """The code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (PAGES / f"{page}.md").read_text(), re.M | re.S)


@pytest.mark.parametrize("page", ["index", "loss", "advantage", "verifier"])
def test_the_tables_of_the_pages_are_those_of_a_recipe(here, page):
    """That of the index is below a loss that has its field; the other one there is of a package."""
    block, *of_package = blocks(page, "toml")
    assert len(of_package) == (page == "index")
    (here / "mine.toml").write_text(f'base = "demo"\n{block}')
    key = {"index": "loss", "verifier": "task"}.get(page) or page
    made = getattr(load_recipe("mine.toml"), key)
    assert "own_code" in type(made.verifier if page == "verifier" else made).__module__


def test_the_script_with_the_tracker_by_the_verifier_of_its_page(here, small_base, monkeypatch):
    """Completions reach the verifier in its workers: some are right, and no verification fails."""
    monkeypatch.syspath_prepend(here)
    rows = [{"prompt": f"{a} + {b} =", "answer": str((a + b) % 10)} for a in range(10) for b in range(3)]
    (here / "problems.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (table,) = blocks("verifier", "toml")
    (here / "mine.toml").write_text(
        f'base = "demo"\n{table}prompt = "prompt"\nchat_template = false\nheldout = 5\n'
    )
    _, code = blocks("tracker", "python")
    assert 'rl.load_recipe("demo")' in code
    overrides = [f"model={small_base}", *SMALL]
    code = code.replace('rl.load_recipe("demo")', f'rl.load_recipe("mine.toml", {overrides!r})')
    exec(compile(code, "tracker.md", "exec"), {"__name__": "__main__"})
    run = here / "runs" / "mine"
    recipe = json.loads((run / "config.json").read_text())["recipe"]
    assert recipe["task"]["verifier"]["kind"] == f"{here}/verifiers.py:Close"
    steps = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert any(step["correct"] for step in steps)
    assert not any(step["failed"] for step in steps)
    lines = [json.loads(line) for line in (run / "lines.jsonl").read_text().splitlines()]
    assert lines


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("importers.py:Nope", "importers.py has no Nope; it has BarLog$"),
        ("losses.py:Topr", "has no recognises"),
        ("nope", "no format 'nope'; there are wandb, .*, or your own as module:Class or file.py:Class"),
    ],
)
def test_what_is_no_importer_is_a_line(here, capsys, kind, message):
    (here / "x.barlog").write_text("")
    assert main(["ingest", "x.barlog", "-o", "run", "--format", kind]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert re.search(message, line)


def run_example(function, **small):
    """Run the example of a docstring, small: what stands there takes minutes."""
    found = re.search(r"^        from scalerl .*?(?=\n\n    \S)", function.__doc__, re.S | re.M)
    assert found
    code = inspect.cleandoc(found[0])
    for shown, instead in small.values():
        assert shown in code
        code = code.replace(shown, instead)
    exec(compile(code, "example", "exec"), {"__name__": "__main__"})


def test_the_example_of_train_and_the_evaluation_of_its_run(here, own, capsys):
    run_example(train, recipe=('["loss.max_ratio=4"]', repr(own)))
    record = RunRecord.read(here / "runs" / "mine")
    assert capsys.readouterr().out.strip() == str(record.evals[-1].pass_rate)
    for model, point in ((None, record.evals[0]), (here / "runs" / "mine", record.evals[-1])):
        result = evaluate(load_recipe("demo", own), model)
        assert (result.correct_P.mean(), result.version) == (point.pass_rate, point.step)


def test_the_example_of_a_study(here, own, capsys):
    """Its base is a recipe with a loss of a file; its arms are objects, of the package and of that file."""
    base = (
        'rl.load_recipe("demo")',
        f"rl.load_recipe('demo', {[*own, 'budget.amount=8', 'evaluation.count=8']!r})",
    )
    study = ("arm=arms", "arm=arms | {'topr': {'loss': Topr(0.5)}}")
    imports = (
        "from scalerl import rl, study",
        "from scalerl import rl, study; from scalerl.own_code import load",
    )
    run_example(
        run,
        imports=(imports[0], f"{imports[1]}; Topr = load('losses.py:Topr')"),
        base=base,
        seeds=("seeds=3", "seeds=1"),
        study=study,
    )
    assert '"' not in capsys.readouterr().out[:1]
    assert [arm.name for arm in verdict("studies/losses").arms] == ["base", "dapo", "gspo", "topr"]
    arms = json.loads((here / "studies" / "losses" / "study.json").read_text())["arms"]
    assert arms[3]["changes"] == {"loss": {"kind": f"{here}/losses.py:Topr", "max_ratio": 0.5}}
    assert arms[1]["changes"]["loss"]["kind"] == "dapo"


LOUD = """
from dataclasses import dataclass
from typing import ClassVar
from scalerl.rl import Chain


@dataclass(frozen=True)
class Loud(Chain):
    trusted: ClassVar[bool] = True
"""


def test_only_the_task_of_the_demonstration_is_judged_in_this_process(here, own, llama_folder):
    """A task cannot ask for it, nor inherit it: a verifier of the user's own may block."""
    (here / "loud.py").write_text(LOUD)
    tokenizer = load_tokenizer(llama_folder)
    assert isinstance(load_verifier(load_recipe("demo"), tokenizer), DirectVerifier)
    for task in ([], ["task.kind=loud.py:Loud", "task.heldout_per_length=1"]):
        overrides = [one for one in own if not (task and one.startswith("task."))]
        with closing(load_verifier(load_recipe("demo", [*overrides, *task]), tokenizer)) as verifier:
            assert isinstance(verifier, PoolVerifier)


SLEEPY = """
import time
from dataclasses import dataclass
from tasks import Sums


@dataclass(frozen=True)
class Sleepy(Sums):
    def verify(self, prompt, text):
        time.sleep(3600 if prompt.id.endswith("7") else 0)
        return super().verify(prompt, text)
"""


def test_a_task_whose_verifier_sleeps_costs_its_completions(here, own, monkeypatch):
    (here / "sleepy.py").write_text(SLEEPY)
    monkeypatch.syspath_prepend(here)
    recipe = load_recipe("demo", [*own, "task.kind=sleepy:Sleepy", "task.limits.seconds=0.2"])
    recipe = replace(recipe, evaluation=replace(recipe.evaluation, samples=1))
    record = train(recipe, here / "run", evaluate_aside=False)
    assert record.evals[-1].step == 3
    groups = [json.loads(line) for line in (here / "run" / "groups.jsonl").read_text().splitlines()]
    assert groups
