"""Where the processes of a run on a cluster of its own can be reached from: this machine."""

from ipaddress import ip_address

import psutil
import pytest
from cluster_runs import SMALL, command, steps_of
from ray_nodes import until

PATIENCE = 240


def listening(process):
    """The addresses at which a process listens."""
    try:
        found = process.net_connections(kind="inet")
    except psutil.Error:
        return set()
    return {ip_address(c.laddr.ip) for c in found if c.status == psutil.CONN_LISTEN}


def is_own(address):
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


@pytest.mark.slow
def test_all_of_a_run_listens_on_the_loopback_alone(small_base, tmp_path):
    """Ray, the store through which the ranks meet, that of a broadcast, and gloo."""
    folder = tmp_path / "run"
    parts = ["cluster.trainers=2", "cluster.learner.kind=fsdp2", "cluster.transport.kind=gloo"]
    changes = [f"model={small_base}", *SMALL, *parts, "cluster.address=local", "budget.amount=60"]
    driver = command(folder, *changes)
    try:
        until(lambda: steps_of(folder) >= 5 or driver.poll() is not None, PATIENCE)
        found = {p.name(): listening(p) for p in psutil.Process(driver.pid).children(recursive=True)}
        _, said = driver.communicate(timeout=PATIENCE)
    finally:
        driver.kill()
    assert driver.returncode == 0, said
    assert {"gcs_server", "raylet"} < set(found)
    assert found["raylet"]
    assert any("TrainerActor" in name and addresses for name, addresses in found.items())
    elsewhere = {name: addresses for name, addresses in found.items() if not all(map(is_own, addresses))}
    assert not elsewhere
