"""The head of a cluster dies: a run ends with a line, and a resume on a new cluster goes on."""

import json
import subprocess
import sys
import time

import psutil
import pytest
from cluster_runs import SMALL, check_record, command, steps_of
from ray_nodes import Nodes, simulated, until

from scalerl.rl.workers.ray import cluster_watch

SILENCE = 10
PATIENCE = 240


def actors_below():
    return [p for p in psutil.Process().children(recursive=True) if "Actor" in p.name()]


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [("gcs_server",), ("gcs_server", "raylet")], ids=["head", "node"])
def test_the_head_dies_and_a_resume_goes_on_elsewhere(small_base, tmp_path, kinds, capsys):
    folder = tmp_path / "run"
    limits = ["cluster.timeouts.start=240", f"cluster.timeouts.heartbeat={SILENCE}", "cluster.generators=2"]
    changes = [
        f"model={small_base}",
        *SMALL,
        *limits,
        "budget.amount=250",
        "batch.samples=32",
        "tracking.to=tensorboard",
    ]
    nodes = Nodes((3, 1))
    driver = command(folder, *changes, f"cluster.address={nodes.address}")
    try:
        children = psutil.Process(driver.pid).children
        until(lambda: steps_of(folder) >= 7 and (folder / "evals.jsonl").exists(), PATIENCE)
        own, actors = children(recursive=True), actors_below()
        assert own  # the tracker
        assert len(actors) == 3
        began = nodes.kill_head(*kinds)
        _, said = driver.communicate(timeout=PATIENCE)
        took = time.monotonic() - began
        _, left = psutil.wait_procs(own, timeout=10)
        assert not left
        until(lambda: nodes.ended(actors), 150)  # Ray ends what is on other nodes after a minute
    finally:
        driver.kill()
        nodes.close()
    with capsys.disabled():
        print(f"\nthe driver ended after {took:.0f} s:\n{said}")
    assert driver.returncode == 1
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if line.startswith("scalerl: [cluster]: ")]
    assert "--resume goes on" in line
    assert took < SILENCE + cluster_watch.GRACE + 30
    before = steps_of(folder)
    with simulated(3, 1) as others:
        driver = command(folder, f"cluster.address={others.address}", resume=True)
        try:
            until(lambda: steps_of(folder) > before, PATIENCE)
            next(p for p in actors_below() if "Generator" in p.name()).kill()
            out, said = driver.communicate(timeout=PATIENCE)
        finally:
            driver.kill()
    assert driver.returncode == 0, said
    assert json.loads(out)["status"] == "finished"  # and Ray has said nothing there
    check_record(folder, 250)


_LOCAL = """
import time

import psutil

from scalerl.rl.workers.ray.cluster_watch import ClusterLostError, check
from scalerl.rl.workers.ray.session import connected
from scalerl.rl.config.cluster import Cluster, ClusterTimeouts

below = []
try:
    with connected(Cluster(address="local", timeouts=ClusterTimeouts(heartbeat=5))):
        below = psutil.Process().children(recursive=True)
        next(p for p in below if p.name() == "gcs_server").kill()
        while True:
            time.sleep(0.5)
            check()
except ClusterLostError:
    left = psutil.wait_procs(below, timeout=30)[1]
    print("of", len(below) > 3, "left", [p.name() for p in left])
"""


@pytest.mark.slow
def test_a_local_cluster_whose_head_dies_leaves_nobody_behind():
    done = subprocess.run([sys.executable, "-c", _LOCAL], capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout == "of True left []\n", done.stderr
