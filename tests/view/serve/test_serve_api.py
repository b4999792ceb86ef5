"""The JSON of the server: which runs it lists, and what it says of them."""

import html
import json
import os
import shutil
import time

import pytest
from growing import TRUTH, Growing
from serve_client import logs_of_trl, serving, settled

from scalerl.record.activity import Activity
from scalerl.view.facts.standing import StandingQuery
from scalerl.view.serve import app
from scalerl.view.serve.store import RunStore


def test_runs_are_listed_with_what_is_known_of_them(runs):
    Growing(runs / "young", 3).alarm(40)
    with serving(runs, StandingQuery(target=0.58)) as client:
        rows = settled(client)
    assert set(rows) == {"a/a-0", "a/a-1", "b/b-0", "young"}
    row = rows["a/a-0"]
    assert (row["name"], row["step"], row["last_step"], row["evaluations"]) == ("a-0", 580, 585, 30)
    low, high = row["forecast"]["prediction"]
    assert low < float(TRUTH(1200.0)) < high
    assert row["end"] == 1200
    assert row["target"]["verdict"] in {"go", "no-go", "too close", "too early"}
    assert rows["young"]["forecast"] is None
    assert "3" in rows["young"]["no_forecast"]
    assert rows["young"]["error"] == ""


def test_only_what_has_changed_is_told_again(runs):
    growing = Growing(runs / "c", 12)
    with serving(runs) as client:
        before = settled(client)
        version = client.get("/api/runs").json()["version"]
        assert client.get(f"/api/runs?since={version}").json()["runs"] == []
        growing.grow()
        changed, ids = [], []
        for _ in range(200):
            changed = client.get(f"/api/runs?since={version}").json()["runs"]
            if changed and not changed[0]["waits"]:
                break
            time.sleep(0.05)
        assert [row["path"] for row in changed] == ["c"]
        assert changed[0]["evaluations"] == before["c"]["evaluations"] + 1
        assert changed[0]["forecast"] != before["c"]["forecast"]
        (runs / "c" / "evals.jsonl").unlink()
        for _ in range(200):
            ids = client.get(f"/api/runs?since={version}").json()["ids"]
            if len(ids) == 3:
                break
            time.sleep(0.05)
        assert before["c"]["id"] not in ids


def test_the_first_answer_after_a_rest_is_of_the_folder_as_it_is(runs, monkeypatch):
    """A script that asks every minute would else get the runs of the minute before."""
    monkeypatch.setattr(app, "_IDLE", 0.5)
    with serving(runs) as client:
        before = settled(client)
        time.sleep(1.5)
        shutil.rmtree(runs / "b" / "b-0")
        Growing(runs / "new", 12)
        found = client.get("/api/runs").json()["runs"]
        assert [row["path"] for row in found] == ["a/a-0", "a/a-1", "new"]
        time.sleep(1.5)
        shutil.rmtree(runs / "a" / "a-0")
        assert client.get(f"/run/{before['a/a-0']['id']}").status_code == 404


def test_a_broken_run_is_listed_with_its_error_and_comes_back(runs):
    growing = Growing(runs / "broken", 6)
    good = (growing.path / "evals.jsonl").read_bytes()
    (growing.path / "evals.jsonl").write_bytes(b"{]\n" + good)
    with serving(runs) as client:
        row = settled(client)["broken"]
        assert "broken/evals.jsonl, line 1: not JSON" in row["error"]
        assert str(runs) not in row["error"]
        answer = client.get(f"/api/overlay?runs={row['id']}")
        assert answer.status_code == 422
        (growing.path / "evals.jsonl").write_bytes(good)
        for _ in range(200):
            row = settled(client, fits=False)["broken"]
            if row.get("evaluations"):  # while the file is written it is empty for a moment
                break
            time.sleep(0.05)
        assert row["evaluations"] == 6
        # What was good is kept, with what is wrong now.
        (growing.path / "evals.jsonl").write_bytes(b"{]\n" + good)
        for _ in range(200):
            row = settled(client, fits=False)["broken"]
            if row["error"]:
                break
            time.sleep(0.05)
        assert row["evaluations"] == 6


def test_a_run_that_heals_without_a_trace_comes_back(runs):
    growing = Growing(runs / "broken", 6)
    evals = growing.path / "evals.jsonl"
    good, stat = evals.read_bytes(), evals.stat()

    def put(data):
        evals.write_bytes(data)
        os.utime(evals, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    put(b"]" + good[1:])
    with serving(runs) as client:
        assert "not JSON" in settled(client)["broken"]["error"]
        put(good)
        for _ in range(600):
            if not settled(client, fits=False)["broken"]["error"]:
                break
            time.sleep(0.05)
        row = settled(client, fits=False)["broken"]
        assert (row["error"], row["evaluations"]) == ("", 6)


def test_a_pipe_in_a_run_hides_no_other(runs):
    (runs / "a" / "a-1" / "steps.jsonl").unlink()
    os.mkfifo(runs / "a" / "a-1" / "steps.jsonl")
    with serving(runs) as client:
        rows = settled(client)
    assert rows["a/a-1"]["error"] == "a/a-1/steps.jsonl: expected a file"
    assert rows["b/b-0"]["error"] == ""


def test_a_run_without_evaluations_is_listed_and_not_drawn(runs):
    Growing(runs / "begun")
    (runs / "begun" / "evals.jsonl").touch()
    with serving(runs) as client:
        row = settled(client)["begun"]
        assert (row["evaluations"], row["error"]) == (0, "")
        answer = client.get(f"/api/overlay?runs={row['id']}")
        assert answer.status_code == 422
        assert answer.json()["error"] == "begun: no evaluation yet"


def test_logs_of_other_trainers_are_told_by_their_names(runs):
    rows = [{"step": n, "epoch": n / 9, "eval_reward": 0.3 + 0.01 * n} for n in range(1, 20)]
    state = runs / "trl" / "checkpoint-19"
    state.mkdir(parents=True)
    (state / "trainer_state.json").write_text(json.dumps({"global_step": 19, "log_history": rows}))
    with serving(runs) as client:
        row = settled(client)["trl"]
        assert (row["format"], row["evaluations"], row["axis"]) == ("trainer-state", 19, "steps")
        data = client.get(f"/api/overlay?runs={row['id']}").json()
        assert data["runs"][0]["pass_rate"][-1] == pytest.approx(0.49)


def test_beside_a_state_that_is_cut_off_the_other_logs_are_listed(runs):
    rows = [{"step": n, "epoch": n / 9, "eval_reward": 0.3 + 0.01 * n} for n in range(1, 20)]
    (runs / "trl" / "checkpoint-19").mkdir(parents=True)
    text = json.dumps({"global_step": 19, "log_history": rows})
    state = runs / "trl" / "trainer_state.json"
    log = "".join(f"step:{n} - val-core/a/acc/mean@1:0.{n}\n" for n in range(1, 9))
    (runs / "trl" / "b.log").write_text(log)
    for saved, listed in ((text, ["trl"]), (text[:200], ["trl", "trl/b.log"])):
        state.write_text(saved)
        with serving(runs) as client:
            found = settled(client)
        assert [name for name in found if name.startswith("trl")] == listed
    assert "the file is cut off" in found["trl"]["error"]
    assert found["trl/b.log"]["evaluations"] == 8


def test_a_log_that_does_not_say_it_is_neither_ended_nor_not(runs):
    logs_of_trl(runs)
    with serving(runs) as client:
        rows = settled(client)
        assert rows["trl-0"]["ended"] is None
        assert rows["a/a-0"]["ended"] is False
        assert rows["a/a-0"]["notes"] == []
        (note,) = [note for note in rows["trl-0"]["notes"] if "percentages" in note]
        page = client.get(f"/run/{rows['trl-0']['id']},{rows['trl-1']['id']}").text
        assert f"<b>trl-0, trl-1</b> {note}" in html.unescape(page)


def test_event_files_of_tensorboard_are_followed(runs):
    writer = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    event = pytest.importorskip("tensorboard.compat.proto.event_pb2")
    summary = pytest.importorskip("tensorboard.compat.proto.summary_pb2")
    events = writer.EventFileWriter(str(runs / "tb"))

    def log(step):
        value = summary.Summary.Value(tag="eval/reward", simple_value=0.01 * step)
        events.add_event(
            event.Event(step=step, wall_time=1.7e9 + step, summary=summary.Summary(value=[value]))
        )
        events.flush()

    for step in range(10, 20):
        log(step)
    with serving(runs) as client:
        row = settled(client)["tb"]
        assert (row["format"], row["evaluations"], row["error"]) == ("tensorboard", 10, "")
        log(20)
        for _ in range(200):
            row = settled(client, fits=False)["tb"]
            if row["evaluations"] == 11:
                break
            time.sleep(0.05)
        assert row["pass_rate"] == pytest.approx(0.2)
    events.close()


def test_every_format_that_is_listed_is_one():
    from scalerl.ingest.formats.recognise import formats

    assert {"trainer-state", "tensorboard", "wandb"} <= {one.name for one in formats()}


def test_one_log_that_breaks_its_reader_hides_no_other(runs, monkeypatch):
    from scalerl.record.reader import RunRecord

    read = RunRecord.read

    def broken(path):
        if path.name == "a-1":
            raise ZeroDivisionError("a fault of the reader")
        return read(path)

    monkeypatch.setattr(RunRecord, "read", broken)
    with serving(runs) as client:
        rows = settled(client)
    assert rows["a/a-1"]["error"] == "ZeroDivisionError: a fault of the reader"
    assert rows["b/b-0"]["error"] == ""


def test_the_chart_of_several_runs_on_an_axis_that_is_asked_for(client):
    rows = settled(client)
    ids = ",".join(row["id"] for row in rows.values())
    data = client.get(f"/api/overlay?runs={ids}").json()
    assert data["axis"] == "steps"
    assert [run["name"] for run in data["runs"]] == ["a-0", "a-1", "b-0"]
    assert data["budget"] == 1200
    on_tokens = client.get(f"/api/overlay?runs={ids}&axis=tokens").json()
    assert on_tokens["axis"] == "tokens"
    ends = [one["runs"][0]["fit"]["window"][1] for one in (on_tokens, data)]
    assert ends[0] == 5000 * ends[1]
    assert {"steps", "tokens", "flops", "gpu_hours"} <= {one["key"] for one in data["common"]}
    assert "GPU-hours" in {one["name"] for one in data["common"]}
    answer = client.get(f"/api/overlay?runs={ids}&axis=samples")
    assert answer.status_code == 422
    assert "'samples'" in answer.json()["error"]
    assert client.get("/api/overlay?runs=").status_code == 422


def test_runs_of_one_name_are_told_apart(runs):
    Growing(runs / "other" / "a-0", 8)
    with serving(runs) as client:
        rows = settled(client)
        ids = ",".join(row["id"] for path, row in rows.items() if path.endswith("a-0"))
        names = [run["name"] for run in client.get(f"/api/overlay?runs={ids}").json()["runs"]]
        assert names == ["a/a-0", "other/a-0"]


def test_recipes_are_compared_with_their_runs_as_seeds(client):
    rows = settled(client)
    ids = ",".join(row["id"] for row in rows.values())
    found = client.get(f"/api/compare?runs={ids}").json()
    assert found["result"]["runs"] == {"a-0": 2, "b-0": 1}
    page = client.get(f"/run/{ids}").text
    assert 'b-0 <span class="beside">1 and 2 seeds</span>' in page
    for header in ("against a-0", "pass rate at 1,200 steps, difference"):
        assert f">{header}</th>" in page
    alone = ",".join(row["id"] for path, row in rows.items() if path.startswith("a/"))
    answer = client.get(f"/api/compare?runs={alone}")
    assert answer.status_code == 422
    assert "Nothing is compared: all runs are of one recipe, a-0." in answer.json()["error"]
    assert "all runs are of one recipe, a-0" in client.get(f"/run/{alone}").text


def test_runs_of_different_metrics_are_shown_and_not_ordered(runs):
    logs_of_trl(runs)
    with serving(runs) as client:
        rows = settled(client)
        ids = f"{rows['a/a-0']['id']},{rows['trl-0']['id']}"
        overlay = client.get(f"/api/overlay?runs={ids}").json()
        assert len(overlay["runs"]) == 2
        assert overlay["sentence"].startswith("These runs are of different metrics")
        page = client.get(f"/run/{ids}")
        assert page.status_code == 200
        assert "Nothing is compared: runs of different metrics are not compared" in page.text
        answer = client.get(f"/api/compare?runs={ids}")
        assert answer.status_code == 422
        assert "'a-0' has pass_rate" in answer.json()["error"]


def test_files_of_wandb_are_listed_with_the_link_that_is_in_them(runs):
    wandb = pytest.importorskip("wandb")
    settings = wandb.Settings(mode="offline", silent=True, console="off", x_disable_stats=True)
    with wandb.init(project="p", name="of-wandb", dir=runs, settings=settings) as run:
        for step in range(8):
            run.log({"eval/reward": 0.2 + 0.01 * step}, step=10 * step)
    with serving(runs) as client:
        row = settled(client)["wandb"]
    assert (row["name"], row["evaluations"], row["error"]) == ("of-wandb", 8, "")


def test_a_thousand_runs_are_read_once(tmp_path, monkeypatch):
    line = json.dumps({"step": 0, "pass_rate": 0.3}) + "\n"
    for n in range(1000):
        folder = tmp_path / f"group-{n % 10}" / f"run-{n}"
        folder.mkdir(parents=True)
        (folder / "evals.jsonl").write_text(line)
    from scalerl.record.reader import RunRecord

    read, opened = RunRecord.read, []
    monkeypatch.setattr(RunRecord, "read", lambda path: opened.append(path) or read(path))
    store = RunStore(tmp_path, StandingQuery())
    store.refresh()
    assert len(opened) == 1000
    assert len(store.listed()["runs"]) == 1000
    with (tmp_path / "group-3" / "run-3" / "evals.jsonl").open("a") as file:
        file.write(json.dumps({"step": 1, "pass_rate": 0.4}) + "\n")
    version = store.version
    store._sweep._due = 0.0
    store.refresh()
    assert opened[1000:] == [tmp_path / "group-3" / "run-3"]
    assert [row["step"] for row in store.listed(version)["runs"]] == [1]


def test_a_folder_that_may_not_be_entered_is_passed_over(runs):
    if os.geteuid() == 0:
        pytest.skip("root may enter every folder")
    (runs / "shut").mkdir(mode=0)
    with serving(runs) as client:
        assert set(settled(client)) == {"a/a-0", "a/a-1", "b/b-0"}


def test_a_copy_without_checkpoints_has_ended_where_its_budget_is_spent(tmp_path):
    for name, evaluations in (("at-its-end", 61), ("before-it", 60), ("still-saving", 61)):
        Growing(tmp_path / name, evaluations).writer.close()
    activity = json.dumps(Activity(doing="saving", step=1200).to_json())
    (tmp_path / "still-saving" / "progress.json").write_text(activity)
    with serving(tmp_path) as client:
        rows = settled(client)
        assert {path: row["ended"] for path, row in rows.items()} == {
            "at-its-end": True,
            "before-it": False,
            "still-saving": False,
        }
