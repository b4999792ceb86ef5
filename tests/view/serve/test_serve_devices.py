"""Logs that do not say on how many devices they ran, beside runs that do."""

from event_files import START, event
from growing import Growing
from serve_client import LOCAL, settled
from starlette.testclient import TestClient

from scalerl.cli.main import main
from scalerl.cli.serve import _devices
from scalerl.view.facts.standing import StandingQuery
from scalerl.view.serve.app import make_app
from scalerl.view.serve.store import RunStore

HOURS = {"kind": "gpu_hours", "amount": 0.2}


def tensorboard(folder, last):
    """A log with an evaluation every hour."""
    folder.mkdir(parents=True)
    rates = [0.2 + last * n**2 / (n**2 + 30) + 0.004 * (-1) ** n for n in range(21)]
    rows = [event("eval/pass_rate", n, float(rate), time=1e9 + 3600 * n) for n, rate in enumerate(rates)]
    (folder / "events.out.tfevents.1").write_bytes(START + b"".join(rows))


def client_of(folder, *devices):
    given = dict(map(_devices, devices))
    app, _ = make_app(RunStore(folder, StandingQuery(), given), LOCAL)
    return TestClient(app, base_url="http://127.0.0.1")


def test_hours_of_one_device_are_marked_and_stand_beside_no_others(tmp_path):
    tensorboard(tmp_path / "tb-0", 0.4)
    tensorboard(tmp_path / "tb-1", 0.3)
    Growing(tmp_path / "own", 20, 3, budget=HOURS)
    with client_of(tmp_path) as client:
        rows = settled(client)
        assert rows["tb-0"]["end_shown"] == "40 GPU-hours of one device"
        assert "of one device" not in rows["own"]["end_shown"]
        assert any("compute is for one device" in note for note in rows["tb-0"]["notes"])
        mixed = f"runs={rows['own']['id']},{rows['tb-0']['id']}"
        data = client.get(f"/api/overlay?{mixed}").json()
        assert data["axis"] == "steps"
        assert "gpu_hours" not in [axis["key"] for axis in (*data["axes"], *data["common"])]
        for page in ("overlay", "compare"):
            answer = client.get(f"/api/{page}?{mixed}&axis=gpu_hours")
            assert answer.status_code == 422
            assert "does not say on how many devices it ran" in answer.json()["error"]
        assert client.get(f"/api/compare?{mixed}").json()["axis"] == "steps"
        alike = client.get(f"/api/compare?runs={rows['tb-0']['id']},{rows['tb-1']['id']}").json()
        assert alike["axis"] == "gpu_hours"
        html = client.get(f"/run/{rows['tb-0']['id']},{rows['tb-1']['id']}").text
        assert "compute is for one device" in html


def test_devices_are_given_for_all_logs_and_by_their_paths(tmp_path):
    tensorboard(tmp_path / "a" / "big-0", 0.4)
    tensorboard(tmp_path / "small", 0.3)
    Growing(tmp_path / "own", 20, 3, budget=HOURS)
    with client_of(tmp_path) as client:
        own = settled(client)["own"]["compute"]
    with client_of(tmp_path, "8", "*/big-*=64") as client:
        rows = settled(client)
        assert rows["small"]["compute"] == 8 * 20
        assert rows["a/big-0"]["compute"] == 64 * 20
        assert rows["own"]["compute"] == own
        assert rows["small"]["end_shown"] == "320 GPU-hours"
        ids = ",".join(row["id"] for row in rows.values())
        assert client.get(f"/api/overlay?runs={ids}&axis=gpu_hours").status_code == 200


def test_commands_mark_hours_of_one_device(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tensorboard(tmp_path / "tb-0", 0.4)
    tensorboard(tmp_path / "tb-1", 0.3)
    mark = "of one device: the log does not say how many (--devices N)"
    assert main(["fit", "tb-0", "--at", "2x"]) == 0
    out = capsys.readouterr().out
    assert f"GPU-hours              {mark}\n" in out
    assert main(["fit", "tb-0", "--at", "2x", "--devices", "8"]) == 0
    out = capsys.readouterr().out
    assert mark not in out
    assert "at 320 GPU-hours" in out
    assert main(["watch", "tb-0", "--once"]) == 0
    assert "  GPU-hours of one device  " in capsys.readouterr().out
    assert main(["compare", "tb-0", "tb-1"]) == 0
    assert f"{mark}; compared as if all had run on as many" in capsys.readouterr().out
    assert main(["report", "tb-0", "tb-1", "--markdown", "tables.md"]) == 0
    assert "mid (GPU-hours of one device)" in (tmp_path / "tables.md").read_text()
