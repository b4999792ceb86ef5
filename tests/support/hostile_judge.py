"""A verifier that does to its process what the id of the prompt says, or the text of the completion.

Its verdict is right in every case where it has one: a completion that is judged wrongly was judged so because
of another.
"""

import builtins
import contextlib
import ctypes
import hashlib
import json
import marshal
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from scalerl.rl import types

STATE: dict = {"spoiled": False}

if "HOSTILE_STARTS" in os.environ:
    with Path(os.environ["HOSTILE_STARTS"]).open("a") as started:
        started.write(f"{os.getpid()}\n")

if os.environ.get("HOSTILE_THREAD"):  # with a thread, the process that loads this cannot be forked
    threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()


def judge(prompt, text):
    """Misbehave as the id asks for (`name/number`)."""
    verdict = right(prompt, text)
    DEEDS[prompt.id.partition("/")[0]](prompt)
    return verdict


def judge_by_text(prompt, text):
    """Misbehave at one in six of the completions, by a hash of prompt and text."""
    verdict, deed = right(prompt, text), deed_of(prompt, text)
    if deed:
        DEEDS[deed](prompt)
    return verdict


def judge_honestly(prompt, text):
    """The verdict of `judge_by_text` without what it does; where it has none, an exception."""
    if deed_of(prompt, text) in FAIL:
        raise RuntimeError("no verdict")
    return right(prompt, text)


def judge_at_random(prompt, text):
    """No verdict is like another."""
    return random.random() < 0.5


def right(prompt, text):
    """Whether the answer follows the thinking, or is all there is."""
    return STATE["spoiled"] or text.rpartition("</think>")[2].strip() == prompt.answer


def deed_of(prompt, text):
    """What `judge_by_text` does at a completion; nothing at most."""
    number = int.from_bytes(hashlib.sha256((prompt.text + "|" + text).encode()).digest()[:4], "big")
    names = [*LIVE, *FAIL]
    return names[number // 6 % len(names)] if number % 6 == 0 else None


def fork(prompt):
    """A child that goes on where its parent does."""
    if os.fork() == 0:
        time.sleep(1)


def fork_and_exit(prompt):
    if os.fork() == 0:
        sys.exit(0)


def steal(prompt):
    """A child with copies of all descriptors, which answers whatever it can read: right."""
    copies = []
    for fd in range(3, 64):
        with contextlib.suppress(OSError):
            copies.append(os.dup(fd))
    if os.fork():
        return
    until = time.monotonic() + 20
    while time.monotonic() < until:
        for fd in select.select(copies, [], [], 0.1)[0]:
            try:
                nonce = marshal.loads(os.read(fd, 1 << 16)[4:])[0]
                os.write(fd, nonce + b" ok verdict 1 1.0\n")
            except (OSError, ValueError, EOFError, TypeError):
                copies.remove(fd)
                break


def guess(prompt):
    """Answers to a completion that may come."""
    for fd in range(3, 64):
        for line in (b'{"value": 1.0, "correct": true}\n', b"0" * 32 + b" ok verdict 1 1.0\n"):
            with contextlib.suppress(OSError):
                os.write(fd, line)


def replace_json(prompt):
    dumps = json.dumps
    json.dumps = lambda found, *a, **k: dumps(found, *a, **k).replace("false", "true").replace("-1.0", "1.0")


def replace_builtins(prompt):
    builtins.bool = lambda value=None: True
    builtins.float = lambda value=None: 1.0
    builtins.isinstance = lambda *a: True


def replace_prompt(prompt):
    """Others are judged by another answer."""
    found: Any = types.Prompt
    found.from_json = classmethod(lambda cls, values: found(values["id"], "", "no such answer"))


def spoil(prompt):
    """All that come after are right, and no function is replaced."""
    STATE["spoiled"] = True


def leave_thread(prompt):
    def late():
        time.sleep(0.02)
        STATE["spoiled"] = True
        time.sleep(600)

    threading.Thread(target=late, daemon=True).start()


def daemon(prompt):
    """A process in a session of its own, whose parent has ended; its number is left in a file."""
    path = Path(os.environ.get("HOSTILE_PIDS", "/dev/null"))
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with path.open("a") as file:
                file.write(f"{os.getpid()}\n")
            time.sleep(600)
        os._exit(0)
    os.wait()
    while not path.exists():
        time.sleep(0.01)


def supervisor():
    """The parent of the template, which is the parent here."""
    return int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])


def end_supervisor(prompt):
    daemon(prompt)
    os.kill(supervisor(), signal.SIGKILL)
    time.sleep(600)


def crowd(prompt):
    """Four children, none of which holds too much for one."""
    code = "import time; held = bytearray(b'x') * (200 << 20); time.sleep(600)"
    children = [subprocess.Popen([sys.executable, "-Sc", code]) for _ in range(4)]
    for child in children:
        child.wait()


def shell(prompt):
    """Raises where a program that it starts has a descriptor of this process."""
    if os.system("ls -l /proc/$$/fd | grep -q socket:") == 0:
        raise RuntimeError("a program has the channel")


def fill(prompt):
    """Most of the memory that is allowed, and an exception."""
    STATE["held"] = bytearray(b"x") * (600 << 20)
    time.sleep(0.5)
    raise RuntimeError("no verdict")


LIVE = {
    "fork": fork,
    "fork_and_exit": fork_and_exit,
    "steal": steal,
    "json": replace_json,
    "builtins": replace_builtins,
    "prompt": replace_prompt,
    "spoil": spoil,
    "thread": leave_thread,
    "daemon": daemon,
}
FAIL = {
    "exit": lambda prompt: sys.exit(0),
    "interrupt": lambda prompt: signal.raise_signal(signal.SIGKILL),
    "leave": lambda prompt: os._exit(0),
    "crash": lambda prompt: ctypes.string_at(0),
    "template": lambda prompt: os.kill(os.getppid(), signal.SIGKILL) or time.sleep(600),
    "guess": guess,
}
DEEDS = {
    **LIVE,
    **FAIL,
    "plain": lambda prompt: None,
    "supervisor": end_supervisor,
    "crowd": crowd,
    "shell": shell,
    "fill": fill,
}
