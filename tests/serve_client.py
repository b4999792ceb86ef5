"""`scalerl serve` within the process, for tests."""

import contextlib
import time

from starlette.testclient import TestClient

from scalerl.report.standing import Asked
from scalerl.serve.app import make_app
from scalerl.serve.store import Store

LOCAL = ("localhost", "127.0.0.1", "::1")


@contextlib.contextmanager
def serving(folder, asked=None, hosts=LOCAL, token=None):
    app, _ = make_app(Store(folder, asked or Asked()), hosts, token, "scalerl-1")
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
