"""Verifiers that do their worst, each in a process of its own: the run goes on, and everything is counted."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scalerl.errors import InputError, WorkerError
from scalerl.rl.algo.advantage import BatchStd
from scalerl.rl.algo.averaging import PromptAverage
from scalerl.rl.learner.batch import make_batch
from scalerl.rl.model.causal_lm import load_tokenizer
from scalerl.rl.tasks.dataset import Dataset
from scalerl.rl.tasks.verifiers import Function
from scalerl.rl.types import FAILED, Group, Limits, Reward
from scalerl.rl.verify.proc import descendants
from scalerl.rl.verify.verifier import PoolVerifier

BEHAVIOURS = '''
import ctypes, math, os, re, signal, subprocess, sys, time
import numpy
from scalerl.rl.types import Reward

def judge(prompt, text):
    """What the id of the prompt asks for."""
    return BEHAVIOURS[prompt.id](prompt, text)

def raises(prompt, text):
    raise ValueError("line one\\nline two")

def hides(prompt, text):
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        pass

def grows(prompt, text):
    held = []
    while True:
        held.append(numpy.empty(1 << 26, numpy.uint8))

def starts(prompt, text):
    path = prompt.answer
    child = subprocess.Popen(["sleep", "600"])
    open(path, "w").write(str(child.pid))
    time.sleep(600)

def forges(line):
    def judge(prompt, text):
        for fd in range(3, 2000):
            try:
                os.write(fd, line + b"\\n")
            except OSError:
                pass
        time.sleep(600)
    return judge

def meets(prompt, text):
    """True once the other has come too."""
    mine, other = prompt.answer.split("|")
    open(mine, "w").close()
    while not os.path.exists(other):
        time.sleep(0.01)
    return True

def prints(prompt, text):
    print('{"value": 1.0, "correct": true}', flush=True)
    os.write(1, b"noise")
    os.write(2, b"noise")
    return False

BEHAVIOURS = {
    "right": lambda p, t: True,
    "wrong": lambda p, t: Reward(-1.0, False),
    "half": lambda p, t: Reward(0.5, False),
    "says": lambda p, t: Reward(float(len(t)), True),
    "raises": raises,
    "exits": lambda p, t: sys.exit(0),
    "none": lambda p, t: None,
    "nan": lambda p, t: Reward(math.nan, True),
    "inf": lambda p, t: Reward(-math.inf, True),
    "huge": lambda p, t: Reward(10**400, True),
    "text": lambda p, t: Reward("1", True),
    "unsure": lambda p, t: Reward(1.0, None),
    "number": lambda p, t: 1.0,
    "leaves": lambda p, t: os._exit(0),
    "crashes": lambda p, t: ctypes.string_at(0),
    "closes": lambda p, t: os.closerange(3, 2000),
    "sleeps": lambda p, t: time.sleep(600),
    "regex": lambda p, t: re.match(r"(a+)+$", "a" * 60 + "b"),
    "hides": hides,
    "grows": grows,
    "bomb": lambda p, t: bytearray(1 << 45),
    "starts": starts,
    "prints": prints,
    "light": lambda p, t: not {"torch", "transformers"} & set(sys.modules),
    "garbles": forges(b"what is this"),
    "greets": forges(b'{"ready": true}'),
    "pays": forges(b'{"value": 1.0, "correct": true, "more": 1}'),
    "slow": lambda p, t: time.sleep(0.3) or True,
    "meets": meets,
}
'''
FAST = Limits(seconds=3.0, memory_gib=1.0, workers=2)  # what answers must do so on a busy machine as well


@pytest.fixture(scope="module")
def behaviours(tmp_path_factory):
    """The file of the verifiers above, as a task names it."""
    path = tmp_path_factory.mktemp("code") / "behaviours.py"
    path.write_text(BEHAVIOURS)
    return Function(f"{path}:judge")


@pytest.fixture
def make_verifier(behaviours, llama_folder):
    """A function that makes a verifier; those made are closed at the end."""
    made = []

    def make(limits=FAST, function=behaviours):
        made.append(PoolVerifier(Dataset("unread", verifier=function), load_tokenizer(llama_folder), limits))
        return made[-1]

    yield make
    for verifier in made:
        verifier.close()


def asking(make_rollout, name, answer):
    """A rollout whose prompt has this id and answer."""
    rollout = make_rollout(prompt=name)
    return replace(rollout, prompt=replace(rollout.prompt, answer=answer))


def process_ids(verifier):
    return [worker.process.pid for worker in verifier._pool._workers]


def alive(pid):
    """Whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


FATES = {
    "raised": ["raises", "exits"],
    "nonsense": ["none", "nan", "inf", "huge", "text", "unsure", "number"],
    "died": ["leaves", "crashes", "closes", "bomb", "grows", "garbles", "greets", "pays"],
    "timeout": ["sleeps", "regex", "hides"],
}


def test_each_failure_costs_one_completion_and_is_counted_and_the_order_is_kept(make_verifier, make_rollout):
    verifier = make_verifier()
    bad = [name for names in FATES.values() for name in names]
    groups = [[make_rollout(prompt=name) for name in (bad_one, "right", "wrong", "half")] for bad_one in bad]
    rewards = verifier.verify(groups)
    for reason, names in FATES.items():
        for name in names:
            failed, *others = rewards[bad.index(name)]
            assert failed == Reward(-1.0, False, reason), name
            assert others == [Reward(1.0, True), Reward(-1.0, False), Reward(0.5, False)], name
    assert verifier.failures == Counter({reason: len(names) for reason, names in FATES.items()})
    assert verifier.examples["raised"] == "raises: ValueError: line one"
    assert verifier.examples.keys() == FATES.keys()


def test_rewards_come_in_order_though_later_ones_are_ready_first(make_verifier, make_rollout):
    verifier = make_verifier(Limits(seconds=5, workers=3))
    groups = [[make_rollout(length=n, prompt="says") for n in (1, 2)] for _ in range(10)]
    groups[0][0] = make_rollout(prompt="slow")
    rewards = verifier.verify(groups)
    assert [len(group) for group in rewards] == [2] * 10
    assert rewards[0] == [Reward(1.0, True), Reward(2.0, True)]
    assert rewards[1:] == [[Reward(1.0, True), Reward(2.0, True)]] * 9
    assert verifier.verify([]) == []
    assert verifier.verify([[], [groups[1][0]]]) == [[], [Reward(1.0, True)]]


def test_workers_work_side_by_side(make_verifier, make_rollout, tmp_path):
    one, other = f"{tmp_path}/one", f"{tmp_path}/other"
    rollouts = [
        asking(make_rollout, "meets", f"{one}|{other}"),
        asking(make_rollout, "meets", f"{other}|{one}"),
    ]
    assert make_verifier(Limits(seconds=20, workers=2)).verify([rollouts]) == [[Reward(1.0, True)] * 2]


def test_what_was_truncated_has_failed_without_being_asked_about(make_verifier, make_rollout):
    verifier = make_verifier()
    group = [make_rollout(prompt="raises", truncated=True), make_rollout(prompt="right")]
    assert verifier.verify([group]) == [[FAILED, Reward(1.0, True)]]
    assert not verifier.failures


def test_the_text_is_without_its_end_token(make_verifier, make_rollout):
    verifier = make_verifier()
    ended = make_rollout(3, token_T=(9, 10, 1), prompt="says")  # two digits and <eos>
    assert verifier.verify([[ended]]) == [[Reward(2.0, True)]]


def test_what_a_verifier_prints_is_no_verdict(make_verifier, make_rollout, capfd):
    verifier = make_verifier()
    assert verifier.verify([[make_rollout(prompt="prints")] * 3]) == [[Reward(-1.0, False)] * 3]
    assert capfd.readouterr() == ("", "")


def test_workers_do_not_load_torch(make_verifier, make_rollout):
    assert make_verifier().verify([[make_rollout(prompt="light")]]) == [[Reward(1.0, True)]]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_a_killed_verifier_started_ends_with_it(make_verifier, make_rollout, tmp_path):
    rollout = asking(make_rollout, "starts", str(tmp_path / "pid"))
    assert make_verifier().verify([[rollout]])[0][0].failed == "timeout"
    pid = int((tmp_path / "pid").read_text())
    assert wait_until(lambda: not alive(pid))


def test_ctrl_c_is_not_for_the_workers(make_verifier, make_rollout):
    verifier = make_verifier(Limits(seconds=5, workers=1))
    for pid in process_ids(verifier):
        os.kill(pid, signal.SIGINT)
    time.sleep(0.1)
    assert verifier.verify([[make_rollout(prompt="right")]]) == [[Reward(1.0, True)]]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_signal_to_all_processes_of_a_job_ends_none_that_is_just_starting(make_verifier, make_rollout):
    before, signalled, over = descendants(os.getpid()), set(), threading.Event()

    def signal_all():
        while not over.is_set():
            for pid in descendants(os.getpid()) - before:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
                    signalled.add(pid)

    thread = threading.Thread(target=signal_all)
    thread.start()
    try:
        verifier = make_verifier(Limits(seconds=5, workers=1))
    finally:
        over.set()
        thread.join()
    assert signalled >= set(process_ids(verifier))
    assert len(signalled) <= 3  # supervisor, template, worker: none was started a second time
    assert verifier.verify([[make_rollout(prompt="right")]]) == [[Reward(1.0, True)]]


def test_processes_that_cannot_be_started_are_a_worker_error(make_verifier, make_rollout, monkeypatch):
    verifier = make_verifier(Limits(seconds=5, workers=1))
    (pid,) = process_ids(verifier)
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not alive(pid))
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(WorkerError, match="cannot be started: No such file"):
        verifier.verify([[make_rollout(prompt="right")]])
    with pytest.raises(WorkerError, match="cannot be started: No such file"):
        make_verifier()


@pytest.mark.skipif(sys.platform != "linux", reason="stopped processes are told apart by /proc")
def test_a_job_that_was_suspended_loses_no_supervisor(make_verifier, make_rollout, monkeypatch):
    """A frozen container: nothing is sent for longer than the heartbeat timeout, and nothing is looked at."""
    monkeypatch.setattr("scalerl.rl.verify.verifier_pool.HEARTBEAT_TIMEOUT", 4.0)
    verifier = make_verifier(Limits(seconds=5, workers=1))
    (pid,) = process_ids(verifier)
    os.kill(pid, signal.SIGSTOP)
    begun = verifier.start([[make_rollout(prompt="right")]])
    begun.wait(0)
    time.sleep(4.5)
    begun.wait(0)
    os.kill(pid, signal.SIGCONT)
    assert begun.wait(60)
    assert begun.result() == [[Reward(1.0, True)]]
    assert process_ids(verifier) == [pid]


@pytest.mark.skipif(sys.platform != "linux", reason="what is left is found by /proc")
def test_a_supervisor_that_hangs_is_replaced_with_all_that_it_has_started(make_verifier, make_rollout):
    verifier = make_verifier(Limits(seconds=5, workers=1))
    (worker,) = verifier._pool._workers
    hung = {worker.process.pid} | descendants(worker.process.pid)
    assert len(hung) >= 2  # its template, too
    worker.timeout = 1.0
    os.kill(worker.process.pid, signal.SIGSTOP)
    begun = verifier.start([[make_rollout(prompt="right")]])
    assert wait_until(lambda: begun.wait(0.1) or verifier._pool.lost)
    worker.timeout = 60.0  # the next may be slow to start
    assert begun.wait(60)
    assert begun.result() == [[Reward(1.0, True)]]
    assert "no progress for 1 s" in verifier._pool.lost[0]
    assert wait_until(lambda: not any(map(alive, hung)))


def test_a_worker_that_was_killed_between_two_calls_is_replaced(make_verifier, make_rollout):
    verifier = make_verifier(Limits(seconds=5, workers=1))
    (pid,) = process_ids(verifier)
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not alive(pid))
    assert verifier.verify([[make_rollout(prompt="right")] * 3]) == [[Reward(1.0, True)] * 3]


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found by /proc")
def test_a_template_that_loads_edited_code_says_so(make_verifier, make_rollout, tmp_path, caplog):
    """Its rewards are by the new code from then on, in the middle of the run."""
    file = tmp_path / "own.py"
    file.write_text("def judge(prompt, text):\n    return True\n")
    verifier = make_verifier(replace(FAST, workers=1), Function(f"{file}:judge"))
    (pid,) = process_ids(verifier)

    def restarted():
        for below in descendants(pid):
            os.kill(below, signal.SIGKILL)
        return verifier.verify([[make_rollout()]])[0][0]

    assert restarted() == Reward(1.0, True)
    assert not caplog.messages
    file.write_text("def judge(prompt, text):\n    return False\n")
    assert restarted() == Reward(-1.0, False)
    assert restarted() == Reward(-1.0, False)
    text = f"{file} has changed since the run began: the next process goes by the new code"
    assert caplog.messages == [text]


def test_an_interrupted_call_leaves_nothing_to_the_next(make_verifier, make_rollout):
    verifier = make_verifier(Limits(seconds=30, workers=2))

    def interrupt(signum, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            verifier.verify([[make_rollout(prompt=name) for name in ("sleeps", "wrong", "sleeps", "wrong")]])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert verifier.verify([[make_rollout(prompt="right")] * 3]) == [[Reward(1.0, True)] * 3]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal at the parent's end is Linux's")
def test_workers_in_a_loop_in_c_end_with_their_parent(behaviours):
    code = f"""
import json
from dataclasses import asdict
from scalerl.rl.tasks.dataset import Dataset
from scalerl.rl.tasks.verifiers import Function
from scalerl.rl.types import Limits, Prompt
from scalerl.rl.verify.verifier_pool import SupervisedVerifiers
workers = SupervisedVerifiers(Dataset("unread", verifier=Function({behaviours.name!r})), Limits(seconds=600))
print(*[worker.process.pid for worker in workers._workers], flush=True)
jobs = [json.dumps([asdict(Prompt(name, "", "")), [""]]).encode() for name in ("regex", "hides")]
workers.submit(jobs).wait(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        time.sleep(0.5)  # both are at it
        assert len(pids) == 2
        assert all(map(alive, pids))
        parent.kill()
    assert wait_until(lambda: not any(map(alive, pids)))


def test_closing_ends_the_processes_and_so_does_forgetting(make_verifier, behaviours, llama_folder):
    verifier = make_verifier()
    pids = process_ids(verifier)
    verifier.close()
    verifier.close()
    assert not any(map(alive, pids))
    forgotten = PoolVerifier(Dataset("unread", verifier=behaviours), load_tokenizer(llama_folder), FAST)
    pids = process_ids(forgotten)
    del forgotten
    assert not any(map(alive, pids))


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ("", "judge", "code.py has no judge$"),
        ("judge = 3", "judge", "code.py:judge is no function"),
        ("import nosuchpackage", "judge", "cannot be loaded .ModuleNotFoundError: .*nosuchpackage"),
        ("1 / 0", "judge", "cannot be loaded .ZeroDivisionError"),
        (None, "judge", "code.py:judge cannot be loaded .FileNotFoundError"),
    ],
)
def test_a_function_that_is_not_there_is_said_at_once(make_verifier, tmp_path, content, name, message):
    path = tmp_path / "code.py"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        make_verifier(function=Function(f"{path}:{name}"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "memory"), [("import os; os._exit(7)", 1.0), ("", 0.01)], ids=["status 7", "memory"]
)
def test_processes_that_never_start_are_an_error(make_verifier, tmp_path, content, memory):
    (tmp_path / "code.py").write_text(content)
    with pytest.raises(WorkerError, match=rf"do not start .* status .*memory_gib is {memory:g}\)"):
        make_verifier(Limits(memory_gib=memory), Function(f"{tmp_path / 'code.py'}:judge"))


def test_a_failed_verification_leaves_the_loss_as_a_truncated_completion_does(make_rollout):
    rollouts = [make_rollout(length=3) for _ in range(4)]
    cut = [*rollouts[:3], make_rollout(length=3, truncated=True)]
    rewards = [Reward(1.0, True), Reward(-1.0, False), Reward(-1.0, False), FAILED]
    failed = [*rewards[:3], Reward(-1.0, False, "timeout")]
    group = Group.of(rollouts, failed)
    assert group.failed == {3: "timeout"}
    assert group.correct_G.tolist() == [True, False, False, False]
    batches = [make_batch([g], BatchStd(), PromptAverage(), 100) for g in (group, Group.of(cut, rewards))]
    assert [len(batch) for batch in batches] == [3, 3]
    assert np.array_equal(batches[0].weight_NT, batches[1].weight_NT)
    assert np.array_equal(batches[0].advantage_N, batches[1].advantage_N)
    assert batches[0].advantage_N.sum() == pytest.approx(0)
    # It has no verdict, so that it leaves where truncated completions are kept, too.
    assert len(make_batch([group], BatchStd(), PromptAverage(), 100, keep_truncated=True)) == 3


@pytest.mark.parametrize(
    "bad",
    [{"seconds": 0}, {"seconds": float("inf")}, {"seconds": 1e7}, {"memory_gib": -1}, {"workers": 0}],
)
def test_limits_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Limits(**bad)
