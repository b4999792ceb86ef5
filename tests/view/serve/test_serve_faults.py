"""What must not be: a fit that breaks again and again, an answer without its headers, memory that grows."""

import json
import os
import threading
from pathlib import Path

import pytest
from growing import Growing
from serve_client import any_waits, serving, settled, until
from wandb_files import framed, header, history, pb

from scalerl.errors import InputError
from scalerl.view.facts.standing import Standing, StandingQuery
from scalerl.view.serve.fits import Kept
from scalerl.view.serve.store import RunStore


@pytest.mark.parametrize("since", ["9" * 5000, "-1", "1.5", "", "٣"])
def test_a_version_that_is_none_is_refused(original, since):
    with serving(original) as client:
        answer = client.get("/api/runs", params={"since": since})
    assert answer.status_code == 400
    assert "since" in answer.json()["error"]


def test_an_answer_that_breaks_has_the_headers_of_all(original, monkeypatch):
    monkeypatch.setattr(RunStore, "listed", lambda *_: 1 / 0)
    with serving(original) as client:
        answer = client.get("/api/runs")
    assert answer.status_code == 500
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert "server is at fault" in answer.json()["error"]


def test_a_fit_that_breaks_is_told_and_made_again_when_the_run_has_changed(runs, monkeypatch, caplog):
    fitted, broken = Standing.fitted, []

    def breaks(standing):
        if standing.name == "a-1" and len(standing.points) == 30:
            broken.append(standing)
            raise ZeroDivisionError("a fault of the fit")
        return fitted(standing)

    monkeypatch.setattr(Standing, "fitted", breaks)
    monkeypatch.setattr("scalerl.view.serve.fits.REFIT", 0.0)
    monkeypatch.setattr("scalerl.view.serve.store.REFIT", 0.0)
    store = RunStore(runs, StandingQuery())
    store.refresh()
    for _ in range(3):
        assert store.fit_next()
    assert not store.fit_next()
    rows = {row["name"]: row for row in store.listed()["runs"]}
    assert rows["a-1"]["error"] == "its fit broke: ZeroDivisionError: a fault of the fit"
    assert (rows["a-1"]["waits"], rows["b-0"]["error"]) == (False, "")
    shown = store.overlay([row["id"] for row in rows.values()], None)["runs"]
    assert [run["fit"] is None for run in shown] == [False, True, False]
    with pytest.raises(InputError, match="a-1: its fit broke"):
        store.compare([row["id"] for row in rows.values()], None)
    assert len(broken) == 1
    assert caplog.text.count("Traceback") == 1
    lines = (runs / "a" / "a-1" / "evals.jsonl").read_text().splitlines(keepends=True)
    (runs / "a" / "a-1" / "evals.jsonl").write_text("".join(lines[:-1]))
    until(store, any_waits)
    while store.fit_next():
        pass
    rows = {row["name"]: row for row in store.listed()["runs"]}
    assert (rows["a-1"]["error"], rows["a-1"]["forecast"] is None) == ("", False)


def test_what_cannot_be_said_of_a_run_is_not_asked_again(runs, monkeypatch, caplog):
    monkeypatch.setattr(Standing, "eta", lambda standing, now: 1 / 0 if standing.fit else 0.0)
    monkeypatch.setattr("scalerl.view.serve.store.REFIT", 0.0)
    store = RunStore(runs, StandingQuery())
    store.refresh()
    for _ in range(3):
        assert store.fit_next()
    assert not store.fit_next()
    assert {row["error"] for row in store.listed()["runs"]} == {"ZeroDivisionError: division by zero"}
    assert caplog.text.count("Traceback") == 3


def test_answers_are_kept_without_the_fits_that_they_were_made_of(runs, monkeypatch):
    monkeypatch.setattr("scalerl.view.serve.fits.REFIT", 0.0)
    growing = Growing(runs / "growing", 12)
    store = RunStore(runs, StandingQuery())
    store.refresh()
    made = {}
    for _ in range(3):
        growing.grow()
        until(store, lambda rows, n=growing.n: any(row["evaluations"] == n for row in rows))
        ids = [row["id"] for row in store.listed()["runs"]]
        answer = store.overlay(ids, None)
        assert store.overlay(ids, None) is answer
        made[answer["runs"][-1]["evaluations"]] = answer
    assert sorted(made) == [13, 14, 15]
    import gc

    gc.collect()
    fits = [one for one in gc.get_objects() if type(one) is Standing and one.name == "growing" and one.fit]
    assert [len(one.points) for one in fits] == [15]


def test_answers_are_given_to_many_threads():
    answers, failed = Kept(8), []

    def ask():
        try:
            for n in range(3000):
                assert answers.once(n % 11, lambda n=n: {"n": n % 11}) == {"n": n % 11}
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert len(answers._kept) <= 8


def test_a_key_that_is_missing_elsewhere_is_no_run_that_is_missing(original, monkeypatch):
    def missing(*_, **__):
        raise KeyError("a fault")

    with serving(original) as client:
        rows = settled(client)
        name = rows["b/b-0"]["id"]
        monkeypatch.setattr("scalerl.view.serve.store.overlay", missing)
        assert client.get(f"/api/overlay?runs={name}").status_code == 500
        assert client.get("/api/overlay?runs=nobody").status_code == 404


def test_a_folder_that_cannot_be_looked_into_is_listed(runs, monkeypatch):
    scandir = os.scandir

    def refuses(folder):
        if Path(folder).name == "notes":
            raise PermissionError(13, "Permission denied")
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuses)  # tests may run as root, who may enter any
    store = RunStore(runs, StandingQuery())
    store.refresh()
    rows = {row["path"]: row["error"] for row in store.listed()["runs"]}
    assert rows.pop("notes") == "the folder cannot be read: Permission denied"
    assert set(rows.values()) == {""}
    assert len(rows) == 3


@pytest.mark.parametrize("most", [6, 7])
def test_a_folder_that_holds_too_many_says_that_some_are_not_listed(runs, monkeypatch, most):
    monkeypatch.setattr("scalerl.view.serve.listing._MOST_FOLDERS", most)  # there are seven
    (runs / "elsewhere").symlink_to("/")  # which is no matter of the folder as a whole
    store = RunStore(runs, StandingQuery())
    store.refresh()
    rows = {row["path"]: row["error"] for row in store.listed()["runs"]}
    said = "only 6 folders were looked into: runs in the others are not listed"
    assert rows.pop(".", "") == (said if most == 6 else "")
    assert set(rows.values()) == {""}
    assert most == 6 or len(rows) == 3


def test_a_page_that_knows_a_later_version_gets_all_rows(runs):
    store = RunStore(runs, StandingQuery())
    store.refresh()
    version = store.version
    assert store.listed(version)["runs"] == []
    assert len(store.listed(version + 1)["runs"]) == 3


def test_what_is_known_of_a_run_stays_until_it_is_fitted_again(runs):
    growing = Growing(runs / "growing", 14)
    store = RunStore(runs, StandingQuery(target=0.58))
    store.refresh()
    while store.fit_next():
        pass
    rows = [next(row for row in store.listed()["runs"] if row["path"] == "growing")]
    growing.grow()
    until(store, any_waits)
    rows.append(next(row for row in store.listed()["runs"] if row["path"] == "growing"))
    before, waits = rows
    assert (before["waits"], waits["waits"]) == (False, True)
    assert waits["evaluations"] == before["evaluations"] + 1
    for key in ("forecast", "ceiling", "target"):
        assert before[key] is not None
        assert waits[key] == before[key]


def put_wandb(folder, run, name, rows):
    """A file of W&B's as it grows; the run `name` has evaluations, and without one only a loss."""
    record = pb.Record.FromString(header(name))
    record.run.run_id, record.run.display_name = run, name
    path = folder / "wandb" / f"run-{run}" / f"run-{run}.wandb"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(framed([record.SerializeToString(), *(history(n, row) for n, row in enumerate(rows))]))


def rising(scale, n):
    return [{"eval_reward": 0.2 + scale * s**2 / (s**2 + 64)} for s in range(1, n + 1)]


def test_a_run_of_several_in_a_log_keeps_its_id_and_its_forecast(tmp_path):
    for run, rows in (("1", [{"loss": 0.1}] * 3), ("2", rising(0.5, 24)), ("3", rising(0.3, 20))):
        put_wandb(tmp_path, run, f"seed-{run}", rows)
    store = RunStore(tmp_path, StandingQuery(axis="steps"))
    store.refresh()
    while store.fit_next():
        pass
    before = {row["name"]: row for row in store.listed()["runs"]}
    assert before["seed-1"]["error"]
    assert before["seed-2"]["ceiling"] != before["seed-3"]["ceiling"]
    put_wandb(tmp_path, "1", "seed-1", rising(0.1, 12))
    until(store, any_waits)
    after = {row["name"]: row for row in store.listed()["runs"]}
    assert {name: row["id"] for name, row in after.items()} == {n: row["id"] for n, row in before.items()}
    for name in ("seed-2", "seed-3"):
        assert after[name]["ceiling"] == before[name]["ceiling"]
    assert after["seed-1"]["waits"]
    assert after["seed-1"]["ceiling"] is None
    put_wandb(tmp_path, "1", "seed-2", rising(0.4, 12))  # which takes the place of the one of that name
    until(store, lambda rows: "seed-1" not in {row["name"] for row in rows})
    named = {row["evaluations"]: row for row in store.listed()["runs"] if row["name"] == "seed-2"}
    assert named[12]["ceiling"] is None


def test_options_of_a_terminal_are_said_to_be_that(runs):
    state = {"log_history": [{"step": n, "eval_a": 0.1, "eval_b": 0.2} for n in range(9)]}
    (runs / "trl").mkdir()
    (runs / "trl" / "trainer_state.json").write_text(json.dumps(state))
    store = RunStore(runs, StandingQuery())
    store.refresh()
    (error,) = [row["error"] for row in store.listed()["runs"] if row["path"] == "trl"]
    assert "--y" in error
    assert "typed in a terminal: scalerl ingest LOG -o FOLDER takes such options" in error
    assert error.count("typed") == 1
