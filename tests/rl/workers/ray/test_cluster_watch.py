"""What a driver notices of its cluster's end, by sockets that stand for the head and for Ray on its node."""

import logging
import socket
import subprocess
import sys
import time

import pytest
from ray_nodes import until

from scalerl.errors import WorkerError
from scalerl.rl.workers.ray import cluster_watch
from scalerl.rl.workers.ray.cluster_watch import ClusterLostError, ClusterWatch, watched


class Listening:
    """A head, and Ray's part on a node: addresses at which somebody listens."""

    def __init__(self, folder):
        self.sockets = {"head": socket.create_server(("127.0.0.1", 0)), "own": socket.socket(socket.AF_UNIX)}
        self.own = str(folder / "raylet")
        self.sockets["own"].bind(self.own)
        self.sockets["own"].listen()
        self.port = self.sockets["head"].getsockname()[1]
        self.head = f"127.0.0.1:{self.port}"

    def end(self, who):
        self.sockets[who].close()

    def come_back(self):
        self.sockets["head"] = socket.create_server(("127.0.0.1", self.port))


@pytest.fixture
def there(tmp_path):
    listening = Listening(tmp_path)
    yield listening
    for each in listening.sockets.values():
        each.close()


def use_ray(seconds=20):
    """What a driver does: it asks before every use."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        cluster_watch.check()
        time.sleep(0.01)


def lose(there, who, heartbeat=60.0, then=use_ray):
    """A run that loses somebody, and goes on."""
    with watched(there.head, there.own, heartbeat):
        cluster_watch.check()
        assert not cluster_watch.gone()
        there.end(who)
        then()


def test_nobody_is_asked_where_there_is_no_cluster():
    cluster_watch.check()
    assert not cluster_watch.gone()


def test_whoever_asks_is_told_that_the_head_is_gone(there):
    with pytest.raises(ClusterLostError) as told:
        lose(there, "head", heartbeat=1.0)
    said = str(told.value)
    assert said.startswith(f"[cluster]: its head at {there.head} is gone: no answer for ")
    assert said.endswith("--resume goes on, on a new cluster")
    cluster_watch.check()  # it is over


def test_a_head_that_comes_back_in_time_has_been_waited_for(there, caplog):
    with caplog.at_level(logging.WARNING, logger="scalerl"), watched(there.head, there.own, 60.0):
        there.end("head")
        until(lambda: caplog.records, 30)
        there.come_back()
        assert not cluster_watch.gone()
        cluster_watch.check()
    (said,) = [record.getMessage() for record in caplog.records]
    assert "does not answer (" in said
    assert "the run waits for it 60 s (cluster.timeouts.heartbeat)" in said


def test_the_end_of_ray_on_this_node_is_told_at_once(there):
    with pytest.raises(ClusterLostError, match="Ray has ended on this node; "):
        lose(there, "own")


def test_what_comes_of_the_loss_is_told_as_the_loss(there):
    def complain():
        raise WorkerError("generator 0 is lost")

    with pytest.raises(WorkerError, match="generator 0 is lost"), watched(there.head, there.own, 60.0):
        complain()
    with pytest.raises(ClusterLostError, match="is gone"):
        lose(there, "head", then=complain)


def test_a_run_that_does_not_end_by_itself_is_ended(there, monkeypatch):
    monkeypatch.setattr(cluster_watch, "GRACE", 0.2)
    ended = []
    monkeypatch.setattr(cluster_watch, "_end", ended.append)
    closed, stuck = (ClusterWatch(there.head, there.own, 60.0) for _ in range(2))
    closed.close()
    there.end("own")
    until(lambda: ended, 30)
    assert [why is stuck.lost for why in ended] == [True]  # and not the equal text of the closed one


@pytest.mark.parametrize("by", ["itself", "Ray"])
def test_a_process_that_is_ended_has_last_words(by):
    how = {"itself": "pass", "Ray": "os._exit(1)"}[by]
    imported = "import os\nfrom scalerl.rl.workers.ray.cluster_watch import last_words"
    code = f"{imported}\nwith last_words():\n    {how}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    said = (
        "scalerl: [cluster]: this process was ended by Ray, or from outside; the run folder is whole up to "
    )
    assert done.stderr.startswith(said) == (by == "Ray")
    assert done.stderr.count("\n") == (by == "Ray")
