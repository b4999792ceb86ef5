"""The folder of a study as it is read: what is no study is refused in a line."""

import json
import shutil

import pytest

from scalerl.cli.main import main
from scalerl.errors import InputError
from scalerl.record import reader
from scalerl.study.record import StudyRecord

GARBAGE = [
    *({"arms": []}, {"runs": [{"arm": "zzz"}]}, {"budgets": "x"}, {"budgets": []}, {"budgets": [None]}),
    *({"base": "nope"}, {"target": "x"}, {"axis": 5}, {"axis": "foo"}, {"retries": "a"}, {"price": "x"}),
    *({"arms": [{"name": "base", "changes": {}, "recipe": None}]}, {"arms": [5]}),
    *({"warnings": [3]}, {"runs": [{"arm": "base", "seed": "x", "model": "m", "folder": "f"}]}),
    {"runs": [{"arm": "base", "seed": 0, "model": "m", "folder": "../../etc"}]},
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=str)
def test_a_plan_that_is_none_is_refused_in_a_line(studies, tmp_path, capsys, garbage):
    path = studies.write(tmp_path, {"base": studies.Truth(), "x": studies.Truth()}, seeds=1)
    plan = json.loads((path / "study.json").read_text())
    (path / "study.json").write_text(json.dumps(plan | garbage))
    assert main(["study", "report", str(path)]) == 2
    error = capsys.readouterr().err
    assert "no study as this version writes it" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("attempts.jsonl", {"run": 5}),
        ("attempts.jsonl", {"run": "a", "outcome": "done", "cause": "", "seconds": 1, "until": 2, "more": 3}),
        ("decisions.jsonl", {"decision": "combined", "arm": "x", "of": 3}),
        ("decisions.jsonl", {"decision": "guess"}),
        ("forecasts.jsonl", {"run": 5}),
    ],
)
def test_rows_that_are_none_are_refused_in_a_line(studies, tmp_path, name, row):
    path = studies.write(tmp_path, {"base": studies.Truth(), "x": studies.Truth()}, seeds=1)
    studies.lines(path / name, [row])
    with pytest.raises(InputError, match=f"{name}, row 1: "):
        StudyRecord.read(path)


@pytest.mark.parametrize("name", ["evals.jsonl", "steps.jsonl"])
def test_a_run_that_cannot_be_read_is_left_out_of_the_report(studies, tmp_path, capsys, name):
    path = studies.write(tmp_path, {"base": studies.Truth(), "x": studies.Truth()}, seeds=3)
    damaged = path / "runs" / "x" / "seed1" / name
    if name == "steps.jsonl":
        studies.lines(damaged, [{"step": step} for step in range(5)])
    lines = damaged.read_text().splitlines()
    damaged.write_text("\n".join([*lines[:2], "{torn", *lines[3:]]) + "\n")
    assert main(["study", "report", str(path), "--json"]) == 0
    base, x = json.loads(capsys.readouterr().out)["arms"]
    assert [run["fit"] is None for run in x["runs"]] == [False, True, False]
    assert f"{name}, line 3" in x["runs"][1]["why"]
    assert (base["measured"], x["measured"]["seeds"]) == (None, 2)
    assert main(["study", "report", str(path)]) == 0
    assert "warning: left out: x seed 1: " in capsys.readouterr().out


def test_a_report_reads_the_steps_of_every_run_once(studies, tmp_path, monkeypatch):
    path = studies.write(tmp_path, {"base": studies.Truth(), "x": studies.Truth()}, seeds=2)
    runs = sorted(path.glob("runs/*/*/"))
    for n, run in enumerate(runs):
        studies.lines(run / "steps.jsonl", [{"step": step, "loss": n / (1 + step)} for step in range(5)])
    read = []
    once = reader.read_rows
    monkeypatch.setattr(reader, "read_rows", lambda file, said: read.append(file) or once(file, said))
    assert main(["study", "report", str(path)]) == 0
    assert sorted(file.parent for file in read if file.name == "steps.jsonl") == sorted(
        path.glob("runs/*/*/")
    )
    assert '"metrics":["loss"]' in (path / "report.html").read_text()


def test_a_run_whose_evaluations_are_gone_is_no_finished_run(studies, tmp_path, capsys):
    """The report says what the others say."""
    path = studies.write(tmp_path, {"base": studies.Truth(), "x": studies.Truth()}, seeds=2)
    (path / "runs" / "x" / "seed1" / "evals.jsonl").write_text("")
    assert main(["study", "report", str(path)]) == 0
    assert [run.outcome for run in StudyRecord.read(path).of_arm("x")] == ["finished", "under way"]
    assert "x " in capsys.readouterr().out


def test_a_study_copied_without_checkpoints_has_finished_runs(studies, tmp_path):
    path = studies.write(tmp_path, {"base": studies.Truth(), "x": studies.Truth()}, seeds=2)
    plan = json.loads((path / "study.json").read_text())
    budget = {"kind": plan["axis"], "amount": plan["budgets"][-1]}
    for run in path.glob("runs/*/*"):
        shutil.rmtree(run / "checkpoints")
        (run / "config.json").write_text(json.dumps({"schema": 1, "budget": budget}))
    cut = path / "runs" / "x" / "seed1" / "evals.jsonl"
    cut.write_text("".join(cut.read_text().splitlines(keepends=True)[:-1]))
    found = StudyRecord.read(path)
    assert [run.outcome for arm in ("base", "x") for run in found.of_arm(arm)] == [
        *("finished", "finished", "finished"),
        "under way",
    ]
