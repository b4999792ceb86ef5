"""The rows in files of W&B: values, steps, names, and which files are one run."""

import json
import math
import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import wandb
from hostile_logs import everything
from read_logs import read_logs
from wandb_files import header, history, pb, read_one, values, written

from scalerl import InputError, limits
from scalerl.ingest.formats.format import Unread
from scalerl.ingest.formats.wandb_offline import FORMAT
from scalerl.ingest.load import read_source
from scalerl.ingest.options import ReadOptions


def test_values_names_times_and_config(run):
    log = read_one(run)
    assert (log.format, log.name, log.source, log.notes) == ("wandb", "a name", str(run), ())
    assert values(log, "loss") == {n: 1 / (n + 1) for n in range(60)}
    assert values(log, "a.b") == {n: n for n in range(60)}
    assert values(log, "a.c.d") == {n: -n for n in range(60)}
    assert set(log.names) == set(log.metrics) == {"loss", "a.b", "a.c.d"}
    assert log.config == {"lr": 0.1}
    time_N = log.metrics["loss"].time_N
    assert (np.diff(time_N) >= 0).all()
    assert abs(time_N[0] - run.stat().st_mtime) < 600


def test_only_what_is_wanted_is_kept_and_all_is_named(run):
    log = read_one(run, lambda name: name == "a.b")
    assert list(log.metrics) == ["a.b"]
    assert set(log.names) == {"loss", "a.b", "a.c.d"}


def test_what_is_no_finite_number_is_passed_over(logged, tmp_path):
    row = {
        **{"nan": math.nan, "inf": math.inf, "less": -math.inf, "text": "1.5", "none": None, "true": True},
        **{
            "list": [1, 2],
            "array": np.arange(3),
            "single": np.float32(0.1),
            "whole": np.int64(7),
            "big": 2**60,
        },
        **{"histogram": wandb.Histogram([1.0, 2.0, 4.0]), "table": wandb.Table(columns=["a"], data=[[1]])},
        "image": wandb.Image(np.zeros((4, 4, 3), dtype=np.uint8)),
        "in": {"image": wandb.Image(np.zeros((4, 4, 3), dtype=np.uint8)), "number": 3},
        "é - 试\u2028 \t": 1.25,
        "long" * 60: 2.5,
    }
    log = read_one(logged(tmp_path, [row, row, {"loss": 1}]))
    found = {name: list(series.value_N) for name, series in log.metrics.items()}
    assert found == {
        **{
            "single": [float(np.float32(0.1))] * 2,
            "whole": [7] * 2,
            "big": [2.0**60] * 2,
            "in.number": [3] * 2,
        },
        **{"é - 试\u2028 \t": [1.25] * 2, "long" * 60: [2.5] * 2, "loss": [1]},
    }
    assert set(log.names) == set(found)
    assert log.notes == ()


def test_config_as_it_is_at_the_end(logged, tmp_path):
    config = {"a": 1, "model": {"path": "Qwen/x", "deep": {"er": [1, 2]}}, "none": None}
    log = read_one(logged(tmp_path, [{"x": 1}], config=config))
    assert log.config == {"a": 1, "model.path": "Qwen/x", "model.deep.er": [1, 2], "none": None}
    removed = pb.Record()
    removed.config.remove.add(key="b")
    removed.config.update.add(nested_key=["c", "d"], value_json="2")
    removed.config.update.add(nested_key=["_wandb", "x"], value_json="2")
    path = written(
        tmp_path / "run-x.wandb", header(b=1, c={"e": 3}), removed.SerializeToString(), history(0, {"m": 1})
    )
    assert read_one(path).config == {"c.e": 3, "c.d": 2}


@pytest.mark.parametrize(
    "name", ["global_step", "train/global_step", "trainer/global_step", "training_step", "step"]
)
def test_the_trainers_own_steps_are_preferred(logged, tmp_path, name):
    rows = [{"before": 1}]  # an evaluation before the first step
    for n in range(1, 9):
        rows += [{"loss": n, name: 5 * n}, {"eval": n}]
    log = read_one(logged(tmp_path, rows))
    assert values(log, "loss") == values(log, "eval") == {5 * n: n for n in range(1, 9)}
    assert values(log, "before") == {0: 1}
    assert log.notes == (
        f"the step is '{name}', and not W&B's count of calls; 9 rows without it are at the one before them",
    )


def test_a_count_under_two_names_is_one(logged, tmp_path):
    rows = []  # as OpenRLHF logs, without a step of W&B's
    for n in range(1, 7):
        rows.append({"train/rollout/reward_mean": 0.1 * n, "train/global_step": n})
        if n % 2 == 0:
            rows.append({"eval/eval_math_pass1": 0.1 * n, "eval/global_step": n})
    (run,) = read_source(logged(tmp_path, rows)).runs
    assert run.config["source"]["trainer"] == "openrlhf"
    assert [point.step for point in run.evals] == [2, 4, 6]
    assert [row["step"] for row in run.steps()] == [1, 2, 3, 4, 5, 6]
    assert "the step is 'eval/global_step', and not W&B's count of calls" in run.warnings


def test_updates_of_verl_are_no_steps(logged, tmp_path):
    # Its fully asynchronous trainer: four updates to a version of the weights, at which all else is logged.
    rows = [{"val-core/math/acc/mean@4": 0.1, "rollouter/validate_time": 9.0}]
    for n in range(1, 7):
        rows.append({"timing_s/step": 100.0, "perf/total_num_tokens": 50, "training/global_step": 4 * n})
        rows[-1] |= {"val-core/math/acc/mean@4": 0.1 * n} if n % 2 == 0 else {}
    (run,) = read_source(logged(tmp_path, rows, list(range(7)))).runs
    assert [(point.step, point.device_seconds.train, point.tokens.generated) for point in run.evals] == [
        (0, 0, 0),
        (2, 200, 100),
        (4, 400, 200),
        (6, 600, 300),
    ]


def test_completions_of_open_instruct_are_no_steps(logged, tmp_path):
    rows = []
    for n in range(1, 7):
        rows.append({"training_step": n, "global_step": 512 * n, "episode": 512 * n, "time/total": 100.0})
        rows[-1] |= {"val/num_step_tokens": 50, "eval/pass_at_1": 0.1 * n} if n % 2 == 0 else {}
    (run,) = read_source(logged(tmp_path, rows, list(range(1, 7)))).runs
    assert run.config["source"]["trainer"] == "open-instruct"
    found = [(point.step, point.device_seconds.train, point.samples) for point in run.evals]
    assert found == [(2, 200, 1024), (4, 400, 2048), (6, 600, 3072)]


def test_updates_of_slime_are_no_steps(logged, tmp_path):
    rows = [{"eval/aime": 0.1, "eval/step": 0}]
    for n in range(6):
        rows += [{"rollout/raw_reward": 0.3, "rollout/step": n}]
        rows += [{"train/pg_loss": 0.1, "train/step": 2 * n + update} for update in range(2)]
        rows += [{"perf/step_time": 100.0, "rollout/step": n}]
        rows += [{"eval/aime": 0.1 * n, "eval/step": n}] if n % 2 else []
    (run,) = read_source(logged(tmp_path, rows)).runs
    found = [(point.step, point.device_seconds.train) for point in run.evals]
    assert found == [(0, 0), (1, 100), (3, 300), (5, 500)]
    assert any(note.startswith("the step is 'eval/step', and not W&B's count") for note in run.warnings)


@pytest.mark.parametrize(
    "rows",
    [
        [{"loss": n, "step": n % 10} for n in range(40)],  # of an epoch
        [{"loss": n} | ({"global_step": n} if n % 10 == 0 else {}) for n in range(40)],  # in few rows
        [{"loss": n, "step": n + 0.5} for n in range(40)],
        [{"loss": n, "env_step": 100 * n} for n in range(40)],
    ],
)
def test_a_count_that_does_not_go_with_the_rows_is_none_of_steps(logged, tmp_path, rows):
    log = read_one(logged(tmp_path, rows))
    assert values(log, "loss") == {n: n for n in range(40)}
    assert log.notes == ()


def test_two_counts_of_one_trainer_are_one(logged, tmp_path):
    rows = []
    for n in range(1, 6):
        rows += [{"train/loss": n, "train/global_step": n}, {"eval/acc": n, "eval/global_step": n}]
    log = read_one(logged(tmp_path, rows))
    assert values(log, "train/loss") == values(log, "eval/acc") == {n: n for n in range(1, 6)}


def test_the_count_of_steps_need_not_be_wanted(logged, tmp_path):
    rows = [{"loss": n, "more": 1, "train/global_step": 10 * n} for n in range(5)]
    log = read_one(logged(tmp_path, rows), lambda name: name == "loss")
    assert list(log.metrics) == ["loss"]
    assert values(log, "loss") == {10 * n: n for n in range(5)}
    assert set(log.names) == {"loss", "more", "train/global_step"}


def test_steps_that_the_trainer_gave(logged, tmp_path):
    log = read_one(logged(tmp_path, [{"loss": n} for n in range(5)], steps=[0, 10, 20, 35, 50]))
    assert values(log, "loss") == {0: 0, 10: 1, 20: 2, 35: 3, 50: 4}


def resumed(logged, folder, *parts):
    """A run of several folders."""
    for n, (rows, steps) in enumerate(parts):
        if n:
            time.sleep(1.1)  # the folders are named by the second
        logged(folder, rows, steps, id="same", resume="allow", config={"part": n, f"only{n}": n})
    return folder


def test_a_resumed_run_is_one(logged, tmp_path):
    first = [{"loss": n, "train/global_step": n} for n in range(10)]
    second = [{"loss": 100 + n, "train/global_step": n} for n in range(7, 12)]
    log = read_one(resumed(logged, tmp_path, (first, None), (second, None)))
    assert values(log, "loss") == {n: n for n in range(7)} | {n: 100 + n for n in range(7, 12)}
    assert log.config == {"part": 1, "only0": 0, "only1": 1}
    assert any("the run was restarted at step 7" in note for note in log.notes)
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    folders[0].rename(tmp_path / "wandb" / "run-zz")  # the order is that of time, not of names
    assert values(read_one(tmp_path), "loss") == values(log, "loss")


def test_a_resumed_run_that_counts_anew(logged, tmp_path):
    rows = [{"loss": n} for n in range(4)]
    log = read_one(resumed(logged, tmp_path, (rows, None), (rows, None)))
    assert values(log, "loss") == {n: n % 4 for n in range(8)}
    assert log.notes == ("the resumed run counts from 0 again: its rows were put after step 3",)


def test_a_resumed_run_whose_trainer_gives_the_steps(logged, tmp_path):
    rows = [{"loss": n} for n in range(4)]
    log = read_one(resumed(logged, tmp_path, (rows, [0, 5, 10, 15]), (rows, [0, 5, 7, 9])))
    assert values(log, "loss") == {0: 0, 5: 1, 7: 2, 9: 3}


def test_folders_hold_each_run_once(logged, tmp_path):
    paths = [logged(tmp_path, [{"loss": n}], id=f"run{n}", name=f"name {n}") for n in range(3)]
    wandb_folder = tmp_path / "wandb"
    assert (wandb_folder / "latest-run").is_symlink()
    (wandb_folder / "run-loop").symlink_to(wandb_folder)
    (wandb_folder / "wandb").symlink_to(wandb_folder)
    (wandb_folder / "run-itself").symlink_to("run-itself")
    (wandb_folder / "run-gone").symlink_to("nowhere")
    (wandb_folder / "run-empty").mkdir()
    for folder in (tmp_path, wandb_folder):
        assert FORMAT.recognises(folder)
        logs = read_logs(FORMAT, folder, everything)
        assert [(log.name, values(log, "loss")) for log in logs] == [(f"name {n}", {0: n}) for n in range(3)]
        assert [log.source for log in logs] == [
            str(folder / path.relative_to(tmp_path if folder == tmp_path else wandb_folder)) for path in paths
        ]
    for path in (paths[1], paths[1].parent):
        assert FORMAT.recognises(path)
        assert read_one(path).name == "name 1"
    assert read_one(wandb_folder / "latest-run").name == "name 2"


def test_links_below_a_folder_are_not_followed(tmp_path):
    outside = written(tmp_path / "out" / "run-x.wandb", header(), history(0, {"loss": 1}))
    runs = tmp_path / "project" / "wandb"
    own = written(runs / "run-1-own" / "run-own.wandb", header(), history(0, {"loss": 2}))
    (runs / "run-2-x").symlink_to(outside.parent)
    (own.parent / "run-y.wandb").symlink_to(outside)
    assert [values(log, "loss") for log in read_logs(FORMAT, runs.parent, everything)] == [{0: 2}]
    own.unlink()
    assert not FORMAT.recognises(runs.parent)
    with pytest.raises(InputError, match="symbolic links are left out"):
        read_logs(FORMAT, runs.parent, everything)
    other = tmp_path / "other"
    other.mkdir()
    (other / "wandb").symlink_to(runs)
    written(runs / "run-3.wandb", header(), history(0, {"loss": 3}))
    assert not FORMAT.recognises(other)
    # A link that is named itself is the user's wish.
    assert values(read_one(other / "wandb"), "loss") == {0: 3}


def test_a_broken_run_does_not_hide_the_others(logged, tmp_path):
    logged(tmp_path, [{"loss": 1}], id="good")
    broken = tmp_path / "wandb" / "run-20200101_000000-bad" / "run-bad.wandb"
    broken.parent.mkdir()
    broken.touch()
    log, unread = FORMAT.read(tmp_path, everything)
    assert isinstance(unread, Unread)
    assert values(log, "loss") == {0: 1}
    assert (unread.run, unread.path) == ("bad", str(tmp_path))
    assert unread.reason.startswith(f"{broken}: the file is empty")


def test_a_file_with_no_rows(logged, tmp_path):
    log = read_one(logged(tmp_path, []))
    assert (log.metrics, log.names, log.notes) == ({}, (), ("no numbers were logged",))


def test_the_summary_stands_in_where_there_is_no_history(tmp_path):
    record = pb.Record(num=3)
    for key, value in {"acc": 0.5, "_step": 70, "_timestamp": 1.7e9, "text": "a"}.items():
        record.summary.update.add(nested_key=[key], value_json=json.dumps(value))
    path = written(tmp_path / "run-x.wandb", header(), record.SerializeToString())
    log = read_one(path)
    assert values(log, "acc") == {70: 0.5}
    assert list(log.metrics["acc"].time_N) == [1.7e9]
    assert log.notes == ("run-x.wandb has no history, only a summary: one value of each metric",)
    written(path, header(), record.SerializeToString(), history(0, {"loss": 1}))
    assert set(read_one(path).metrics) == {"loss"}


def test_no_numbers_of_a_nested_table_are_left_out_by_name(tmp_path):
    texts = ["0.5"] * 6 + ["-Infinity", "NaN", '"-Infinity"', "1" + "0" * 400, '"text"', "null", "[]", '""']
    path = tmp_path / "run-x.wandb"
    written(path, header(), *(history(n, {"eval": f'{{"reward": {t}}}'}) for n, t in enumerate(texts)))
    (run,) = read_source(path, ReadOptions("eval.reward")).runs
    assert len(run.evals) == 6
    assert run.config["left_out"]["reasons"] == {"infinite": 3, "NaN": 1, "not a number": 1}


def test_a_run_that_its_reader_refuses_is_named_as_one_that_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "VALUES", replace(limits.VALUES, most=20))
    for n in range(2):
        record = pb.Record.FromString(header(f"id{n}"))
        record.run.display_name = f"seed {n}"
        rows = (history(s, {"eval_reward": 0.5}) for s in range(6 if n else 60))
        file = tmp_path / "wandb" / f"run-{n}" / f"run-{n}.wandb"
        file.parent.mkdir(parents=True)
        written(file, record.SerializeToString(), *rows)
    found = read_source(tmp_path / "wandb")
    assert [run.name for run in found.runs] == ["seed 1"]
    assert [one.run for one in found.unread] == ["seed 0"]
    with pytest.raises(InputError, match="values of metrics"):
        read_source(tmp_path / "wandb", ReadOptions(run="seed 0"))


def test_values_nested_in_one_piece_as_older_versions_have_them(tmp_path):
    record = pb.Record(num=3)
    media = {"_type": "histogram", "packed": 3}
    for key, value in {
        "n": {"x": 1, "y": {"z": 2.5, "h": media}},
        "h": media,
        "loss": 3,
        "_wandb": {"x": 1},
        "_runtime": 5,
    }.items():
        record.history.item.add(key=key, value_json=json.dumps(value))
    record.history.step.num = 12
    log = read_one(written(tmp_path / "run-x.wandb", header(), record.SerializeToString()))
    assert {name: values(log, name) for name in log.names} == {
        "n.x": {12: 1},
        "n.y.z": {12: 2.5},
        "loss": {12: 3},
    }
    assert list(log.metrics["loss"].time_N) == [1_700_000_005]


def test_many_names_are_bounded(tmp_path):
    rows = [history(n, {f"m{n}-{k}": k for k in range(300)} | {"loss": n}) for n in range(60)]
    log = read_one(written(tmp_path / "run-x.wandb", header(), *rows), lambda name: name == "loss")
    assert len(log.names) <= 5001
    assert len(log.metrics["loss"]) == 60


def test_a_long_file_takes_little_memory(tmp_path, capsys):
    row = history(0, {f"metric/{k}": 1 / 7 + k for k in range(10)}, _step=1234567)
    rows = (row.replace(b"1234567", b"%d" % (1_000_000 + n)) for n in range(20_000))
    path = written(tmp_path / "run-long.wandb", header(), *rows)
    start = time.process_time()
    log = read_one(path)
    speed = len(log.metrics["metric/3"]) / (time.process_time() - start)
    with capsys.disabled():
        print(f" {speed:.0f} rows/s ", end="")
    tracemalloc.start()
    try:
        log = read_one(path, lambda name: name == "metric/3")
        peak = tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(log.metrics["metric/3"].step_N, 1_000_000 + np.arange(20_000))
    assert len(log.names) == 10
    assert path.stat().st_size / 2**20 > 6.8
    assert peak < 6  # MiB: three numbers a row, of 32 bytes each until they are arrays
