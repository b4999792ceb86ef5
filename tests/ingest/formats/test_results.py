import json
import re

import pytest
from hostile_logs import everything
from read_logs import read_logs

from scalerl import InputError, load_run
from scalerl.ingest.formats.recognise import recognise
from scalerl.ingest.formats.results import FORMAT, step_named_in

DATE = "results_2026-08-07T11-16-36.123456.json"


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2))
    return path


def lm_eval(model, tasks, *, n=1319, date=1.78e9, **more):
    """A file of lm-evaluation-harness 0.4.13: loggers/evaluation_tracker.py."""
    results = {
        task: {"alias": task, f"{metric}": rate, f"{metric.replace(',', '_stderr,')}": 0.01}
        for task, (metric, rate) in tasks.items()
    }
    return {
        "results": results,
        "group_subtasks": {task: [] for task in tasks},
        "n-samples": {task: {"original": n, "effective": n} for task in tasks},
        "config": {"model": "vllm", "model_args": f"pretrained={model},dtype=bfloat16"},
        "date": date,
        "model_name": model,
        **more,
    }


def lighteval(model, tasks):
    """A file of lighteval 0.13: logging/evaluation_tracker.py."""
    return {
        "config_general": {"lighteval_sha": "?", "model_config": {"model_name": model}},
        "results": {task: {"extractive_match": rate} for task, rate in {**tasks, "all": 0.5}.items()},
        "config_tasks": {task: {"name": task, "effective_num_docs": 500} for task in tasks},
    }


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("/out/checkpoint-100", 100),
        ("ckpts/global_step_250/actor/hf", 250),
        ("__ckpts__global_step0300__hf", 300),
        ("sft_step_2000/grpo/step-000040.json", 40),
        ("iter_0000100", 100),
        ("a4_const_bias_123_step50_aime2024.json", 50),
        ("checkpoint_7", 7),
        ("Qwen/Qwen2.5-1.5B", None),
        ("epoch_3", None),
        ("step_1.5k", None),
        ("step100k", None),
        ("footstep_3", None),
        ("r1-distill-step", None),
    ],
)
def test_steps_in_names(name, step):
    assert step_named_in(name) == step


def test_lm_evaluation_harness(tmp_path):
    for step in (100, 0, 1000, 500, 250):
        model = f"/out/grpo/checkpoint-{step}"
        tasks = {
            "gsm8k": ("exact_match,strict-match", step / 2000),
            "aime24": ("exact_match,none", step / 9000),
        }
        write(tmp_path / model.replace("/", "__") / DATE, lm_eval(model, tasks))
    assert recognise(tmp_path) is FORMAT
    run = load_run(tmp_path, metric="eval/gsm8k/exact_match,strict-match")
    assert [(one.step, one.pass_rate) for one in run.evals] == [
        (0, 0.0),
        (100, 0.05),
        (250, 0.125),
        (500, 0.25),
        (1000, 0.5),
    ]
    assert run.config["source"]["trainer"] == "harness"
    assert run.config["metric"]["dataset"] == "gsm8k"
    assert run.config["metric"]["prompts"] == 1319
    assert run.logged_axes() == ("steps",)  # the time of an evaluation is not that of the training


def test_task_with_most_prompts_is_taken_unless_named(tmp_path):
    for step in (10, 20):
        found = lm_eval(
            f"step_{step}", {"aime24": ("exact_match,none", 0.1), "math": ("math_verify,none", 0.4)}
        )
        found["n-samples"]["aime24"] = {"original": 30, "effective": 30}
        write(tmp_path / f"{step}" / DATE, found)
    run = load_run(tmp_path)
    assert run.config["metric"]["name"] == "eval/math/math_verify,none"
    assert "of 2 held-out metrics that with most prompts is taken" in " ".join(run.warnings)
    pooled = load_run(tmp_path, pooled=True)
    assert pooled.evals[0].pass_rate == pytest.approx((30 * 0.1 + 1319 * 0.4) / 1349)


def test_lighteval(tmp_path):
    for step in (100, 200):
        model = f"out/global_step_{step}/hf"
        write(tmp_path / "results" / model / DATE, lighteval(model, {"gsm8k|0": step / 400}))
    run = load_run(tmp_path)
    assert [(one.step, one.pass_rate) for one in run.evals] == [(100, 0.25), (200, 0.5)]
    # The mean over tasks is that of the only one.
    assert run.config["metric"]["name"] == "eval/gsm8k|0/extractive_match"
    assert run.config["metric"]["prompts"] == 500


def inspect(task, model, rate, *, reducer="mean", **more):
    """A log of Inspect 0.3.285 in JSON: log/_log.py, without its samples."""
    score = {"name": "match", "scorer": "match", "reducer": reducer, "params": {}}
    score["metrics"] = {
        "accuracy": {"name": "accuracy", "value": rate},
        "stderr": {"name": "stderr", "value": 0.01},
    }
    about = {"created": "2026-08-07T11:16:36+00:00", "task": task, "model": model, "config": {"epochs": 4}}
    done = {"total_samples": 400, "completed_samples": 400, "scores": [score]}
    return {"version": 2, "status": "success", "eval": about, "results": done, **more}


@pytest.mark.parametrize("in_path", [False, True])
def test_inspect(tmp_path, in_path):
    """The step is in the name of the model or in the path, beside the id of each evaluation."""
    for step in (100, 200, 300):
        for n, (task, rate) in enumerate({"gsm8k": step / 400, "aime": 0.1}.items()):
            model, folder = (
                (f"vllm/out/checkpoint-{step}", ".") if not in_path else ("vllm/local", f"step_{step}")
            )
            name = f"2026-08-07T11-16-36+00-00_{task}_8zXjbRzCWrL9GXi{step}{n}vus.json"
            write(tmp_path / "logs" / folder / name, inspect(task, model, rate))
    write(tmp_path / "logs" / "step_400.json", inspect("gsm8k", "vllm/out/checkpoint-400", 0, status="error"))
    best = inspect("gsm8k", "vllm/out/checkpoint-500", 1.0, reducer="max")  # of 4 epochs: pass@4
    write(tmp_path / "logs" / "step_500.json", best)
    assert recognise(tmp_path / "logs") is FORMAT
    run = load_run(tmp_path / "logs", metric="eval/gsm8k/accuracy,match")
    assert [(one.step, one.pass_rate) for one in run.evals] == [(100, 0.25), (200, 0.5), (300, 0.75)]
    assert (run.metric.dataset, run.metric.n_prompts, run.metric.n_samples) == ("gsm8k", 100, 4)
    assert run.metric.others == ()
    assert load_run(tmp_path / "logs").metric.others == ("eval/gsm8k/accuracy,match",)


def olmes(task, model, primary, rate, **more):
    """A file of OLMES: task-000-TASK-metrics.json."""
    return {
        "task_name": task,
        "task_hash": "bd4f",
        "model_hash": "c21e",
        "model_config": {"model": model, "revision": None, "max_length": 4096},
        "task_config": {"task_name": task, "primary_metric": primary, "num_shots": 8},
        "num_instances": 1319,
        "metrics": {primary: rate, "f1": 0.9, "primary_score": rate},
        **more,
    }


@pytest.mark.parametrize("in_path", [False, True])
def test_olmes(tmp_path, in_path):
    """Of each task the primary metric, if that is a share of right answers."""
    tasks = {"gsm8k::olmes": "exact_match", "squad": "f1", "arc:mc": "acc_raw", "wiki": "bits_per_byte"}
    for step in (100, 200):
        # As users name the output folder of each checkpoint.
        folder = tmp_path / (f"step_{step}" if in_path else f"{step}")
        model = "out/hf" if in_path else f"out/step{step}-hf"
        for n, (task, primary) in enumerate(tasks.items()):
            found = olmes(task, model, primary, step / 400)
            write(folder / f"task-00{n}-{task}-metrics.json", found)
            write(folder / f"task-00{n}-{task}-config.json", found["task_config"])
        whole = {"all_primary_scores": ["gsm8k: 0.1"], "tasks": [], "model_config": {"model": model}}
        write(folder / "metrics.json", whole)
    assert recognise(tmp_path) is FORMAT
    run = load_run(tmp_path)
    names = {run.metric.name, *run.metric.others}
    assert names == {"eval/gsm8k::olmes/exact_match", "eval/arc:mc/acc_raw"}
    assert [(one.step, one.pass_rate) for one in run.evals] == [(100, 0.25), (200, 0.5)]
    assert run.metric.n_prompts == 1319


def test_runs_are_told_apart_by_their_models(tmp_path):
    for recipe in ("grpo", "dapo"):
        for step in (10, 20):
            model = f"/out/{recipe}/checkpoint-{step}/hf"
            rate = step / 100 + (recipe == "dapo") / 2
            write(tmp_path / f"{recipe}{step}.json", lm_eval(model, {"gsm8k": ("exact_match,none", rate)}))
    logs = read_logs(FORMAT, tmp_path, everything)
    assert {log.name: log.metrics["eval/gsm8k/exact_match,none"].value_N.tolist() for log in logs} == {
        "dapo": [0.6, 0.7],
        "grpo": [0.1, 0.2],
    }
    with pytest.raises(InputError, match="holds 2 runs; choose one with --run: dapo, grpo"):
        load_run(tmp_path)


def test_repeated_evaluation_counts_once(tmp_path):
    # The files are in the other order by name.
    for name, date, rate in (("b", 1.0e9, 0.1), ("a", 2.0e9, 0.3)):
        write(tmp_path / name / DATE, lm_eval("step_5", {"gsm8k": ("exact_match,none", rate)}, date=date))
    write(tmp_path / "c" / DATE, lm_eval("step_9", {"gsm8k": ("exact_match,none", 0.4)}))
    run = load_run(tmp_path)
    assert [(one.step, one.pass_rate) for one in run.evals] == [(5, 0.3), (9, 0.4)]
    assert any("repeated at a step, of which the last one counts" in warning for warning in run.warnings), (
        run.warnings
    )


def test_base_model_has_the_step_of_its_folder_or_is_left_out_by_name(tmp_path):
    task = {"gsm8k": ("exact_match,none", 0.2)}
    for step in (10, 20):
        write(tmp_path / f"{step}.json", lm_eval(f"out/step_{step}", task))
    write(tmp_path / "base.json", lm_eval("Qwen/Qwen2.5-1.5B", task))
    run = load_run(tmp_path)
    assert [one.step for one in run.evals] == [10, 20]
    assert any("results of 1 model left out" in w and "Qwen/Qwen2.5-1.5B" in w for w in run.warnings)
    (tmp_path / "base.json").unlink()
    (tmp_path / "10.json").unlink()
    (tmp_path / "20.json").unlink()
    write(tmp_path / "base.json", lm_eval("Qwen/Qwen2.5-1.5B", task))
    with pytest.raises(InputError, match=r"left out, without a step in the name \(checkpoint-100\): Qwen"):
        load_run(tmp_path)


def test_served_model_has_the_step_of_its_path(tmp_path):
    for step in (10, 20):
        found = lm_eval("my-model", {"gsm8k": ("exact_match,none", step / 100)})
        del found["model_name"]
        found["config"]["model_args"] = "model=my-model,base_url=http://localhost:8000/v1"
        write(tmp_path / f"step_{step}" / "my-model" / DATE, found)
    assert [(one.step, one.pass_rate) for one in load_run(tmp_path).evals] == [(10, 0.1), (20, 0.2)]


def test_scripts_of_ones_own(tmp_path):
    for step in (50, 100, 150):
        write(
            tmp_path / f"a_step{step}" / f"a_step{step}_aime.json",
            {
                "benchmark": "aime",
                "n_samples": 30,
                "pass_at_1": step / 300,
                "maj_at_8": 0.9,
                "responses": ["a"],
            },
        )
    write(tmp_path / "a_step50" / "config.json", {"hidden_size": 64})
    write(tmp_path / "a_step50" / "notes.json", ["no object"])
    (tmp_path / "a_step50" / "cut.json").write_text('{"pass_at_1": 0.5')
    run = load_run(tmp_path)
    assert [(one.step, one.pass_rate) for one in run.evals] == [(50, 1 / 6), (100, 1 / 3), (150, 0.5)]
    assert any(re.search(r"2 files left out, such as .*cut\.json: not JSON", one) for one in run.warnings)
    assert run.config["metric"]["name"] == "eval/pass_at_1"
    assert any("is assumed to be the held-out pass rate by its name" in one for one in run.warnings)


def test_own_step_counts_before_that_of_the_path(tmp_path):
    for place, step in ((1, 100), (2, 200)):
        write(tmp_path / f"step_{place}.json", {"step": step, "accuracy": step / 1000})
    assert [(one.step, one.pass_rate) for one in load_run(tmp_path).evals] == [(100, 0.1), (200, 0.2)]


def test_one_file_of_a_harness_is_one_evaluation(tmp_path):
    file = write(tmp_path / DATE, lm_eval("step_5", {"gsm8k": ("exact_match,none", 0.1)}))
    with pytest.raises(InputError, match="the results of one evaluation; give the folder"):
        load_run(file)


def test_checkpoints_without_results_are_none(tmp_path):
    write(tmp_path / "checkpoint-10" / "config.json", {"hidden_size": 64, "vocab_size": 1000})
    write(tmp_path / "checkpoint-10" / "generation_config.json", {"temperature": 1.0})
    assert recognise(tmp_path) is None
