"""MLflow's own client, on a database and, where all of MLflow is installed, on its server on this machine."""

import math
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from scalerl import InputError, load_run
from scalerl.ingest.load import read_source

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # of MLflow
TIME = 1_700_000_000_500
NAMES = ("first: run's #1", "plain", "same", "same", 'both "quotes" and \' ones', "of/a/path", "deleted")


@pytest.fixture(scope="module", params=["database", "server"])
def store(request, tmp_path_factory):
    """The address of a store, and its runs by name, of which those in `other` come after."""
    folder = tmp_path_factory.mktemp("mlflow")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    if request.param == "server" and find_spec("flask") is None:
        pytest.skip("all of MLflow is needed for its server, and mlflow-skinny is installed")
    with (
        served(uri) if request.param == "server" else nullcontext(uri) as uri,
        pytest.MonkeyPatch.context() as patch,
    ):
        client = MlflowClient(tracking_uri=uri)
        patch.setenv("MLFLOW_TRACKING_URI", uri)
        patch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        yield uri, {name: log(client, client.create_experiment(name)) for name in ("exp", "team/exp")}


@contextmanager
def served(uri):
    """MLflow's own server at a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, "--workers", "1"]
    server = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)],
        env=os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_for(f"http://127.0.0.1:{port}", server)
        yield f"http://127.0.0.1:{port}"
    finally:
        stop(server)


def wait_for(uri, server):
    limit = time.monotonic() + 120
    while time.monotonic() < limit and server.poll() is None:
        try:
            with urlopen(f"{uri}/health", timeout=2):
                return
        except (URLError, OSError):
            time.sleep(0.2)
    raise AssertionError("MLflow's server did not start")


def stop(server):
    """End the server and the processes that it started, which have a group of their own."""
    os.killpg(server.pid, 15)
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, 9)
        server.wait(20)


def log(client, experiment):
    found = {}
    for name in NAMES:
        run = client.create_run(experiment, run_name=name).info.run_id
        values = {"train/reward": [0.0, 0.25, 0.5], "loss": [1.0, math.nan, math.inf], "noise": [0.0] * 3}
        values["eval/accuracy"] = [0.2, 0.3, 0.4]
        metrics = [Metric(key, v, TIME + 1000 * s, s) for key in values for s, v in enumerate(values[key])]
        client.log_batch(run, metrics=metrics, params=[Param("actor/lr", "0.0001"), Param("n_gpus", "8")])
        if name == "deleted":
            client.delete_run(run)
        found.setdefault(name, []).append(run)
    return {"id": experiment, **found}


def test_a_run_by_its_id_and_by_its_name(store):
    uri, made = store
    id = made["exp"]["plain"][0]
    names = [f"mlflow:{id}", "mlflow:exp/plain", f"mlflow:exp/{id}"]
    if uri.startswith("http"):
        page = f"mlflow:{uri}/#/experiments/{made['exp']['id']}/runs/{id}"
        names += [f"mlflow:{uri}/exp/plain", f"mlflow:{uri}/{id}", page, f"{page}/model-metrics"]
    for name in names:
        (run,) = read_source(name).runs
        assert run.config["name"] == "plain"
        assert [(one.step, one.pass_rate) for one in run.evals] == [(0, 0.2), (1, 0.3), (2, 0.4)]
        assert [one.time for one in run.evals] == [1700000000.5, 1700000001.5, 1700000002.5]
        assert run.config["trainer_config"] == {"actor.lr": 0.0001, "n_gpus": 8}
        assert [row["loss"] for row in run.steps() if "loss" in row] == [1]  # without NaN and infinity
        assert run.config["source"] == {"path": name, "format": "mlflow", "trainer": "unknown"}


@pytest.mark.parametrize("name", ["first: run's #1", 'both "quotes" and \' ones', "of/a/path"])
def test_odd_names(store, name):
    for experiment in ("exp", "team/exp"):
        assert load_run(f"mlflow:{experiment}/{name}").config["name"] == name


def test_the_runs_of_an_experiment(store):
    uri, made = store
    names = ["mlflow:team/exp"]
    if uri.startswith("http"):
        names.append(f"mlflow:{uri}/#/experiments/{made['team/exp']['id']}")
    ids = made["team/exp"]["same"]
    for name in names:
        found = [run.config["name"] for run in read_source(name).runs]
        assert sorted(found) == sorted(
            [*(one for one in NAMES if one not in ("same", "deleted")), *(f"same {id}" for id in ids)]
        )
        assert load_run(name, run=f"same {ids[1]}").evals


@pytest.mark.usefixtures("store")
def test_errors():
    for name, said in {
        "mlflow:nope": "the server has no such experiment; there are ",
        "mlflow:exp/nope": "no run 'nope' in the experiment; there are ",
        "mlflow:exp/deleted": "no run 'deleted' in the experiment",
        "mlflow:exp/same": "2 runs have this name; choose one by its ID: mlflow:",
        f"mlflow:{'0' * 32}": "the server has no run of this ID",
    }.items():
        with pytest.raises(InputError) as error:
            load_run(name)
        assert str(error.value).startswith(f"{name}: {said}")
        assert "\n" not in str(error.value)


class _Fails(BaseHTTPRequestHandler):
    status = 503

    def do_GET(self):
        self.send_response(self.status)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_POST = do_GET

    def log_message(self, format, *args):
        pass


@pytest.mark.parametrize(
    ("status", "said"),
    [(401, ""), (404, ""), (503, "cannot reach the server: it answers with status 503"), (200, "")],
)
def test_a_server_that_refuses(monkeypatch, status, said):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Fails", (_Fails,), {"status": status}))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        with pytest.raises(InputError) as error:
            load_run(f"mlflow:http://127.0.0.1:{server.server_port}/exp/run")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert str(error.value).startswith(f"mlflow:http://127.0.0.1:{server.server_port}/exp/run: {said}")
    assert "\n" not in str(error.value)


def test_a_server_that_is_not_there(monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(
        InputError, match=r"^mlflow:http://127.0.0.1:9/exp/run: cannot reach the server: Connection refused"
    ):
        load_run("mlflow:http://127.0.0.1:9/exp/run")


def test_a_setting_of_the_user_stays(monkeypatch, tmp_path):
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    with pytest.raises(InputError, match="no such experiment; there are Default"):
        load_run("mlflow:exp/run")
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ
