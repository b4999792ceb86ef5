"""`scalerl serve` within the process, for tests."""

import contextlib
import json
import time

from starlette.testclient import TestClient

from scalerl.view.facts.standing import StandingQuery
from scalerl.view.serve.app import make_app
from scalerl.view.serve.store import RunStore

LOCAL = ("localhost", "127.0.0.1", "::1")


@contextlib.contextmanager
def serving(folder, asked=None, hosts=LOCAL, token=None):
    app, _ = make_app(RunStore(folder, asked or StandingQuery()), hosts, token, "scalerl-1")
    # A server goes on after a request that breaks it, and so does this.
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        yield client


def settled(client, fits=True):
    """The rows by their paths, once every run that can be fitted is."""
    for _ in range(1200):
        found = client.get("/api/runs").json()
        if not found["looking"] and not (fits and any(row["waits"] for row in found["runs"])):
            return {row["path"]: row for row in found["runs"]}
        time.sleep(0.05)
    raise AssertionError("the runs are not fitted")


def until(store, holds):
    """Look at the folder until something holds of the rows."""
    for _ in range(1200):
        store.refresh()
        if holds(store.listed()["runs"]):
            return
        time.sleep(0.05)
    raise AssertionError("the change is not shown")


def any_waits(rows):
    return any(row["waits"] for row in rows)


def logs_of_trl(folder):
    """Two logs of another trainer with a pass rate in percent, one that does not rise, and one too short."""
    for name, scale, last in (("trl-0", 1.0, 24), ("trl-1", 0.9, 24), ("flat", 0.0, 24), ("short", 1.0, 3)):
        rows = [
            {
                "step": n,
                "epoch": n,
                "eval_acc_percent": 30 + scale * 30 * n**2 / (n**2 + 64) + 0.3 * (-1) ** n,
            }
            for n in range(1, last + 1)
        ]
        state = folder / name / f"checkpoint-{last}"
        state.mkdir(parents=True)
        (state / "trainer_state.json").write_text(json.dumps({"global_step": last, "log_history": rows}))
