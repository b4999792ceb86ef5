"""Many runs in a folder: what a look at them costs, and what it finds."""

import builtins
import io
import itertools
import json
import os
import shutil
import sqlite3
from collections import Counter
from contextlib import closing

import pytest
from docs_logs import MAKERS
from growing import Growing
from serve_client import until

from scalerl.ingest.formats.recognise import recognise
from scalerl.ingest.imported import ReadOptions
from scalerl.ingest.load import read_source
from scalerl.view.facts.standing import StandingQuery
from scalerl.view.serve import listing
from scalerl.view.serve.store import RunStore

MANY = 2000


def add_evaluation(run, step, rate=0.3):
    run.mkdir(parents=True, exist_ok=True)
    with (run / "evals.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "pass_rate": rate}) + "\n")


@pytest.fixture
def settled(monkeypatch):
    """Lists of folders are kept at once, as they are of folders that were not changed a moment ago."""
    monkeypatch.setattr(listing, "_SETTLED", -1e9)


@pytest.fixture
def calls(monkeypatch):
    """How often the file system is called, by what."""
    counted = Counter()

    def counting(owner, name):
        before = getattr(owner, name)

        def call(*args, **kwargs):
            counted[name] += 1
            return before(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for name in ("stat", "lstat", "scandir", "listdir", "readlink"):
        counting(os, name)
    counting(builtins, "open")
    monkeypatch.setattr(io, "open", builtins.open)  # that of pathlib
    return counted


def look(store, seconds=float("inf")):
    """All runs, though all were looked at, and each was read, a moment ago."""
    store._sweep._due = 0.0
    store._sweep._sources = {name: (source, 0.0) for name, (source, _) in store._sweep._sources.items()}
    return store.refresh(seconds)


def test_a_look_at_many_runs_stats_what_is_appended_to_and_opens_nothing(tmp_path, settled, calls):
    for n in range(MANY):
        add_evaluation(tmp_path / f"group-{n % 40}" / f"run-{n}", 0)
    store = RunStore(tmp_path, StandingQuery())
    look(store, seconds=0.0)  # finds all, and reads one
    calls.clear()
    look(store, seconds=0.0)
    assert calls["stat"] <= 7 * MANY + 100
    assert calls["open"] <= 10  # of the one that is read
    del calls["stat"], calls["open"]
    assert sum(calls.values()) <= 10


def test_what_has_changed_is_all_that_is_read(tmp_path, settled, calls):
    for n in range(30):
        add_evaluation(tmp_path / f"run-{n}", 0)
    store = RunStore(tmp_path, StandingQuery())
    assert not look(store)
    calls.clear()
    version = store.version
    assert not look(store)
    assert (calls["open"], calls["scandir"], store.version) == (0, 0, version)
    add_evaluation(tmp_path / "run-7", 10, 0.4)
    look(store)
    assert 1 <= calls["open"] <= 10
    assert [(row["path"], row["step"]) for row in store.listed(version)["runs"]] == [("run-7", 10)]


def test_runs_that_come_and_go_are_seen_though_lists_are_kept(tmp_path, settled):
    for name in ("a/one", "a/two", "b/three"):
        add_evaluation(tmp_path / name, 0)
    store = RunStore(tmp_path, StandingQuery())
    look(store)
    add_evaluation(tmp_path / "a" / "new", 0)
    add_evaluation(tmp_path / "c" / "d" / "deep", 0)
    (tmp_path / "a" / "empty").mkdir()
    shutil.rmtree(tmp_path / "a" / "one")
    look(store)
    assert [row["path"] for row in store.listed()["runs"]] == ["a/new", "a/two", "b/three", "c/d/deep"]
    add_evaluation(tmp_path / "a" / "empty", 0)  # a folder becomes a run, and another ceases to be one
    (tmp_path / "b" / "three" / "evals.jsonl").unlink()
    look(store)
    assert {row["path"] for row in store.listed()["runs"]} == {"a/two", "a/new", "a/empty", "c/d/deep"}


def test_a_link_that_comes_later_is_not_followed(tmp_path, settled):
    runs, outside = tmp_path / "runs", tmp_path / "outside"
    add_evaluation(runs / "a", 0)
    add_evaluation(runs / "b", 0)
    add_evaluation(outside, 5, 0.77)
    (runs / "b" / "evals.jsonl").rename(runs / "b" / "before")
    (runs / "b" / "evals.jsonl").symlink_to(runs / "b" / "before")
    store = RunStore(runs, StandingQuery())
    look(store)
    assert [row["error"] for row in store.listed()["runs"]] == ["", ""]
    (runs / "a" / "evals.jsonl").unlink()
    (runs / "a" / "evals.jsonl").symlink_to(outside / "evals.jsonl")
    (runs / "b" / "before").unlink()
    (runs / "b" / "before").symlink_to(outside / "evals.jsonl")  # the folder of a link within, and its link
    until(store, lambda rows: all("leads out" in row["error"] for row in rows))
    for row in store.listed()["runs"]:
        assert "leads out" in row["error"]
        assert row["pass_rate"] == 0.3


def test_the_run_that_was_written_to_last_is_read_first(tmp_path):
    for n in range(20):
        add_evaluation(tmp_path / f"run-{n}", 0)
        os.utime(tmp_path / f"run-{n}" / "evals.jsonl", (1e9 + n % 13, 1e9 + n % 13))
    store = RunStore(tmp_path, StandingQuery())
    assert look(store, seconds=0.0)
    assert [row["path"] for row in store.listed()["runs"]] == ["run-12"]
    while look(store, seconds=0.0):
        pass
    assert len(store.listed()["runs"]) == 20
    assert store.looked.is_set()


def test_what_was_written_to_last_is_looked_at_where_a_look_at_all_takes_long(runs):
    growing = Growing(runs / "growing", 5)
    store = RunStore(runs, StandingQuery())
    store.refresh()
    growing.grow()
    store._sweep._due = float("inf")  # no look at all
    until(store, lambda rows: [row["step"] for row in rows if row["path"] == "growing"] == [100])


def test_a_folder_of_too_many_is_not_walked_through_for_its_entry(tmp_path, monkeypatch):
    for n in range(8):
        add_evaluation(tmp_path / f"run-{n}", 0)
    monkeypatch.setattr(listing, "_MOST_FOLDERS", 4)
    monkeypatch.setattr(os, "walk", lambda *_: pytest.fail("all of it was walked through"))
    store = RunStore(tmp_path, StandingQuery())
    look(store)
    version = store.version
    look(store)
    assert store.version == version
    errors = {row["path"]: row["error"] for row in store.listed()["runs"]}
    assert errors.pop(".").startswith("only 4 folders")
    assert len(errors) == 3


def test_the_logs_of_every_trainer_are_listed_as_a_fit_reads_them(tmp_path, monkeypatch):
    for name, make in MAKERS.items():
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        make()
    (tmp_path / "notes.txt").write_text("nothing")
    (tmp_path / "outside.csv").symlink_to(tmp_path / "tables" / "log.csv")
    monkeypatch.setattr(listing, "_LOOK_SECONDS", 60.0)
    found = {entry.shown: entry.format for entry in listing.Listing(tmp_path).scan().values()}
    assert found == {
        **{"mlflow/mlruns/1": "mlflow", "prime-rl/outputs/my-run": "jsonl"},
        **{f"{name}/my_project/my_run.jsonl": "verl" for name in ("verl", "harness")},
        **{"trackio/trackio/my-project.db": "trackio"},
        **{f"{name}/wandb": "wandb" for name in ("wandb", "open-instruct", "pipeline-rl")},
        **{"nemo-rl/logs/exp_001/tensorboard": "tensorboard", "openrlhf/tb/my_run": "tensorboard"},
        **{"skyrl/tensorboard_log": "tensorboard", "tensorboard/runs/my-run": "tensorboard"},
        **{"trl/outputs": "trainer-state", "slime/run.log": "console"},
    }
    for shown, format in found.items():
        assert recognise(tmp_path / shown).name == format
        assert read_source(tmp_path / shown, ReadOptions(format=format)).runs


def test_a_file_is_listed_once_its_first_rows_are_there(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text("")
    found = listing.Listing(tmp_path)
    assert not found.scan()
    log.write_text('{"step": 0, "eval/accuracy": 0.5}\n')
    assert [entry.format for entry in found.scan().values()] == ["jsonl"]
    with log.open("a") as file:
        file.write('{"step": 1, "eval/accuracy": 0.6}\n')
    assert [entry.format for entry in found.scan().values()] == ["jsonl"]


def test_a_folder_of_many_files_is_looked_into_in_parts(tmp_path, monkeypatch):
    for n in range(30):
        (tmp_path / f"log-{n}.jsonl").write_text('{"step": 0, "eval/accuracy": 0.5}\n')
    found, seen = listing.Listing(tmp_path), []
    clock = itertools.count()
    monkeypatch.setattr(listing.time, "monotonic", lambda: 0.05 * next(clock))
    for _ in range(40):
        seen.append(len(found.scan()))
    assert seen == sorted(seen)
    assert 0 < seen[0] < 30
    assert seen[-1] == 30


def test_a_database_whose_log_leads_out_of_the_folder_is_refused(tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    (tmp_path / "secret").write_bytes(b"")
    with closing(sqlite3.connect(runs / "p.db")) as sql, sql:
        sql.execute("PRAGMA journal_mode = WAL")
        sql.execute("CREATE TABLE metrics (timestamp TEXT, run_name TEXT, step INTEGER, metrics TEXT)")
    (runs / "p.db-wal").symlink_to(tmp_path / "secret")
    (entry,) = listing.Listing(runs).scan().values()
    assert entry.refused == "p.db-wal is a link that leads out of the folder"
