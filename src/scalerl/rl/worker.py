"""What runs in a worker process: one line of JSON in, one out. It never imports torch.

from the parent                          to the parent
the task, pickled, in base64             {"ready": true}  or  {"error": message}
[prompt, text]                           {"value", "correct"}  or  {"failed", "detail"}
"""

from __future__ import annotations

import base64
import ctypes
import json
import numbers
import os
import pickle
import resource
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def main(fd: int, parent: int, memory: int) -> None:
    """Judge what comes over the socket `fd` until it is closed, within `memory` bytes of address space."""
    os.set_inheritable(fd, False)
    _restrain(parent, memory)
    channel = socket.socket(fileno=fd)
    lines = channel.makefile("rb")

    def say(**message: Any) -> None:
        channel.sendall(json.dumps(message).encode() + b"\n")

    try:
        task = pickle.loads(base64.b64decode(next(lines)))
        if hasattr(task, "prepare"):
            task.prepare()
    except MemoryError:
        os._exit(1)
    except Exception as error:
        say(error=_one_line(error))
        return
    say(ready=True)
    for line in lines:
        say(**_judge(task, *json.loads(line)))


def _restrain(parent: int, memory: int) -> None:
    """Neither Ctrl-C nor the end of the parent must leave this process behind or in disorder."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):  # of a whole job: the trainer answers them
        signal.signal(number, lambda number, frame: None)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        # The kernel ends it even in a loop in C. Elsewhere it ends with its job, as the socket is closed.
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        if _address_space() >= memory:  # from here on Python would fail anywhere, with any exception
            os._exit(1)
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    if os.getppid() != parent:  # it ended before it could be watched
        os._exit(1)


def _address_space() -> int:
    """Of this process, in bytes; proc(5), `statm`."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _judge(task: Any, prompt: dict[str, Any], text: str) -> dict[str, Any]:
    from scalerl.rl.types import Prompt

    try:
        reward = task.verify(Prompt.from_json(prompt), text)
    except MemoryError:
        os._exit(1)  # what is left of this process is not to be trusted
    except BaseException as error:  # SystemExit and KeyboardInterrupt of a verifier are no better than others
        return {"failed": "raised", "detail": _one_line(error)}
    return _checked(reward)


def _checked(reward: Any) -> dict[str, Any]:
    from scalerl.rl.types import Reward

    if not isinstance(reward, Reward):
        return {"failed": "nonsense", "detail": f"returned {type(reward).__name__}, not a Reward"}
    value, correct = reward.value, reward.correct
    if not isinstance(value, numbers.Real) or not abs(value) <= sys.float_info.max:
        return {"failed": "nonsense", "detail": "the value of its reward is no finite number"}
    if not isinstance(correct, bool) and type(correct).__name__ != "bool":  # numpy has a bool of its own
        return {"failed": "nonsense", "detail": "its reward does not say whether the answer is correct"}
    if reward.failed is not None:
        return {"failed": "raised", "detail": str(reward.failed)[:300]}
    return {"value": float(value), "correct": bool(correct)}


def _one_line(error: BaseException) -> str:
    from scalerl.errors import ScalerlError

    if isinstance(error, ScalerlError):
        return str(error)
    return traceback.format_exception_only(error)[-1].strip()[:300]
