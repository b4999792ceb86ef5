"""What nobody would log: every format meets it through the commands, as users do."""

import json
import os
import pickle
import shutil
import socket
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from hostile_logs import alarm

from scalerl.cli.main import main
from scalerl.ingest.formats.recognise import formats
from scalerl.record.reader import RunRecord
from scalerl.view import write_report

NAMES = [one.name for one in formats()]
NOBODY = 65534
HOSTILE = {
    "../../outside": "outside",
    "/etc/outside": "etc_outside",
    "..": "run",
    "CON": "CON",
    "con": "con-2",
    "trailing. . .": "trailing",
    "a\\b:c\0d": "a_b_c_x00d",
    "字" * 300: "字" * 33 + "_33c3f3dd",
    "\ud800half": "ud800half",
    "\u202egnp.exe": "u202egnp.exe",
    "\x1b[31mred": "x1b_31mred",
    "<script>alert(1)</script>": "script_alert_1_script",
    "x" * 10_000: "x" * 100 + "_d5ee17e2",  # BLAKE2 of the whole name
}
"""Names of runs, and what folders they get."""


def rows(last=25, **more):
    return [
        {"step": step, "val-core/a/acc/mean@4": 0.3 + 0.3 * step / (step + 8), **more} for step in range(last)
    ]


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def refused(capsys, *arguments):
    """The line with which a command ends that was given what it cannot take."""
    with alarm(60):
        assert main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("format", [None, *NAMES])
def test_what_is_neither_a_file_nor_a_folder_is_not_waited_for(tmp_path, monkeypatch, capsys, format):
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        options = [] if format is None else ["--format", format]
        for source in ("pipe", "socket", "/dev/zero"):
            error = refused(capsys, "ingest", source, "-o", "run", *options)
            assert f"{source}: a pipe, a socket or a device" in error
    assert "/dev/zero: a device" in refused(capsys, "fit", "/dev/zero")
    assert not Path("run").exists()


@pytest.mark.parametrize("format", NAMES)
def test_pipes_in_folders_are_not_waited_for(tmp_path, capsys, format):
    folder = tmp_path / "source"
    for name in (
        *(
            "run.wandb",
            "run-1/run-1.wandb",
            "wandb/run-2/run.wandb",
            "events.out.tfevents.1",
            "metrics.jsonl",
        ),
        *("trainer/metrics.jsonl", "trainer_state.json", "checkpoint-5/trainer_state.json", "meta.yaml"),
        *("metrics/reward", "params/lr", "project.db", "project.db-journal", "a.parquet", "config.json"),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(folder / name)
    refused(capsys, "ingest", folder, "-o", tmp_path / "run")
    refused(capsys, "ingest", folder, "-o", tmp_path / "run", "--format", format)


@pytest.mark.parametrize("format", [None, *NAMES])
def test_links_that_go_round(tmp_path, capsys, format):
    options = [] if format is None else ["--format", format]
    (tmp_path / "file").symlink_to("file")
    assert "symbolic links" in refused(capsys, "ingest", tmp_path / "file", "-o", tmp_path / "run", *options)
    folder = tmp_path / "wandb" / "run-1"
    folder.mkdir(parents=True)
    for name in ("wandb", "run-2", "checkpoint-1", "metrics", "trainer"):
        (folder / name).symlink_to(folder)
    for name in ("trainer_state.json", "meta.yaml", "metrics.jsonl", "a.wandb", "a.db", "a.tfevents"):
        (folder / name).symlink_to(name)
    refused(capsys, "ingest", folder, "-o", tmp_path / "run", *options)
    refused(capsys, "ingest", tmp_path, "-o", tmp_path / "run", *options)


@contextmanager
def nobody():
    """Within, this process may not do what root may."""
    if os.geteuid():
        yield
        return
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.fixture
def open_path():
    """A folder that anybody may enter, which that of a test is not."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    for folder, _, _ in os.walk(path):
        Path(folder).chmod(0o755)
    shutil.rmtree(path)


@pytest.mark.parametrize("mode", [0o000, 0o444])
def test_folders_that_may_not_be_entered(open_path, capsys, mode):
    for name in ("evals.jsonl", "metrics.jsonl", "trainer_state.json", "project.db"):
        write(open_path / "closed" / name, rows())
    write(open_path / "log.jsonl", rows()).chmod(0o000)
    run_open = open_path / "runs" / "open" / "metrics.jsonl"
    write(run_open, rows())
    for name in ("metrics.jsonl", "trainer_state.json", "meta.yaml", "run-1/a.wandb"):
        write(open_path / "runs" / "closed" / name, rows())
    output = open_path / "output"
    output.mkdir(mode=0o755)
    output.chmod(0o777)
    (open_path / "closed").chmod(mode)
    (open_path / "runs" / "closed").chmod(mode)
    with nobody():
        for source in ("closed", "closed/metrics.jsonl", "log.jsonl"):
            for command in (
                ["ingest", open_path / source, "-o", output / "run"],
                ["fit", open_path / source],
            ):
                error = refused(capsys, *command)
                assert "Permission denied" in error
                assert str(open_path) in error
        # What may be read beside it is read all the same.
        assert main(["ingest", str(open_path / "runs"), "-o", str(output / "run")]) == 0, capsys.readouterr()
        capsys.readouterr()
        error = refused(capsys, "ingest", run_open, "-o", open_path / "mine")
        assert "Permission denied" in error
    assert len(RunRecord.read(output / "run").evals) == 25


class Bomb:
    """A pickle that leaves a mark where it is loaded."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("format", [None, *NAMES])
def test_pickles_are_never_loaded(tmp_path, capsys, format):
    mark = tmp_path / "mark"
    bomb = pickle.dumps(Bomb(mark))
    folder = tmp_path / "source"
    for name in (
        *("run.pkl", "run.wandb", "wandb/run-1/a.wandb", "wandb/run-1/files/media.pkl", "optimizer.pt"),
        *("checkpoint-5/trainer_state.json", "checkpoint-5/optimizer.pt", "checkpoint-5/rng_state.pth"),
        *("checkpoint-5/training_args.bin", "metrics.jsonl", "metrics/reward", "artifacts/model.pkl"),
        *("project.db", "a.parquet", "events.out.tfevents.1", "config.json", "params/lr", "meta.yaml"),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bomb)
    options = [] if format is None else ["--format", format]
    for source in (
        folder,
        folder / "run.pkl",
        folder / "a.parquet",
        folder / "checkpoint-5" / "optimizer.pt",
    ):
        refused(capsys, "ingest", source, "-o", tmp_path / "run", *options)
    assert not mark.exists()
    pickle.loads(bomb)
    assert mark.exists()  # it would have


def test_names_of_runs_stay_in_the_folder_and_in_their_place_on_the_page(tmp_path, capsys):
    output = tmp_path / "deep" / "runs"
    log = write(tmp_path / "log.jsonl", [row for name in HOSTILE for row in rows(12, run_id=name)])
    assert main(["ingest", str(log), "-o", str(output)]) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert sorted(path.name for path in output.iterdir()) == sorted(HOSTILE.values())
    assert sorted(path.name for path in tmp_path.rglob("evals.jsonl")) == ["evals.jsonl"] * len(HOSTILE)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["runs"]
    for folder in HOSTILE.values():
        write_report(output / folder, out=tmp_path / "page.html")
        page = (tmp_path / "page.html").read_text()
        assert "<script>alert" not in page
        assert "\u202e" not in page


def test_names_of_metrics_and_values_of_configs_on_the_page(tmp_path, capsys):
    metric = "val-core/<img src=x onerror=alert(1)>\u202e\ud800/acc/mean@4"
    lines = [{"step": row["step"], metric: row["val-core/a/acc/mean@4"]} for row in rows()]
    log = write(tmp_path / "<b>\udcff.jsonl", lines)
    assert main(["ingest", str(log), "-o", str(tmp_path / "run")]) == 0
    assert "\\u202e\\ud800" in capsys.readouterr().out
    write_report(tmp_path / "run", out=tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<img src=x" not in page
    assert main(["fit", str(log), "--y", metric]) == 0


@pytest.mark.parametrize("step", [-5, 0.5, 1e300, 2**60 + 1])
def test_steps_that_are_no_counts_are_left_out_and_that_is_said(tmp_path, capsys, step):
    odd = {"step": step, "val-core/a/acc/mean@4": 0.1}
    log = write(tmp_path / "log.jsonl", sorted([*rows(), odd], key=lambda row: row["step"]))
    assert main(["ingest", str(log), "-o", str(tmp_path / "run")]) == 0
    assert "1 value left out, whose step is not a whole number" in capsys.readouterr().err
    assert [point.step for point in RunRecord.read(tmp_path / "run").evals] == list(range(25))


def test_nothing_is_written_where_one_of_several_runs_has_no_place(tmp_path, capsys):
    log = write(tmp_path / "log.jsonl", [row for name in "abc" for row in rows(run_id=name)])
    (tmp_path / "runs" / "b").mkdir(parents=True)
    (tmp_path / "runs" / "b" / "mine").touch()
    assert "exists already" in refused(capsys, "ingest", log, "-o", tmp_path / "runs")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["b"]
    assert "File name too long" in refused(capsys, "ingest", log, "-o", tmp_path / ("x" * 300))


@pytest.mark.parametrize("content", ["json", "csv", "pkl", "wandb", "db", "parquet", "txt", ""])
def test_the_end_of_a_name_tells_nothing(tmp_path, capsys, content):
    log = write(tmp_path / f"log.{content}", rows())
    assert main(["ingest", str(log), "-o", str(tmp_path / "run")]) == (2 if content == "wandb" else 0)


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 25, "val-core/a/acc/mean@4": NaN}',
        '{"step": 25, "val-core/a/acc/mean@4": -Infinity}',
        '{"step": 25, "val-core/a/acc/mean@4": 1e999}',
        '{"step": 25, "val-core/a/acc/mean@4": "0.5"}',
        '{"step": 25, "val-core/a/acc/mean@4": [0.5]}',
        '{"step": 25, "val-core/a/acc/mean@4": true}',
        '{"step": 25, "val-core/a/acc/mean@4": ' + "9" * 400 + "}",
        '{"step": null, "val-core/a/acc/mean@4": 0.5}',
        '{"step": "25", "val-core/a/acc/mean@4": 0.5}',
        '{"step": 24, "step": 24, "val-core/a/acc/mean@4": 0.9, "val-core/a/acc/mean@4": null}',
        '{"step": 25, "": 0.5, "\\u0000": 1, "' + "n" * 10_000 + '": 2}',
    ],
)
def test_cells_that_are_no_numbers_are_passed_over(tmp_path, line):
    log = write(tmp_path / "log.jsonl", rows())
    log.write_bytes(b"\xef\xbb\xbf" + log.read_bytes() + line.encode() + b"\r\n")
    assert main(["ingest", str(log), "-o", str(tmp_path / "run")]) == 0
    assert len(RunRecord.read(tmp_path / "run").evals) == 25
