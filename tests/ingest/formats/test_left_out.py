"""Evaluations that are no numbers, in every format: counted, named, and at the end of a run a warning."""

import json
import math
import sqlite3
from contextlib import closing
from importlib import import_module

import numpy as np
import pytest
from event_files import START, event
from wandb_files import framed, header, history

from scalerl import InputError, fit, load_run, read_table
from scalerl.cli.main import main
from scalerl.curve import LOG_LOGISTIC, Curve
from scalerl.record.left_out import LeftOut

TRUTH = Curve(LOG_LOGISTIC, 0.61, 1.9, 20.0, 0.2)
"""Over steps."""
SOUND, ALL = 30, 50
METRIC = "eval_reward"


def rates(without=math.nan):
    """Of steps 2, 4, ..., 100: the last 40 % without a number."""
    rng = np.random.default_rng(0)
    made = np.round(TRUTH(2.0 * np.arange(1, ALL + 1)) + rng.normal(0, 0.004, ALL), 5).tolist()
    return {2 * n: made[n - 1] if n <= SOUND else without for n in range(1, ALL + 1)}


def rows(found):
    return [{"step": step, METRIC: rate, "loss": 0.1} for step, rate in found.items()]


def jsonl(folder, found):
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(found)))
    return path


def trainer_state(folder, found):
    path = folder / "trainer_state.json"
    path.write_text(json.dumps({"log_history": rows(found), "global_step": 100}))
    return path


def tensorboard(folder, found):
    events = [event(METRIC, step, float(rate), time=1.7e9 + step) for step, rate in found.items()]
    (folder / "events.out.tfevents.1").write_bytes(b"".join([START, *events]))
    return folder


def wandb(folder, found):
    """W&B writes NaN as a text."""
    told = {step: rate if math.isfinite(rate) else json.dumps("NaN") for step, rate in found.items()}
    records = [header(), *(history(step, {METRIC: rate, "loss": 0.1}) for step, rate in told.items())]
    (folder / "run-x.wandb").write_bytes(framed(records))
    return folder / "run-x.wandb"


def wandb_bare(folder, found):
    records = [header(), *(history(step, {METRIC: rate}) for step, rate in found.items())]
    (folder / "run-x.wandb").write_bytes(framed(records))
    return folder / "run-x.wandb"


def wandb_csv(folder, found):
    cells = [
        f'"{step}","{rate}","{rate}","{rate}"'.replace("nan", "NaN").replace("inf", "Infinity")
        for step, rate in found.items()
    ]
    name = f"a - {METRIC}"
    (folder / "x.csv").write_text("\n".join([f'"Step","{name}","{name}__MIN","{name}__MAX"', *cells]))
    return folder / "x.csv"


def mlflow(folder, found):
    (folder / "metrics").mkdir()
    (folder / "meta.yaml").write_text("lifecycle_stage: active\nrun_id: b\nrun_name: a\n")
    lines = [f"{1_700_000_000_000 + step} {rate} {step}\n" for step, rate in found.items()]
    (folder / "metrics" / METRIC).write_text("".join(lines))
    return folder


def trackio(folder, found):
    with closing(sqlite3.connect(folder / "p.db")) as database:
        database.execute("CREATE TABLE metrics (id INTEGER PRIMARY KEY, timestamp, run_name, step, metrics)")
        for step, rate in found.items():
            text = json.dumps(
                {METRIC: rate if math.isfinite(rate) else "NaN" if rate != rate else "Infinity"}
            )
            cells = ("2026-01-01T00:00:00", "a", step, text)
            database.execute(
                "INSERT INTO metrics (timestamp, run_name, step, metrics) VALUES (?, ?, ?, ?)", cells
            )
        database.commit()
    return folder / "p.db"


def verl(folder, found):
    path = folder / "verl.jsonl"
    told = [
        {"step": s, "data": {"val-core/a/acc/mean@4": r, "critic/score/mean": 0.1}} for s, r in found.items()
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in told))
    return path


def verl_console(folder, found):
    path = folder / "verl.log"
    told = [
        f"step:{s} - val-core/a/acc/mean@4:np.float64({r}) - critic/score/mean:0.1\n"
        for s, r in found.items()
    ]
    path.write_text("".join(told))
    return path


def parquet(folder, found):
    arrow, file = import_module("pyarrow"), import_module("pyarrow.parquet")
    file.write_table(arrow.Table.from_pylist(rows(found)), folder / "x.parquet")
    return folder / "x.parquet"


FORMATS = [
    *(jsonl, trainer_state, tensorboard, wandb, wandb_bare, wandb_csv, mlflow, trackio, verl, verl_console),
    parquet,
]


@pytest.mark.parametrize("write", FORMATS)
@pytest.mark.parametrize(("without", "reason"), [(math.nan, "NaN"), (math.inf, "infinite")])
def test_a_run_that_diverged_says_so_in_every_format(tmp_path, write, without, reason):
    if write is wandb and reason == "infinite":
        pytest.skip("it has a text of its own")
    run = load_run(write(tmp_path, rates(without)))
    assert [point.step for point in run.evals] == list(range(2, 61, 2))
    told = run.config["left_out"]
    assert (told["total"], told["reasons"]) == (20, {reason: 20})
    assert [one["step"] for one in told["evaluations"]] == list(range(62, 101, 2))
    assert run.warnings[0].startswith("the last 20 of 50 evaluations of '")
    assert f"(40 %) are {reason} (steps 62 to 100): the run may have diverged there" in run.warnings[0]
    found = fit(run, x="steps")
    assert found.warnings[0] == run.warnings[0]
    assert not found.identified
    assert found.why == run.warnings[0]
    assert found.verdict(0.3, 60) == found.verdict(0.99, 60) == "too early"
    assert found.chance(0.3, 60).why == run.warnings[0]
    assert len(found.left_out) == 20


def test_a_table_that_ends_in_nan(tmp_path):
    lines = [f"{step},{rate}" for step, rate in rates().items()]
    (tmp_path / "x.csv").write_text("\n".join(["gpu_hours,pass_rate", *lines]))
    found = fit(read_table(tmp_path / "x.csv"))
    assert found.n_points == 30
    assert not found.identified
    assert "the last 20 of 50 evaluations of 'pass_rate' (40 %) are NaN" in found.warnings[0]
    assert any("left out, NaN: lines 32, 33," in text for text in found.warnings)
    (tmp_path / "sound.csv").write_text("\n".join(["gpu_hours,pass_rate", *lines[:30]]))
    assert fit(read_table(tmp_path / "sound.csv")).identified  # what the NaN takes away


def test_a_nan_in_between_is_named_and_takes_nothing_away(tmp_path):
    found = rates()
    sound = dict(list(found.items())[:SOUND]) | {20: math.nan, 40: math.inf}
    run = load_run(jsonl(tmp_path, sound))
    assert run.config["left_out"]["reasons"] == {"NaN": 1, "infinite": 1}
    assert f"1 evaluation of '{METRIC}' left out, NaN: step 20 (line 10)" in run.warnings
    assert fit(run, x="steps").identified


def test_the_part_before_is_fitted_where_that_is_asked_for(tmp_path):
    run = load_run(jsonl(tmp_path, rates()))
    part = fit(run, x="steps", max_compute=59)
    assert part.identified
    assert not any("diverged" in text for text in part.warnings)
    assert dict(part.left_out.counts) == {"NaN": 20, "above max_compute": 1}
    assert not fit(run, x="steps", max_compute=60).identified


def test_nan_for_a_row_without_an_evaluation_is_no_end(tmp_path):
    """As of a table that has a column for every metric, written without what stands for nothing."""
    arrow, file = import_module("pyarrow"), import_module("pyarrow.parquet")
    sparse = [
        {"step": s, METRIC: float(TRUTH(np.array(float(s)))) if s % 5 == 0 else math.nan, "loss": 0.1}
        for s in range(1, 204)
    ]
    file.write_table(arrow.Table.from_pylist(sparse), tmp_path / "x.parquet")
    run = load_run(tmp_path / "x.parquet")
    assert run.config["left_out"]["ending"] is None
    assert run.config["left_out"]["total"] == 163
    assert run.config["left_out"]["reasons"] == {"no evaluation": 163}
    assert any("163 rows left out, without an evaluation of" in text for text in run.warnings)


@pytest.mark.parametrize(("every", "last"), [(2, 21), (10, 105)])
@pytest.mark.parametrize("as_table", [False, True])
def test_a_column_padded_with_nan_is_no_end_in_any_reader(tmp_path, every, last, as_table):
    rates = {s: round(0.3 + s / 500, 4) if s % every == 0 else math.nan for s in range(1, last + 1)}
    if as_table:
        cells = [f"{s},{s},{'NaN' if math.isnan(rate) else rate}" for s, rate in rates.items()]
        (tmp_path / "x.csv").write_text("\n".join(["step,gpu_hours,pass_rate", *cells]))
        points = read_table(tmp_path / "x.csv")
        left, warnings, steps = points.left_out, points.warnings, points.step_N.tolist()
    else:
        run = load_run(jsonl(tmp_path, rates))
        left, warnings = LeftOut.parse(run.config["left_out"]), run.warnings
        steps = [point.step for point in run.evals]
    assert steps == list(range(every, last, every))
    assert dict(left.counts) == {"no evaluation": last - len(steps)}
    assert left.ending == ""
    assert not any("diverged" in text or "evaluations" in text for text in warnings)


def test_rows_without_an_evaluation_do_not_choose_the_metric(tmp_path):
    """Of two columns padded with NaN the one with 3 values was taken, and the one with 20 not."""
    rows = [
        {
            "step": s,
            "val-core/a/acc/mean@4": 0.3 if s % 30 == 0 else math.nan,
            "val-core/b/acc/mean@4": 0.4 if s % 5 == 0 else math.nan,
        }
        for s in range(1, 101)
    ]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = load_run(tmp_path / "x.jsonl")
    assert [point.step for point in run.evals] == list(range(5, 101, 5))


def test_the_compute_of_rows_that_do_not_count_may_be_nan_too(tmp_path):
    lines = [f"{s},{s},0.{s}" if s < 90 else f"{s},nan,nan" for s in range(10, 121, 10)]
    path = tmp_path / "x.csv"
    path.write_text("\n".join(["step,gpu_hours,pass_rate", *lines]))
    points = read_table(path)
    assert points.step_N.tolist() == list(range(10, 90, 10))
    assert "the last 4 of 12 evaluations of 'pass_rate' (33 %) are NaN" in points.left_out.ending
    path.write_text(path.read_text().replace("20,20,0.20", "20,nan,0.20"))
    with pytest.raises(InputError, match="line 3, column 'gpu_hours': expected a finite number"):
        read_table(path)


def test_a_step_beyond_all_steps_is_named_by_its_line(tmp_path):
    run = load_run(jsonl(tmp_path, {**dict.fromkeys(range(1, 6), 0.5), 1e300: 0.5}))
    assert any("whose step is not a whole number of 0 or more: line 6" in text for text in run.warnings)
    assert max(map(len, run.warnings)) < 300


@pytest.mark.parametrize("as_folder", [False, True])
def test_the_command_line_says_it_first_and_lists_it(tmp_path, capsys, as_folder):
    path = str(jsonl(tmp_path, rates()))
    if as_folder:
        assert main(["ingest", path, "-o", str(tmp_path / "run"), "--json"]) == 0
        (run,) = json.loads(capsys.readouterr().out)["runs"]
        assert run["left_out"]["total"] == 20
        path = str(tmp_path / "run")
    words = ["fit", path, "--x", "steps", "--target", "0.3", "--budget", "80", "--at", "80"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert err.startswith("warning: the last 20 of 50 evaluations")
    assert "30 on steps, 20 left out" in out
    assert "ceiling identified no: the last 20 of 50" in " ".join(out.split())
    assert "GO" not in out
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["identified"] is False
    assert answer["target"]["verdict"] == "too early"
    assert answer["left_out"]["total"] == 20
    assert len(answer["left_out"]["evaluations"]) == 20
    assert answer["left_out"]["ending"] == answer["warnings"][0] == answer["why"]


def test_what_the_cuts_leave_out_is_named(tmp_path, capsys):
    path = jsonl(tmp_path, dict(list(rates().items())[:SOUND]))
    assert main(["fit", str(path), "--x", "steps", "--min-compute", "8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["left_out"]
    assert told["reasons"] == {"below min_compute": 3}
    assert [one["step"] for one in told["evaluations"]] == [2, 4, 6]
    assert main(["fit", str(path), "--x", "steps", "--min-compute", "8"]) == 0
    assert "left out               3 below --min-compute (steps 2 to 6)" in capsys.readouterr().out


def test_a_metric_without_a_single_number_is_named(tmp_path):
    with pytest.raises(Exception, match="50 evaluations of 'eval_reward' left out, NaN: steps 2"):
        load_run(jsonl(tmp_path, dict.fromkeys(rates(), math.nan)))


@pytest.mark.parametrize(
    "odd",
    [
        {"evaluations": [{"reason": []}, {"reason": {}}]},
        {"evaluations": [{"reason": "NaN", "step": 10**400, "line": 1e999}], "reasons": {"NaN": 10**400}},
        {"evaluations": [{"reason": "NaN", "step": math.nan}], "reasons": {"NaN": []}},
        {"evaluations": {"reason": "NaN"}, "reasons": [["NaN", 1]]},
    ],
)
def test_an_odd_list_in_a_config_is_passed_over(tmp_path, capsys, odd):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"schema": 1, "name": "run", "left_out": odd}))
    lines = (json.dumps({"step": s, "pass_rate": 0.2 + s / 500}) + "\n" for s in range(0, 120, 10))
    (run / "evals.jsonl").write_text("".join(lines))
    assert main(["fit", str(run), "--x", "steps", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left_out"]["total"] == 0


def test_every_reason_has_its_places_where_many_are_left_out(tmp_path):
    rate = TRUTH(np.arange(1.0, 1002.0)).tolist()
    made = [{"step": s, "eval_reward": rate[s] if s % 4 else math.nan} for s in range(1, 1001)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    assert main(["ingest", str(tmp_path / "x.jsonl"), "-o", str(tmp_path / "run")]) == 0
    for path in ("x.jsonl", "run"):
        found = fit(load_run(tmp_path / path), max_compute=990)
        nan, above = found.left_out.rows()
        assert ("step" in nan, nan.endswith("and 238 more")) == (True, True)
        assert above == "7 above --max-compute (steps 991 to 999)"
