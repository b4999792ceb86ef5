"""Whole training runs, small: what a run folder holds, and that one seed gives one result."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from record_checker import check
from small_demo import small_demo

from scalerl.curve import fit
from scalerl.errors import InputError, WorkerError, WriteError
from scalerl.forecast.freeze import freeze
from scalerl.record.reader import RunRecord
from scalerl.record.writer import RunWriter
from scalerl.rl.config.recipe import from_dict, load_recipe
from scalerl.rl.config.settings import Inline, Local, Steps
from scalerl.rl.evaluate import evaluate
from scalerl.rl.tasks.chain import Chain
from scalerl.rl.train import train

TASK = Chain(k_max=2, heldout_per_length=40)


@pytest.fixture(scope="module")
def model(small_base):
    return small_base


@pytest.fixture(scope="module")
def recipe():
    return load_recipe("demo", small_demo(36, 12))


@pytest.fixture(scope="module")
def run(recipe, model, tmp_path_factory):
    return train(recipe, tmp_path_factory.mktemp("runs") / "a", model, forecaster=freeze)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_times(path):
    """The bytes of evals.jsonl, times apart."""
    rows = lines(path)
    for row in rows:
        del row["time"], row["device_seconds"]
    return json.dumps(rows)


def test_its_record_is_what_the_page_of_the_run_folder_says(run):
    assert check(run.path) == []
    assert (run.path / "forecasts.jsonl").exists()


def test_one_seed_gives_one_result_wherever_evaluations_run(recipe, model, run, tmp_path):
    again = train(recipe, tmp_path / "b", model, forecaster=freeze, evaluate_aside=False)
    assert without_times(again.path / "evals.jsonl") == without_times(run.path / "evals.jsonl")
    assert (again.path / "eval_prompts.jsonl").read_bytes() == (run.path / "eval_prompts.jsonl").read_bytes()
    weights = "checkpoints/final/model.safetensors"
    assert (again.path / weights).read_bytes() == (run.path / weights).read_bytes()


def test_a_run_without_prompts_left_says_why_it_ends(model, tmp_path, caplog):
    """Prompts are retired at their first right answer, long before the budget of 500 steps is spent."""
    few = ("task.train_per_length=3", "curriculum.threshold=0.001", "batch.prompts=2")
    found = train(load_recipe("demo", small_demo(500, 1, *few)), tmp_path / "few", model)
    last = found.evals[-1].step
    assert last < 500
    assert f"retired all 6 training prompts: the run ends after step {last}, with " in caplog.text


def test_seconds_are_those_of_all_devices(recipe, model, run, tmp_path):
    """In this process every second of training is one of its device. Generators apart go on while the trainer
    evaluates, which is no training: all of that is theirs."""
    for row in lines(run.path / "steps.jsonl"):
        spent = row["device_seconds"]
        assert spent["generate"] + spent["train"] + spent["idle"] == pytest.approx(row["wall_seconds"])
    apart = from_dict(
        recipe.to_dict()
        | {"placement": {"kind": "local", "generators": 2}}
        | {"budget": {"kind": "steps", "amount": 12}, "evaluation": {"count": 12, "samples": 40}}
    )
    rows = lines(train(apart, tmp_path / "apart", model, evaluate_aside=False).path / "steps.jsonl")
    first, last = rows[0], rows[-1]
    passed = last["time"] - first["time"]
    trained = last["wall_seconds"] - first["wall_seconds"]
    assert trained < 0.7 * passed  # it has evaluated for the rest
    held = [row["device_seconds"]["generate"] + row["idle_seconds"]["generate"] for row in (first, last)]
    # A generator's seconds are those of its last report, a part of a second ago; without evaluations they
    # would be below 1.4 times what has passed.
    assert 1.6 * passed < held[1] - held[0] < 2.1 * passed
    spent = last["device_seconds"]
    assert spent["generate"] + spent["train"] + spent["idle"] == pytest.approx(held[1] + last["wall_seconds"])


def test_another_seed_gives_another_result(recipe, model, run, tmp_path):
    short = replace(recipe, seed=1, budget=replace(recipe.budget, amount=4))
    other = train(short, tmp_path / "c", model, evaluate_aside=False)
    assert other.evals[-1].entropy != run.evals[len(other.evals) - 1].entropy


def test_step_0_is_evaluated_before_any_training(run):
    first = run.evals[0]
    assert first.step == first.version == 0
    assert first.samples == first.tokens.generated == first.flops.generate == first.flops.train == 0
    assert run.compute("gpu_hours")[0] == 0


def test_evaluations_are_of_one_version_and_their_counters_never_fall(run):
    for point in run.evals:
        assert point.version == point.step
        assert (point.n_prompts, point.n_samples) == (80, 2)
    for axis in ("gpu_hours", "flops", "tokens", "tokens_processed", "samples", "steps"):
        assert (np.diff(run.compute(axis)) > 0).all()
    assert [point.step for point in run.evals] == list(range(0, 37, 3))


def test_pass_rates_are_those_of_the_prompts(run):
    for point, row in zip(run.evals, lines(run.path / "eval_prompts.jsonl"), strict=True):
        assert row["step"] == point.step
        assert point.pass_rate == pytest.approx(sum(row["correct"]) / (row["n"] * len(row["id"])))
        p = np.array(row["correct"]) / 2
        assert point.mean_p_1mp == pytest.approx(np.mean(2 * p * (1 - p)))  # k / (k - 1) = 2 at k = 2


def test_held_out_prompts_are_never_trained_on(recipe, run):
    texts = {prompt.id: prompt.text for prompt in recipe.task.prompts("train")}
    trained = {texts[name] for row in lines(run.path / "groups.jsonl") for name in row["prompt"]}
    assert len(trained) > 10
    assert not trained & TASK.heldout_texts


def test_the_pipeline_is_in_flight_for_real_and_within_its_bound(recipe, run):
    steps = run.steps()
    late = steps[len(steps) // 3 :]
    assert np.mean([row["multi_version"] for row in late]) > 0.2
    assert max(row["staleness_max"] for row in steps if "staleness_max" in row) <= recipe.schedule.k
    for row in steps:
        if "staleness_histogram" in row:
            assert sum(row["staleness_histogram"]) == pytest.approx(1)


def test_a_forecast_is_frozen_before_what_it_speaks_of_is_run(run):
    assert run.forecasts
    steps = run.steps()
    for row in run.forecasts:
        later = [step["time"] for step in steps if step["step"] > row["made_at_step"]]
        assert row["time"] < min(later)
        assert row["compute"] == row["made_at_step"]  # the axis is that of the budget: steps here
        assert row["target_compute"] == 36
        low, high = row["prediction"]
        assert 0 <= low < row["median"] < high <= 1
    assert 18 in [row["made_at_step"] for row in run.forecasts]


def test_a_frozen_forecast_knows_only_what_was_run_before_it(run):
    row = next(row for row in run.forecasts if row["made_at_step"] == 18)
    known = replace(run, evals=tuple(point for point in run.evals if point.step <= 18))
    assert freeze(known, "steps", 36)["median"] == row["median"]


def test_the_resolved_recipe_can_be_run_again(recipe, run):
    assert from_dict(run.config["recipe"]) == recipe


def test_a_recipe_is_taken_by_its_path(run, model, recipe, tmp_path):
    again = train(run.path, tmp_path / "again", model, until=1, evaluate_aside=False)
    assert from_dict(again.config["recipe"]) == recipe
    with pytest.raises(InputError, match=r"evaluate takes a recipe .*, found '.*; model="):
        # The weights of the run, or those of its recipe: only `model` says which.
        evaluate(str(run.path))  # type: ignore[arg-type]


def test_a_run_has_as_many_threads_as_its_recipe_says(recipe, model, tmp_path):
    seen, before = [], torch.get_num_threads()
    try:
        made = train(
            replace(recipe, threads=2, budget=Steps(1)),
            tmp_path / "run",
            model,
            progress=lambda progress: seen.append(torch.get_num_threads()),
            evaluate_aside=False,
        )
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {2}
    assert made.config["recipe"]["threads"] == 2
    assert recipe.cpu_threads == 1
    assert 1 <= replace(recipe, threads=0).cpu_threads <= (os.cpu_count() or 1)


def test_the_final_weights_can_be_served(run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = run.path / "checkpoints" / "final"
    tokens = AutoTokenizer.from_pretrained(folder)("3 + 4 = . .", return_tensors="pt")
    out = AutoModelForCausalLM.from_pretrained(folder)(**tokens)
    assert out.logits.shape[-1] == 19


def test_a_folder_that_holds_something_is_not_written_to(recipe, model, run):
    before = (run.path / "evals.jsonl").read_bytes()
    with pytest.raises(InputError, match=r"exists already: choose another folder with -o"):
        train(recipe, run.path, model)
    assert (run.path / "evals.jsonl").read_bytes() == before


def test_a_folder_with_logs_of_servers_alone_is_still_free(tmp_path):
    """They start before anything is written; where one does not, its log is what is left."""
    for log, free in (("vllm-0.log", True), ("vllm.log", False)):
        folder = tmp_path / log
        folder.mkdir()
        (folder / log).write_text("out of memory")
        with nullcontext() if free else pytest.raises(InputError, match="exists already"):
            RunWriter(folder, {}).close()
        assert (folder / "config.json").exists() == free


def test_a_script_that_its_processes_would_run_again_is_named(tmp_path):
    """What each of them imports is the script: without the line it names they would train, too."""
    (tmp_path / "script.py").write_text(
        "from multiprocessing import get_context\n"
        "from scalerl.rl import load_recipe, train\n"
        "if __name__ == '__main__':\n"
        "    get_context('spawn').Process(target=print).start()\n"
        "else:\n"
        "    train(load_recipe('demo'), 'run')\n"
    )
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr.endswith('imports this script: call what trains below `if __name__ == "__main__":`\n')
    assert not (tmp_path / "run").exists()


def test_a_context_that_the_model_cannot_hold_is_refused(recipe, model, tmp_path):
    long = replace(recipe, context=replace(recipe.context, answer=400))
    with pytest.raises(InputError, match="need 412 positions, and the model has 64"):
        train(long, tmp_path / "e", model)
    assert not (tmp_path / "e").exists()


def test_a_model_that_is_not_there_is_one_line(recipe, tmp_path):
    with pytest.raises(InputError) as caught:
        train(recipe, tmp_path / "f", tmp_path / "nothing")
    assert "nothing" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_prompt_that_does_not_fit_is_refused_before_anything_is_written(recipe, model, tmp_path):
    narrow = replace(recipe, context=replace(recipe.context, prompt=5))
    with pytest.raises(InputError, match=r"5 tokens are allowed, and prompt chain/1/\d+ has 6"):
        train(narrow, tmp_path / "g", model)
    assert not (tmp_path / "g").exists()


def test_a_model_with_sliding_windows_is_refused(recipe, tmp_path):
    from transformers import MistralConfig, MistralForCausalLM

    from scalerl.rl.tasks.chain import write_tokenizer

    config = MistralConfig(
        vocab_size=19, sliding_window=4, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(tmp_path / "m")
    write_tokenizer(str(tmp_path / "m"))
    with pytest.raises(InputError, match="sliding-window"):
        train(recipe, tmp_path / "h", tmp_path / "m")


class KillsEvaluators(threading.Thread):
    """Kills the processes that evaluate, as soon as each is there, from `begin` on until `end`."""

    def __init__(self):
        super().__init__(daemon=True)
        self.begin, self.end, self.killed = threading.Event(), threading.Event(), set[int]()

    def run(self):
        self.begin.wait()
        while not self.end.wait(0.05):
            for child in multiprocessing.active_children():
                if child.name == "evaluation" and child.pid and child.pid not in self.killed:
                    self.killed.add(child.pid)
                    os.kill(child.pid, signal.SIGKILL)


@pytest.mark.parametrize("placement", ["inline", pytest.param("local", marks=pytest.mark.slow)])
def test_an_evaluation_that_cannot_be_made_ends_the_run_after_a_checkpoint_that_has_it(
    recipe, model, run, tmp_path, placement
):
    """A dead process costs no evaluation: where it dies again and again the resume makes them."""
    recipe, killer = replace(recipe, placement=recipe_of(placement)), KillsEvaluators()

    def watch(progress):
        if progress.evaluated and progress.step >= 6:
            killer.begin.set()

    killer.start()
    with pytest.raises(
        WorkerError, match=r"evaluation at step (\d+): .*, 3 times in a row; .*--resume goes on"
    ):
        train(recipe, tmp_path / "i", model, progress=watch)
    killer.end.set()
    killer.join()
    assert len(killer.killed) >= 3  # and perhaps that of the evaluation after it
    begun = RunRecord.read(tmp_path / "i")
    last = begun.steps()[-1]["step"]
    assert (tmp_path / "i" / "checkpoints" / f"step-{last:05d}").is_dir()
    assert begun.evals[-1].step < last
    whole = train(recipe, tmp_path / "i", model, resume=True)
    assert [point.step for point in whole.evals] == list(range(0, 37, 3))
    assert not (tmp_path / "i" / "lost.jsonl").exists()
    if placement == "inline":
        assert without_times(whole.path / "evals.jsonl") == without_times(run.path / "evals.jsonl")


def recipe_of(placement):
    return Local() if placement == "local" else Inline()


@pytest.mark.slow
def test_an_evaluation_process_that_is_killed_at_eight_moments_costs_nothing(recipe, model, run, tmp_path):
    """Each at another time after an evaluation was asked for: as it starts, evaluates, and waits."""
    delays, threads, killed = iter(np.linspace(0, 2, 8)), [], set()

    def kill():
        for child in multiprocessing.active_children():
            if child.name == "evaluation" and child.pid and child.pid not in killed:
                killed.add(child.pid)
                os.kill(child.pid, signal.SIGKILL)

    def watch(progress):
        if progress.step % 3 == 2 and not progress.evaluated and (delay := next(delays, None)) is not None:
            threads.append(threading.Timer(delay, kill))
            threads[-1].start()
            time.sleep(7)  # a process takes longer to start than this run to train

    record = train(recipe, tmp_path / "run", model, progress=watch, forecaster=freeze)
    for thread in threads:
        thread.join()
    assert len(killed) >= 3  # a process that has only just been started is killed by the next
    assert without_times(record.path / "evals.jsonl") == without_times(run.path / "evals.jsonl")
    prompts = "eval_prompts.jsonl"
    assert (record.path / prompts).read_bytes() == (run.path / prompts).read_bytes()


def test_a_full_disk_keeps_what_was_written(run, tmp_path):
    """A file size limit stands in for the disk: the kernel refuses the write half-way, as a disk does."""
    code = f"""
import resource, signal, sys
from scalerl.record.reader import RunRecord
from scalerl.record.writer import RunWriter
from scalerl.errors import WriteError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
source = RunRecord.read({str(run.path)!r})
writer = RunWriter({str(tmp_path / "full")!r}, {{}})
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
try:
    for point in source.evals * 5:
        writer.evaluation(point, "x", ["a"], [1])
except WriteError as error:
    print(error)
    sys.exit(error.exit_status)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "evals.jsonl" in done.stdout
    assert "what was written before is kept" in done.stdout
    kept = RunRecord.read(tmp_path / "full")
    assert 3 <= len(kept.evals) < 60
    assert kept.evals == run.evals[: len(kept.evals)]
    assert not kept.warnings  # no torn line


def test_write_errors_name_the_file(tmp_path):
    writer = RunWriter(tmp_path / "run", {})
    (tmp_path / "run" / "steps.jsonl").mkdir()
    with pytest.raises(WriteError, match=r"steps\.jsonl: Is a directory"):
        writer.step({"step": 1})


@pytest.mark.parametrize(
    ("number", "placement"),
    [
        (signal.SIGINT, "inline"),
        pytest.param(signal.SIGTERM, "local", marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, "local", marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, "inline", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_leaves_a_record_that_can_be_fitted(recipe, model, tmp_path, number, placement):
    """And so do the SIGTERM of a scheduler, its notice before that, and the end of a terminal; all go to
    every process of the run."""
    folder = tmp_path / "run"
    toml = tmp_path / "long.toml"
    endless = replace(recipe, budget=replace(recipe.budget, amount=100_000))
    toml.write_text(to_toml(endless.to_dict(), model))
    command = [sys.executable, "-m", "scalerl", "train", str(toml), "-o", str(folder)]
    command += ["--set", "evaluation.count=50000", "--set", f"placement.kind={placement}"]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, process_group=0, preexec_fn=_as_in_the_foreground
    )
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            if (folder / "evals.jsonl").exists() and len(lines(folder / "evals.jsonl")) > 8:
                break
            time.sleep(0.2)
        os.killpg(process.pid, number)  # the whole group, as a terminal does
        _, stderr = process.communicate(timeout=180)
    finally:
        process.kill()
    assert process.returncode == 130, stderr
    ends = [line for line in stderr.splitlines() if line.startswith("scalerl: ")]
    assert ends == [
        "scalerl: stopping with a checkpoint; once more stops at once",
        f"scalerl: interrupted; scalerl train {folder} --resume goes on, "
        f"scalerl fit {folder} fits what was run",
    ]
    assert "Traceback" not in stderr
    record = RunRecord.read(folder)
    assert not record.warnings
    assert len(record.evals) > 8
    assert fit(record, x="flops").n_points == len(record.evals)
    last = record.steps()[-1]["step"]
    assert list((folder / "checkpoints").glob(f"step-{last:05d}*/model.safetensors"))


def _as_in_the_foreground():
    """A shell starts background jobs with Ctrl-C ignored, which children inherit; the tests may be in one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def to_toml(values, model):
    """JSON scalars are TOML scalars but for null, which recipes do not hold."""

    def leaves(table, prefix=""):
        for key, value in table.items():
            if isinstance(value, dict):
                yield from leaves(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key} = {json.dumps(value)}"

    return "\n".join(leaves({**values, "model": str(model)}))
