"""What an answer is about: every command names its metric, and compares none with another."""

import io
import json
from pathlib import Path

import numpy as np
import pytest

from scalerl.cli.main import main
from scalerl.ingest.load import load_run

STEPS = range(0, 400, 20)


def rates(ceiling, start=0.1, middle=60.0):
    return [start + (ceiling - start) / (1 + (middle / max(step, 1e-9)) ** 1.5) for step in STEPS]


def verl_log(path, **sets):
    """A file logger's JSONL with data sets of 1319, 500 and 30 prompts."""
    sizes = {"gsm8k": 1319, "math": 500, "aime24": 30}
    rows = []
    for n, step in enumerate(STEPS):
        data = {"critic/score/mean": 0.5, "timing_s/step": 30.0, "actor/pg_loss": 0.0}
        for name, values in sets.items():
            if n < len(values):
                data[f"val-core/{name}/acc/mean@1"] = round(values[n] * sizes[name]) / sizes[name]
        rows.append({"step": step, "data": data})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def three(tmp_path):
    sets = {"aime24": rates(0.4), "gsm8k": rates(0.8), "math": rates(0.6)}
    return verl_log(tmp_path / "verl.jsonl", **sets)


def answer(capsys, *words):
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_fit_names_its_metric_first_below_the_answer_and_in_json(three, capsys):
    assert main(["fit", three]) == 0
    printed = capsys.readouterr()
    first = printed.out.partition("\n\n")[2].splitlines()[0]
    assert first.split(None, 1) == [
        "metric",
        "val-core/gsm8k/acc/mean@1, held-out pass rate of gsm8k (1,319 prompts, 1 sample each)",
    ]
    assert "of 3 held-out metrics that with most prompts is taken" in printed.err
    metric = answer(capsys, "fit", three)["metric"]
    assert (metric["name"], metric["kind"], metric["split"]) == (
        "val-core/gsm8k/acc/mean@1",
        "pass rate",
        "held-out",
    )
    assert metric["others"] == ["val-core/aime24/acc/mean@1", "val-core/math/acc/mean@1"]
    assert (metric["dataset"], metric["prompts"], metric["samples"]) == ("gsm8k", 1319, 1)


def test_a_pattern_each_and_pooled(three, capsys):
    assert answer(capsys, "fit", three, "--y", "*aime*")["metric"]["dataset"] == "aime24"
    pooled = answer(capsys, "fit", three, "--pooled", "--prompts", "aime24=30,gsm8k=1319,math=500")
    assert pooled["metric"]["prompts"] == 1849
    expected = (30 * 0.4 + 1319 * 0.8 + 500 * 0.6) / 1849
    assert pooled["median"]["A"] == pytest.approx(expected, abs=0.01)
    each = answer(capsys, "fit", three, "--each", "--target", "0.7", "--budget", "9000")["each"]
    assert [one["metric"]["dataset"] for one in each] == ["aime24", "gsm8k", "math"]
    assert [one["target"]["verdict"] for one in each] == ["no-go", "go", "no-go"]
    assert main(["fit", three, "--each"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split("  ")[0] == "metric"
    assert [line.split("/")[1] for line in table[1:]] == ["aime24", "gsm8k", "math"]


def test_each_says_shortly_in_its_table_what_cannot_be_fitted(tmp_path, capsys):
    log = verl_log(tmp_path / "verl.jsonl", math=rates(0.6), aime24=rates(0.4)[:3], gsm8k=[0.5] * len(STEPS))
    assert main(["fit", log, "--each"]) == 0
    out, err = capsys.readouterr()
    short, flat, _ = out.splitlines()[1:]
    assert short.endswith("none: 3 evaluations")
    assert f"warning: val-core/aime24/acc/mean@1: {log}: 3 evaluations; a curve needs" in err
    assert flat.endswith("]  no")  # forecast, its ceiling not identified
    assert main(["fit", log, "--each", "--prior", "flat"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[2].endswith("none: 'val-core/gsm8k/acc/mean@1' does not rise")
    assert f"{log}: 'val-core/gsm8k/acc/mean@1' does not rise: from 0.500" in err


def test_no_compute_is_a_bound_of_each_as_it_is_of_one(three, capsys):
    said = []
    for more in ([], ["--each"]):
        assert main(["fit", three, "--max-compute", "0", *more]) == 2
        said.append(capsys.readouterr().err.splitlines()[-1])
    assert said[0] == said[1]
    assert "max_compute" in said[0]


def test_evaluations_left_out_are_listed_once(tmp_path, capsys):
    log = Path(verl_log(tmp_path / "verl.jsonl", math=rates(0.6)))
    log.write_text(2 * log.read_text())
    assert main(["fit", str(log)]) == 0
    out, err = capsys.readouterr()
    assert f"left out               {len(STEPS)} evaluations left out, superseded" in out
    assert "left out" not in err
    assert "the run was restarted" in err


def test_percentages_only_where_that_is_said(tmp_path, capsys):
    table = tmp_path / "eval.csv"
    lines = [f"{step},{100 * rate:.4f}" for step, rate in zip(STEPS, rates(0.6), strict=True)]
    table.write_text("gpu_hours,score\n" + "\n".join(lines) + "\n")
    assert main(["fit", str(table), "--y", "score"]) == 2
    assert "above 1" in capsys.readouterr().err
    found = answer(capsys, "fit", str(table), "--y", "score", "--percent")
    assert found["median"]["A"] == pytest.approx(0.6, abs=0.01)
    assert found["metric"]["name"] == "score"
    assert answer(capsys, "fit", str(table), "--y", "score", "--max-reward", "200")["median"]["A"] < 0.31


def test_a_training_reward_gets_no_verdict(tmp_path, capsys):
    log = verl_log(tmp_path / "verl.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "verl.jsonl").read_text().splitlines()]
    for row, rate in zip(rows, rates(0.6), strict=True):
        row["data"]["critic/score/mean"] = rate
    (tmp_path / "verl.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["fit", log]) == 2
    assert "--y critic/score/mean fits it" in capsys.readouterr().err
    words = ["fit", log, "--y", "critic/score/mean", "--target", "0.3", "--budget", "9000"]
    found = answer(capsys, *words)
    assert (found["metric"]["kind"], found["metric"]["split"]) == ("training reward", "training")
    assert (found["identified"], found["target"]["verdict"]) == (False, "training reward")
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "TRAINING REWARD" in printed
    assert "GO, " not in printed


def test_runs_of_different_metrics_are_not_compared(tmp_path, capsys):
    one = verl_log(tmp_path / "one.jsonl", gsm8k=rates(0.7), math=rates(0.5))
    other = verl_log(tmp_path / "other.jsonl", math=rates(0.6))
    assert main(["compare", one, other]) == 2
    said = capsys.readouterr().err
    assert "runs of different metrics are not compared" in said
    assert "'one' has val-core/gsm8k/acc/mean@1" in said
    found = answer(capsys, "compare", one, other, "--y", "*math*")
    assert [metric["dataset"] for metric in found["metrics"]] == ["math"]
    assert main(["compare", one, other, "--y", "*math*"]) == 0
    assert (
        capsys.readouterr().out.splitlines()[0].split(None, 1)[1].startswith("val-core/math/acc/mean@1, held")
    )


def test_watch_and_pages_name_it(three, tmp_path, capsys):
    assert main(["watch", three, "--once"]) == 0
    assert "verl: metric val-core/gsm8k/acc/mean@1, held-out pass rate" in capsys.readouterr().err
    assert answer(capsys, "watch", three, "--once")["metric"]["name"] == "val-core/gsm8k/acc/mean@1"
    several, single = tmp_path / "runs.html", tmp_path / "run.html"
    assert main(["report", three, "-o", str(several)]) == 0
    assert main(["ingest", three, "-o", str(tmp_path / "run")]) == 0
    assert main(["report", str(tmp_path / "run"), "-o", str(single)]) == 0
    for page in (several, single):
        assert "val-core/gsm8k/acc/mean@1, held-out pass rate of gsm8k" in page.read_text()
    assert load_run(tmp_path / "run").metric.n_prompts == 1319


def test_options_that_have_nothing_to_do_are_refused(tmp_path, three, capsys):
    table = tmp_path / "eval.csv"
    table.write_text(
        "gpu_hours,pass_rate\n" + "".join(f"{s},{r}\n" for s, r in zip(STEPS, rates(0.6), strict=True))
    )
    assert main(["fit", str(table), "--pooled"]) == 2
    assert "--pooled" in capsys.readouterr().err
    assert main(["fit", three, "--each", "--at", "10"]) == 2
    assert "--each does not support --at" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["fit", three, "--percent", "--max-reward", "2"])
    assert np.isclose(answer(capsys, "fit", str(table))["median"]["A"], 0.6, atol=0.01)


def test_a_log_on_standard_input_is_told_to_be_given_by_name(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"step:1 - val/acc:0.5\n")))
    assert main(["fit", "-"]) == 2
    assert "a log is given by the name of its file" in capsys.readouterr().err
