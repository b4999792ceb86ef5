"""Workers in a Python of their own: what they are sent, and how they and what they have started end."""

import gc
import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import echoing
import psutil
import pytest
from echoing import ended, is_running

import scalerl
from scalerl.rl.workers.backend import WorkerLostError
from scalerl.rl.workers.processes import FreshPython, Processes, _GroupLeader, start_fork_server

PATHS = Path(scalerl.__file__).parents[1], Path(echoing.__file__).parent


@pytest.fixture
def backend(tmp_path):
    environment = {"PYTHONPATH": os.pathsep.join(map(str, PATHS))}
    return FreshPython(sys.executable, environment, tmp_path, ["0,1", None])


def receive(backend, process):
    until = time.monotonic() + 60
    while time.monotonic() < until:
        backend.wait([process], 0.1)
        if found := process.receive():
            return [(kind, value) for kind, value, _ in found]
    raise AssertionError("it sends nothing")


def test_it_is_sent_messages_and_sends_some(backend, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for number, devices in enumerate(["0,1", None]):
        process = backend.spawn("echo", number, echoing.echo, "hello")
        assert receive(backend, process) == [("started", ("hello", sys.executable, devices))]
        process.send({"a": [1, 2]})
        assert receive(backend, process) == [("echo", {"a": [1, 2]})]
        process.close()
        process.join()
        assert ended(process.pid)


@pytest.mark.parametrize("linux", ["5.3", "4.18"])
@pytest.mark.parametrize("how", ["kill", "close"])
def test_what_it_has_started_ends_with_it(backend, how, linux, monkeypatch):
    if linux == "4.18":
        monkeypatch.delattr(os, "pidfd_open")
    process = backend.spawn("echo", 0, echoing.echo, "hello")
    receive(backend, process)
    process.send("sleep")
    ((_, child),) = receive(backend, process)
    assert is_running(child)
    getattr(process, how)()
    process.join()
    assert ended(child)


def test_one_that_does_not_end_by_itself_is_killed(backend):
    process = backend.spawn("stay", 0, echoing.stay)
    receive(backend, process)
    process.close(0.2)
    process.join()
    assert ended(process.pid)


@pytest.mark.parametrize("forked", [True, False], ids=["forked", "fresh"])
def test_none_is_left_of_one_whose_arguments_cannot_be_pickled(backend, forked):
    start_fork_server()  # which stays
    processes = Processes() if forked else backend
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises((AttributeError, pickle.PicklingError)):
        processes.spawn("stay", 0, echoing.stay, lambda: None)
    assert not set(psutil.Process().children(recursive=True)) - before


@pytest.mark.parametrize(("message", "says"), [("exit", "exited with status 3"), (None, "killed by SIGKILL")])
def test_a_lost_one_says_how_it_ended_and_the_next_is_not_concerned(backend, message, says):
    process = backend.spawn("echo", 0, echoing.echo, "hello")
    receive(backend, process)
    if message:
        process.send(message)
    else:
        os.killpg(process.pid, signal.SIGKILL)
    with pytest.raises(WorkerLostError, match=says):
        receive(backend, process)
    process.kill()
    following = backend.spawn("echo", 0, echoing.echo, "again")
    del process
    gc.collect()  # which closes what the first had open
    time.sleep(0.5)
    assert receive(backend, following)[0][0] == "started"
    following.send("here")
    assert receive(backend, following) == [("echo", "here")]
    following.kill()


def test_an_error_is_in_its_log_and_reported(backend, tmp_path):
    process = backend.spawn("echo", 1, echoing.echo, "hello")
    receive(backend, process)
    process.send("fail")
    ((kind, why),) = receive(backend, process)
    assert (kind, why) == ("lost", "ValueError: as asked")
    process.kill()
    assert "ValueError: as asked" in (tmp_path / "vllm-1.log").read_text()


def test_threads_may_ask_at_once_whether_it_has_ended():
    """One of them waits for the process, and the others find it gone."""
    for _ in range(60):
        leader = _GroupLeader(subprocess.Popen(["true"], start_new_session=True))
        with ThreadPoolExecutor(4) as threads:
            asked = [threads.submit(leader.join) for _ in range(4)]
        assert [one.result() for one in asked] == [None] * 4
        assert leader.exitcode == 0


@pytest.fixture
def forked():
    """A function that starts a worker of `Processes`, and returns its process and what `tell` sends."""
    started = []

    def start(**options):
        backend = Processes(**options)
        started.append(backend.spawn("probe", 0, echoing.tell))
        return started[-1], *receive(backend, started[-1])[0][1]

    yield start
    for process in started:
        process.kill()


def test_a_worker_has_the_environment_of_its_own_start_and_shares_what_was_loaded(
    forked, monkeypatch, tmp_path
):
    monkeypatch.setenv("SCALERL_TEST", "first")
    _, first, parent, _, loaded = forked()
    assert (first, loaded) == (dict(os.environ), True)
    assert parent != os.getpid()
    monkeypatch.delenv("SCALERL_TEST")
    monkeypatch.setenv("SCALERL_OTHER", "second")
    monkeypatch.chdir(tmp_path)
    _, *second = forked(devices=["3"])
    assert second == [{**os.environ, "CUDA_VISIBLE_DEVICES": "3"}, parent, tmp_path, True]


def test_a_worker_is_started_afresh_where_a_library_has_read_another_environment(forked, monkeypatch):
    start_fork_server()
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    _, environment, parent, _, loaded = forked()
    assert (environment, parent, loaded) == (dict(os.environ), os.getpid(), False)


def test_what_is_preloaded_leaves_cuda_alone_and_draws_no_bars():
    """A fork of a process that has asked for its GPUs has none; one with a bar, that is killed, leaves its
    semaphore."""
    code = (
        "import torch\n"
        "def asked(*_): raise SystemExit('it asks for GPUs')\n"
        "for name in ('is_available', 'device_count', '_lazy_init'): setattr(torch.cuda, name, asked)\n"
        "import scalerl.rl.workers.preload, sys\n"
        "assert 'transformers.models.llama.modeling_llama' in sys.modules\n"
        "assert not sys.modules['transformers'].utils.logging.is_progress_bar_enabled()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


DRIVER = """
import signal, sys
import echoing
from scalerl.rl.workers.processes import Processes, start_fork_server

if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    start_fork_server()
    print(flush=True)
    while True:
        worker = Processes().spawn("probe", 0, echoing.tell)
        while not worker.channel.poll(0.1):
            pass
        ((_, (_, server, _, _), _),) = worker.receive()
        print(worker.pid, server, flush=True)
        sys.stdin.readline()
"""


@pytest.fixture
def driver(tmp_path):
    """A driver that prints a line as its fork server loads, and then starts workers as it is told to.

    It prints the numbers of a worker and its server, and of the next ones for each line.
    """
    (tmp_path / "driver.py").write_text(DRIVER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, PATHS))}
    command, pipe = [sys.executable, tmp_path / "driver.py"], subprocess.PIPE
    how = {"stdin": pipe, "stdout": pipe, "text": True, "env": environment, "start_new_session": True}
    with subprocess.Popen(command, **how) as process:
        process.stdout.readline()
        yield process
        process.kill()


def test_nothing_is_left_of_a_driver_that_is_killed_as_its_fork_server_loads(driver):
    until, children = time.monotonic() + 60, []
    while not any("forkserver" in " ".join(child.cmdline()) for child in children):
        assert time.monotonic() < until  # at first it is a fork that has not become that program
        children = psutil.Process(driver.pid).children()
    driver.kill()
    assert all(ended(child.pid) for child in children)


def test_a_fork_server_outlives_signals_to_its_group_and_is_replaced_and_ends_with_the_driver(driver):
    first, server = map(int, driver.stdout.readline().split())

    def following():
        driver.stdin.write("\n")
        driver.stdin.flush()
        return map(int, driver.stdout.readline().split())

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.killpg(driver.pid, number)
    second, same = following()
    assert same == server
    assert is_running(second)
    os.kill(server, signal.SIGKILL)
    assert ended(server)
    third, other = following()
    assert other != server
    driver.kill()
    assert all(map(ended, (first, second, third, other)))


def test_a_fork_server_that_does_not_start_is_an_error_that_a_pool_handles(tmp_path):
    code = (
        "import multiprocessing.spawn, echoing\n"
        "from multiprocessing import resource_tracker\n"
        "from scalerl.rl.workers.processes import Processes\n"
        "resource_tracker.ensure_running()\n"
        "multiprocessing.spawn._python_exe = b'/bin/false'\n"
        "try: Processes().spawn('probe', 0, echoing.tell)\n"
        "except OSError as error: print('as documented')"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, PATHS))}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment) == b"as documented\n"
