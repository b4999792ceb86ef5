"""The order of evaluations: none is lost for coming late, and of a restarted run the later branch counts."""

import json
import math
import random
import time as clock

import pytest
from hypothesis import given, settings, strategies as st

from scalerl import load_run, read_table
from scalerl.ingest.load import read_source
from scalerl.ingest.options import ReadOptions

QUICK = settings(max_examples=60)
FIRST = 1.7e9


def trained(step, time=None, reward=0.5):
    row = {"step": step, "train/reward": reward, "train/loss": 1 / (step + 1), "train/entropy": 0.3}
    return row if time is None else {**row, "time": time}


def evaluated(step, rate, time=None):
    row = {"step": step, "eval/pass_rate": rate}
    return row if time is None else {**row, "time": time}


def read(folder, rows):
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_run(path)


def curve(run):
    return [(point.step, point.pass_rate) for point in run.evals]


def left_out(run):
    return run.config.get("left_out", {"total": 0, "reasons": {}, "evaluations": []})


def rate(step):
    return round(step / (step + 50), 6)


@QUICK
@given(
    late=st.lists(st.integers(0, 40), min_size=25, max_size=25),
    timed=st.booleans(),
    starts_anew=st.booleans(),
)
def test_evaluations_that_end_in_any_order_are_all_kept(tmp_path, late, timed, starts_anew):
    """As of an evaluator beside the training: each is logged some rows after its step."""
    times = [FIRST + 10 * n for n in range(400)] if timed else [None] * 400
    due = sorted((4 * n + delay, 4 * n) for n, delay in enumerate(late, start=not starts_anew))
    rows = []
    for step in range(1, 150):
        rows.append(trained(step, times[step]))
        rows += [evaluated(of, rate(of), times[step]) for at, of in due if at == step]
    run = read(tmp_path, rows)
    made = sorted(of for at, of in due if 1 <= at < 150)
    assert curve(run) == [(step, rate(step)) for step in made]
    assert left_out(run)["total"] == 0
    assert not any("restart" in text for text in run.warnings)


@QUICK
@given(rows=st.permutations([evaluated(10 * n, rate(10 * n)) for n in range(12)]), seed=st.integers(0, 99))
def test_any_order_of_the_rows_gives_the_same_record(tmp_path, rows, seed):
    among = [trained(step) for step in range(1, 120)]
    places = sorted(random.Random(seed).choices(range(120), k=12))
    for place, row in reversed(list(zip(places, rows, strict=True))):
        among.insert(place, row)
    expected = read(tmp_path, sorted(among, key=lambda row: row["step"]))
    for found in (read(tmp_path, among), read(tmp_path, rows), read(tmp_path, among[::-1])):
        assert curve(found) == [(10 * n, rate(10 * n)) for n in range(12)]
        assert left_out(found)["total"] == 0
    assert repr(read(tmp_path, among).evals) == repr(expected.evals)  # a NaN is not one


@QUICK
@given(
    checkpoint=st.integers(0, 60),
    lost=st.integers(2, 50),
    went_on=st.integers(2, 80),
    every=st.integers(1, 9),
    timed=st.booleans(),
    apart=st.booleans(),
)
def test_of_a_restarted_run_the_later_branch_counts(tmp_path, checkpoint, lost, went_on, every, timed, apart):
    """Resumed at `checkpoint` after `lost` steps more, for as long as it went on."""
    rows, old, new = [], {}, {}
    time = FIRST

    def log(step, branch, kept):
        nonlocal time
        time += 10
        at = time if timed else None
        value = round(rate(step) - 0.01 * branch, 6)
        if step % every:
            rows.append(trained(step, at))
        elif apart:
            rows.extend([trained(step, at), evaluated(step, value, at)])
        else:
            rows.append({**trained(step, at), **evaluated(step, value, at)})
        if step % every == 0:
            kept[step] = (len(rows), value)

    for step in range(1, checkpoint + lost + 1):
        log(step, 0, old)
    for step in range(checkpoint + 1, checkpoint + went_on + 1):
        log(step, 1, new)
    kept = {step: one for step, one in old.items() if step <= checkpoint} | new
    went_far = went_on > lost or went_on - 1 >= (lost - 1) / 10
    if not (old or new):
        return
    run = read(tmp_path, rows)
    if not (went_far and kept):
        assert curve(run) == [(step, value) for step, (_, value) in sorted((old | new).items())]
        assert left_out(run)["reasons"] == ({"repeated": len(old.keys() & new)} if old.keys() & new else {})
        return
    assert curve(run) == [(step, value) for step, (_, value) in sorted(kept.items())]
    over = {step: line for step, (line, _) in old.items() if step > checkpoint}
    named = left_out(run)
    assert named["total"] == len(over) == len(old) + len(new) - len(run.evals)
    assert {(one["step"], one["line"]) for one in named["evaluations"]} == set(over.items())
    assert {one["reason"] for one in named["evaluations"]} == ({"superseded"} if over else set())
    told = [text for text in run.warnings if text.startswith("the run was restarted")]
    assert len(told) == 1
    assert f"restarted at step {checkpoint + 1} (" in told[0]


@pytest.mark.parametrize("checkpoint", [0, 110])
@pytest.mark.parametrize("timed", [True, False])
def test_a_loop_that_evaluates_before_it_trains_keeps_the_evaluation_at_its_restart(
    tmp_path, checkpoint, timed
):
    rows = []
    for branch, steps in enumerate([range(125), range(checkpoint, 241)]):
        for step in steps:
            time = FIRST + 1e5 * branch + step if timed else None
            rows += [evaluated(step, rate(step) + branch / 9, time)] * (step % 10 == 0)
            rows.append(trained(step, time))
    run = read(tmp_path, rows)
    assert curve(run) == [
        (step, pytest.approx(rate(step) + (step >= checkpoint) / 9)) for step in range(0, 241, 10)
    ]
    assert left_out(run)["reasons"] == {"superseded": 1 + (120 - checkpoint) // 10}
    table = tmp_path / "log.csv"
    lines = [f"{row['step']},{row.get('eval/pass_rate', '')}" for row in rows]
    table.write_text("\n".join(["step,pass_rate", *lines]))
    assert read_table(table).pass_rate_N.tolist() == [point.pass_rate for point in run.evals]


def test_restarts_of_restarts(tmp_path):
    branches = [(1, 50), (31, 60), (41, 55), (21, 90)]
    rows = [row for n, (a, b) in enumerate(branches) for s in range(a, b + 1) for row in both(s, n)]
    assert curve(read(tmp_path, rows)) == [(s, 0.3 if s > 20 else 0.0) for s in range(10, 91, 10)]
    rows = [row for n, (a, b) in enumerate(branches[:3]) for s in range(a, b + 1) for row in both(s, n)]
    found = read(tmp_path, rows)
    assert curve(found) == [(10, 0.0), (20, 0.0), (30, 0.0), (40, 0.1), (50, 0.2)]
    assert left_out(found)["reasons"] == {"superseded": 4}


def both(step, branch):
    return [trained(step), *([evaluated(step, branch / 10)] if step % 10 == 0 else [])]


def test_an_evaluator_that_repeats_its_work_is_no_restart(tmp_path):
    """It falls back and logs the same steps again, and the training goes on meanwhile."""
    rows = [trained(step) for step in range(1, 50)]
    rows += [evaluated(step, 0.1) for step in (10, 20, 30, 40)]
    rows += [evaluated(step, 0.2) for step in (10, 20, 30)]
    rows += [trained(step) for step in range(50, 60)]
    found = read(tmp_path, rows)
    assert curve(found) == [(10, 0.2), (20, 0.2), (30, 0.2), (40, 0.1)]
    assert left_out(found)["reasons"] == {"repeated": 3}
    assert any(
        "repeated at a step, of which the last one counts: steps 10" in text for text in found.warnings
    )


def test_without_training_rows_nothing_speaks_for_a_restart(tmp_path):
    rows = [evaluated(step, 0.1) for step in (10, 20, 30, 40, 50)] + [
        evaluated(step, 0.2) for step in (20, 30)
    ]
    assert curve(read(tmp_path, rows)) == [(10, 0.1), (20, 0.2), (30, 0.2), (40, 0.1), (50, 0.1)]


def test_rows_of_two_processes_at_one_time_are_no_restart(tmp_path):
    """One file after another of a pair that ran at once: the time falls as the step does."""
    rows = [row for n in range(2) for s in range(1, 41) for row in stamped(s, n)]
    found = read(tmp_path, rows)
    assert [step for step, _ in curve(found)] == [10, 20, 30, 40]
    assert left_out(found)["reasons"] == {"repeated": 4}


def stamped(step, process):
    rows = both(step, process)
    return [{**row, "time": FIRST + 10 * step} for row in rows]


def test_a_restart_in_a_file_that_has_its_newest_rows_first(tmp_path):
    rows = [
        row for n, (a, b) in enumerate([(1, 50), (31, 70)]) for s in range(a, b + 1) for row in both(s, n)
    ]
    found = curve(read(tmp_path, rows))
    assert found == [(s, 0.1 if s > 30 else 0.0) for s in range(10, 71, 10)]
    assert curve(read(tmp_path, rows[::-1])) == found
    timed = [{**row, "time": FIRST + n} for n, row in enumerate(rows)]
    random.Random(0).shuffle(timed)
    assert curve(read(tmp_path, timed)) == found


VALUES = st.one_of(
    st.floats(0, 1), st.just(math.nan), st.just(math.inf), st.sampled_from(["x", "NaN", "Infinity", True])
)


@QUICK
@given(
    cells=st.lists(st.tuples(st.integers(-1, 12), VALUES), min_size=1, max_size=40),
    with_training=st.booleans(),
)
def test_as_many_evaluations_are_kept_or_named_as_were_logged(tmp_path, cells, with_training):
    rows = [{"step": step, "eval/pass_rate": value} for step, value in cells]
    if with_training:
        rows = [row for n, one in enumerate(rows) for row in (trained(n % 9), one)]
    rows.append(evaluated(13, 0.5))
    run = read(tmp_path, rows)
    told = left_out(run)
    assert len(run.evals) + told["total"] == len(cells) + 1
    assert sum(told["reasons"].values()) == told["total"] == len(told["evaluations"])
    assert (told["total"] > 0) == any("left out" in text for text in run.warnings)


def test_the_list_is_bounded_and_the_count_is_not(tmp_path):
    rows = [evaluated(n, 0.5) if n % 2 else evaluated(n, math.nan) for n in range(1, 1001)]
    told = left_out(read(tmp_path, [*rows, evaluated(2000, 0.5)]))
    assert told["total"] == 500
    assert len(told["evaluations"]) == 100
    assert told["ending"] is None


@pytest.mark.parametrize("header", ["gpu_hours,step,pass_rate", "step,gpu_hours,pass_rate"])
def test_a_table_with_rows_of_training_is_restarted_too(tmp_path, header):
    names = header.split(",")
    rows = [(s, n) for n, (a, b) in enumerate([(1, 50), (31, 70)]) for s in range(a, b + 1)]
    cells = [
        {"gpu_hours": f"{hour}", "step": f"{s}", "pass_rate": f"{s / 100 + n / 1000}" if s % 10 == 0 else ""}
        for hour, (s, n) in enumerate(rows)
    ]
    text = "\n".join([header, *(",".join(row[name] for name in names) for row in cells)])
    (tmp_path / "log.csv").write_text(text + "\n")
    points = read_table(tmp_path / "log.csv")
    assert points.step_N.tolist() == [10, 20, 30, 40, 50, 60, 70]
    assert points.pass_rate_N.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.401, 0.501, 0.601, 0.701])
    assert dict(points.left_out.counts) == {"superseded": 2}
    assert any("steps 40 (line 41), 50 (line 51)" in text for text in points.warnings)


def training_log(*branches, every=10):
    return [
        row
        for n, steps in enumerate(branches)
        for s in steps
        for row in [trained(s), *([evaluated(s, n / 1000)] if s % every == 0 else [])]
    ]


@pytest.mark.parametrize("stray", [range(1, 3), range(1, 20), range(150, 153)])
def test_a_few_rows_of_a_run_started_again_take_nothing_away(tmp_path, stray):
    """It was started by mistake, and killed: 30 evaluations were superseded by two rows."""
    found = read(tmp_path, training_log(range(1, 301), stray))
    assert [step for step, _ in curve(found)] == list(range(10, 301, 10))
    assert "superseded" not in left_out(found)["reasons"]
    assert [step for step, _ in curve(read(tmp_path, training_log(range(1, 301), range(1, 61))))] == [
        *range(10, 61, 10)
    ]


def test_a_restart_that_would_leave_no_evaluation_waits_for_one(tmp_path):
    branches = range(1, 91), range(1, 46)
    late = [row for row in training_log(*branches, every=45) if row.get("eval/pass_rate") != 0.001]
    assert curve(read(tmp_path, late)) == [(45, 0.0), (90, 0.0)]
    assert curve(read(tmp_path, training_log(*branches, every=45))) == [(45, 0.001)]


@pytest.mark.parametrize("more", [{"n_prompts": 500, "n_samples": 4}, {"total_tokens": 9, "entropy": 0.3}])
@pytest.mark.parametrize("metric", ["eval/pass_rate", "accuracy", "of_my_own"])
def test_what_is_logged_with_evaluations_alone_is_no_sign_of_a_restart(tmp_path, more, metric):
    steps = (10, 20, 30, 40, 50, 60, 70, 80, 20, 30)
    path = tmp_path / "log.jsonl"
    rows = [{"step": s, "time": FIRST + 60 * n, metric: s / 100, **more} for n, s in enumerate(steps)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (found,) = read_source(path, ReadOptions(metric)).runs
    assert [point.step for point in found.evals] == list(range(10, 81, 10))
    assert found.config["left_out"]["reasons"] == {"repeated": 2}


@pytest.mark.parametrize("interval", [5, 10, 20])
def test_a_restart_that_logs_fewer_rows_than_before(tmp_path, interval):
    found = read(tmp_path, training_log(range(1, 101), range(60, 161, interval), every=15))
    assert [step for step, _ in curve(found)] == [15, 30, 45, *range(60, 161, math.lcm(15, interval))]
    assert any("restarted at step 60 (line 107)" in text for text in found.warnings)


def test_rows_that_are_logged_once_more_are_no_restart(tmp_path):
    found = read(tmp_path, training_log(range(1, 51), (30, 40, 50), range(51, 80), every=7))
    assert [step for step, _ in curve(found)] == list(range(7, 80, 7))
    assert left_out(found)["total"] == 0


def test_restarts_beyond_those_that_are_looked_for_are_said(tmp_path):
    branches = [range(n, n + 6) for n in range(1, 900, 4)]
    found = read(tmp_path, training_log(*branches))
    assert any("the steps of training go back too often: after 200 restarts" in t for t in found.warnings)
    assert len(curve(found)) + left_out(found)["total"] == sum(
        s % 10 == 0 for branch in branches for s in branch
    )


def test_many_restarts_of_many_metrics_take_no_time(tmp_path):
    """Every restart was looked up for every metric: 50,000 of them took a minute."""
    rows = [trained(step) for _ in range(200) for step in (1, 2, 3)]
    wide = {f"val-core/{n}/acc/mean@4": 0.5 for n in range(3000)}
    started = clock.process_time()
    found = read(tmp_path, [*rows, {"step": 4, **wide, "eval/pass_rate": 0.5}])
    assert clock.process_time() - started < 3.0  # 0.5 s; it was 4 s
    assert curve(found)[-1][0] == 4


def table(folder, rows):
    cells = [f"{s},{hour},{rate}" for hour, (s, rate) in enumerate(rows)]
    (folder / "log.csv").write_text("\n".join(["step,gpu_hours,pass_rate", *cells]) + "\n")
    return read_table(folder / "log.csv")


def test_evaluations_of_a_table_in_any_order_are_no_restart(tmp_path):
    """They were taken for rows of training: those at 40 and 80 were superseded."""
    late = [(40, 10, 20, 30), (80, 50, 60, 70), (90, 100)]
    rows = [
        row for steps in late for row in [*((s, "") for s in sorted(steps)), *((s, s / 200) for s in steps)]
    ]
    found = table(tmp_path, rows)
    assert sorted(found.step_N.tolist()) == list(range(10, 101, 10))
    assert not found.left_out


@pytest.mark.parametrize("checkpoint", range(30, 42))
def test_a_table_with_one_row_for_training_and_evaluation(tmp_path, checkpoint):
    branches = range(1, 51), range(checkpoint + 1, 71)
    rows = [(s, (s + n) / 200 if s % 10 == 0 else "") for n, b in enumerate(branches) for s in b]
    found = table(tmp_path, rows)
    assert found.step_N.tolist() == list(range(10, 71, 10))
    assert found.pass_rate_N.tolist() == [(s + (s > checkpoint)) / 200 for s in range(10, 71, 10)]
