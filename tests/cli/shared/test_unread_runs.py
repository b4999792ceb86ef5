"""A run that cannot be read costs only itself: in a folder, in a log of several, and among several paths."""

import json
import shutil

import example_files
import numpy as np
import pytest
from event_files import START, event
from serve_client import serving, settled
from wandb_files import framed, header, history, pb

from scalerl import InputError, load_run
from scalerl.cli.main import main
from scalerl.curve import LOG_LOGISTIC, Curve

TRUTH = Curve(LOG_LOGISTIC, 0.61, 1.9, 20.0, 0.2)


def rates(seed, n=30):
    rng = np.random.default_rng(seed)
    steps = 2 * np.arange(1, n + 1)
    return dict(
        zip(
            steps.tolist(), (TRUTH(2.0 * np.arange(1, n + 1)) + rng.normal(0, 0.004, n)).tolist(), strict=True
        )
    )


def put(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())


def wandb_runs(folder):
    """Two runs, one of supervised training, one that crashed before its first row, one damaged."""
    for seed in range(2):
        rows = (history(s, {"eval_reward": r, "loss": 0.1}) for s, r in rates(seed).items())
        put(folder / "wandb" / f"run-2026-{seed}" / f"run-{seed}.wandb", framed([named(seed), *rows]))
    rows = (history(s, {"loss": 0.1}) for s in range(9))
    put(folder / "wandb" / "run-2026-sft" / "run-sft.wandb", framed([named("sft"), *rows]))
    put(folder / "wandb" / "run-2026-crash" / "run-crash.wandb", framed([named("crash")]))
    put(folder / "wandb" / "run-2026-torn" / "run-torn.wandb", b"")
    return folder / "wandb", {"sft", "crash", "torn"}


def named(name):
    record = pb.Record.FromString(header(f"{name}"))
    record.run.display_name = f"{name}"
    return record.SerializeToString()


def trainer_states(folder):
    for seed in range(2):
        rows = [{"step": s, "eval_reward": r, "loss": 0.1} for s, r in rates(seed).items()]
        put(folder / f"r{seed}" / "trainer_state.json", json.dumps({"log_history": rows}))
    put(folder / "sft" / "trainer_state.json", json.dumps({"log_history": [{"step": 1, "loss": 0.1}]}))
    put(folder / "torn" / "trainer_state.json", '{"log_history": [{"st')
    return folder, {"sft", "torn"}


def tensorboards(folder):
    for seed in range(2):
        events = [event("eval/reward", s, r, time=1.7e9 + s) for s, r in rates(seed).items()]
        put(folder / f"r{seed}" / "events.out.tfevents.1", b"".join([START, *events]))
    put(folder / "sft" / "events.out.tfevents.1", START + event("train/loss", 1, 0.5))
    put(folder / "torn" / "events.out.tfevents.1", b"\0" * 40)
    return folder, {"sft", "torn"}


def metrics_jsonl(folder):
    for seed in range(2):
        rows = [json.dumps({"step": s, "eval/pass_rate": r}) for s, r in rates(seed).items()]
        put(folder / f"r{seed}" / "metrics.jsonl", "\n".join(rows) + "\n")
    put(folder / "sft" / "metrics.jsonl", '{"step": 1, "train/loss": 0.1}\n')
    put(folder / "torn" / "metrics.jsonl", '{"step": 1, "eval/pass_rate": 0.1}\nnonsense\n{"step": 2}\n')
    return folder, {"sft", "torn"}


def mlruns(folder):
    for name in ("r0", "r1", "sft", "torn"):
        put(folder / "1" / "meta.yaml", "name: x\n")
        put(folder / "1" / name / "meta.yaml", f"run_id: {name}\nrun_name: {name}\nlifecycle_stage: active\n")
    for seed in range(2):
        lines = [f"{1_700_000_000_000 + s} {r} {s}\n" for s, r in rates(seed).items()]
        put(folder / "1" / f"r{seed}" / "metrics" / "eval_reward", "".join(lines))
    put(folder / "1" / "sft" / "metrics" / "loss", "1700000000000 0.1 1\n")
    put(folder / "1" / "torn" / "metrics" / "eval_reward", "nonsense\n1700000000000 0.1 1\n")
    return folder, {"sft", "torn"}


FOLDERS = [wandb_runs, trainer_states, tensorboards, metrics_jsonl, mlruns]


@pytest.mark.parametrize("make", FOLDERS)
def test_ingest_and_report_and_backtest_go_on_with_the_rest(tmp_path, capsys, make):
    folder, unread = make(tmp_path / "logs")
    assert main(["ingest", str(folder), "-o", str(tmp_path / "runs"), "--json"]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert len(told["runs"]) == 2
    assert err == ""
    assert {one["run"] for one in told["unread"]} == unread
    assert all(one["reason"] and one["path"] == str(folder) for one in told["unread"])
    assert len(list((tmp_path / "runs").iterdir())) == 2
    for words in (["report", "-o", str(tmp_path / "page.html")], ["backtest", "--at", "1/2"], ["compare"]):
        assert main([words[0], str(folder), *words[1:], "--x", "steps"]) == 0
        lines = [line for line in capsys.readouterr().err.splitlines() if "left out: " in line]
        assert len(lines) == len(unread)
        assert all(any(f"run '{name}': " in line for line in lines) for name in unread)
        assert main([words[0], str(folder), *words[1:], "--x", "steps", "--json"]) == 0
        assert {one["run"] for one in json.loads(capsys.readouterr().out)["unread"]} == unread
    with pytest.raises(InputError, match="holds 2 runs; choose one with --run"):
        load_run(folder)


@pytest.mark.parametrize("make", FOLDERS)
def test_where_none_can_be_read_it_is_an_error(tmp_path, capsys, make):
    folder, _ = make(tmp_path / "logs")
    for sound in [one for one in folder.rglob("*") if one.name in ("r0", "r1", "run-2026-0", "run-2026-1")]:
        shutil.rmtree(sound)
    for words in (["ingest", "-o", str(tmp_path / "out")], ["compare"], ["backtest"], ["report"]):
        assert main([words[0], str(folder), *words[1:]]) == 2
        err = capsys.readouterr().err
        assert err.startswith("scalerl: ")
        assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def broken(folder):
    put(folder / "runs" / "torn" / "evals.jsonl", "nonsense\nmore\n")
    put(folder / "runs" / "begun" / "config.json", '{"schema": 1}')
    put(
        folder / "runs" / "young" / "evals.jsonl",
        '{"step": 1, "pass_rate": 0.2, "device_seconds": {"generate": 1, "train": 1, "idle": 0}}\n',
    )
    return folder


@pytest.mark.parametrize("as_glob", [False, True])
def test_a_comparison_of_run_folders_goes_on_with_the_rest(tmp_path, monkeypatch, capsys, as_glob):
    monkeypatch.chdir(broken(example_files.write(tmp_path)))
    paths = sorted(f"runs/{one.name}" for one in (tmp_path / "runs").iterdir()) if as_glob else ["runs"]
    assert main(["compare", *paths, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert sum(told["runs"].values()) == 5
    assert {one["path"] for one in told["unread"]} == {"runs/torn", "runs/begun", "runs/young"}
    assert main(["compare", *paths]) == 0
    err = capsys.readouterr().err
    assert "warning: left out: runs/torn: " in err
    assert "warning: left out: runs/begun: the run has no evaluation yet" in err
    assert "runs/young: " in err
    assert "a curve needs at least 4" in err


def test_fewer_than_two_are_no_comparison_and_a_path_that_is_nowhere_is_an_error(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(broken(example_files.write(tmp_path)))
    assert main(["compare", "runs/mine", "runs/torn"]) == 2
    assert "runs/torn" in capsys.readouterr().err
    assert main(["compare", "runs/mine", "runs/young"]) == 3
    assert main(["compare", "runs/mine", "runs/a-seed0", "runs/nowhere"]) == 2
    assert "runs/nowhere" in capsys.readouterr().err
    for command in ("backtest", "report"):
        assert main([command, "runs/mine", "runs/nowhere"]) == 2
        capsys.readouterr()


def test_where_no_run_can_be_read_the_option_that_tells_why_is_named(tmp_path, capsys):
    for name in ("a", "b"):
        put(tmp_path / name / "events.out.tfevents.1", START + event("train/loss", 1, 0.5))
    assert main(["fit", str(tmp_path)]) == 2
    assert "nor can any other of the 2 runs be read (--run NAME says why)" in capsys.readouterr().err


def test_serve_shows_the_rest_of_a_folder(tmp_path):
    wandb_runs(tmp_path / "logs")
    with serving(tmp_path / "logs") as client:
        settled(client)
        rows = {row["name"]: row for row in client.get("/api/runs").json()["runs"]}
    assert {name for name, row in rows.items() if not row["error"]} == {"0", "1"}
    assert {name for name, row in rows.items() if row["error"]} == {"sft", "crash", "torn"}
    assert "no metric here is a known pass rate" in rows["sft"]["error"]
