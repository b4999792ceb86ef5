"""The processes that execute a task's verifier; this module never imports torch.

    supervisor --- the task, pickled, in base64 ---> template: loads it, then forks a worker on request
    supervisor <-- {"ready", "forks", "code"} or {"error"} -- template
    supervisor --- (nonce, prompt, turns, check) --> worker: verifies one completion at a time
    supervisor <-- nonce, state, verdict ----------- worker

`turns` is a list of a completion's texts to verify, or a dict with those that an environment answers.

The template never sees a completion, so a worker forked from it starts in a known state. If it cannot be
forked (it has threads, or this is not Linux), the template itself becomes the worker, once.

A verifier shares its process with this code and can replace functions that the code uses. So a worker's loop
uses C functions that were bound beforehand, formats its answer by operators, and looks for replaced builtins
after every completion. The known answers of `scalerl.rl.verify.supervisor` catch what this misses.
"""

import base64
import contextlib
import ctypes
import gc
import json
import marshal
import numbers
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Iterable
from operator import is_, itemgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from scalerl.errors import ScalerlError
from scalerl.own_code import loaded_files
from scalerl.rl.types import Prompt, Reward, UserText
from scalerl.rl.workers.signals import leave_signals

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_SIZE = struct.Struct("<I")
MAX_ANSWERS = 30_000
"""The most bytes of an environment's answers to a turn."""
_Watched = list[tuple[Any, Callable[[Any], tuple[Any, ...]], tuple[Any, ...]]]


def main(fd: int, parent: int, memory: int) -> None:
    """Load the task received over the socket `fd`, and fork workers on request, with `memory` bytes each."""
    os.set_inheritable(fd, False)
    _restrain(parent, memory)
    control = socket.socket(fileno=fd)
    try:
        task = pickle.loads(base64.b64decode(control.makefile("rb").readline()))
        task.prepare()
    except MemoryError:
        os._exit(1)
    except Exception as error:
        _send(control, {"error": _one_line(error)})
        return
    forks = sys.platform == "linux" and len(list(Path("/proc/self/task").iterdir())) == 1
    gc.collect()
    gc.freeze()  # a garbage collection in a fork would write to every page, and so copy it
    _send(control, {"ready": True, "forks": forks, "code": loaded_files()})
    _serve(control, task, forks)


def _serve(control: socket.socket, task: Any, forks: bool) -> None:
    """Answer requests: a descriptor is the channel for a new worker, a number the pid of a worker to reap."""
    own = [sys.modules[__name__], sys.modules["scalerl.rl.types"], Prompt, Reward]
    watched = _watch([sys.modules["builtins"], json, json.encoder, json.decoder, *own])
    modules = _watch(module for module in list(sys.modules.values()) if isinstance(module, ModuleType))
    while True:
        request, fds, _, _ = socket.recv_fds(control, 64, 1)
        if not request:
            return
        if not fds:
            status = os.waitstatus_to_exitcode(os.waitpid(int(request), 0)[1])
            control.sendall(b"%d\n" % status)
            continue
        parent = os.getpid()
        pid = os.fork() if forks else 0
        if pid:
            os.close(fds[0])
        else:
            if not forks:
                control.sendall(b"%d\n" % parent)
            control.close()
            if forks:
                os.setsid()  # so that signals to its process group do not reach the template
                _die_with(parent)
            _work(task, fds[0], watched, modules)
            os._exit(0)
        control.sendall(b"%d\n" % pid)


def _work(task: Any, fd: int, watched: _Watched, modules: _Watched) -> None:
    """Verify completions received over `fd` until it is closed."""
    os.set_inheritable(fd, False)  # a received descriptor would pass to every program that is started
    os.register_at_fork(after_in_child=lambda: _close(fd))
    getpid, leave, write, loads, size_of = os.getpid, os._exit, os.write, marshal.loads, _SIZE.unpack
    exactly, verify, changed, prompt_of = _exactly, _verify, _changed, Prompt.from_json
    myself = getpid()
    while True:
        size = exactly(fd, 4)
        nonce, prompt, turns, check = loads(exactly(fd, size_of(size)[0]))
        state, verdict = verify(task, prompt_of(prompt), turns)
        if getpid() != myself:  # the verifier forked, and this copy must not answer beside its parent
            leave(1)
        if changed(watched) or (check and changed(modules)):
            state = b"changed"
        answer = b"%b %b %b\n" % (nonce, state, verdict)
        while answer:
            answer = answer[write(fd, answer) :]


def _verify(task: Any, prompt: Prompt, turns: Any) -> tuple[bytes, bytes]:
    """Return the state of the process after the verification, and the verdict."""
    try:
        if isinstance(turns, dict):
            return b"ok", _answered(task.respond(prompt, turns["turns"]))
        # Repeats `scalerl.rl.tasks.task.verdict`, which a verifier could replace unnoticed.
        if len(turns) > 1:
            return b"ok", _checked(task.verify_turns(prompt, turns))
        return b"ok", _checked(task.verify(prompt, turns[0]))
    except MemoryError:
        os._exit(1)  # the process cannot be trusted any more
    except Exception as error:
        return b"ok", _failure(b"raised", _one_line(error))
    except BaseException as error:  # a verifier's SystemExit or KeyboardInterrupt is an error like others
        return b"exit", _failure(b"raised", _one_line(error))


def _checked(
    reward: Any, isinstance: Any = isinstance, float: Any = float, bool: Any = bool, abs: Any = abs
) -> bytes:
    """Return the verdict for a reward; the other arguments are builtins from before the verifier ran."""
    if isinstance(reward, bool) or type(reward).__name__ == "bool":  # numpy has a bool of its own
        return b"verdict %d %a" % (bool(reward), 1.0 if reward else -1.0)
    if not isinstance(reward, Reward):
        return _failure(b"nonsense", f"returned {type(reward).__name__}, not a Reward or a bool")
    value, correct = reward.value, reward.correct
    if not isinstance(value, numbers.Real) or not abs(value) <= sys.float_info.max:
        return _failure(b"nonsense", "the value of its reward is not a finite number")
    if not isinstance(correct, bool) and type(correct).__name__ != "bool":
        return _failure(b"nonsense", "`correct` of its reward is not a bool")
    if reward.failed is not None:
        return _failure(b"raised", str(reward.failed))
    return b"verdict %d %a" % (bool(correct), float(value))


def _answered(answers: Any) -> bytes:
    """Return the answers of an environment; as its process answers only once, builtins are safe to use."""
    if not isinstance(answers, list | tuple) or not all(isinstance(one, str) for one in answers):
        return _failure(b"nonsense", f"respond returned {type(answers).__name__}, not a list of texts")
    by_user = [[isinstance(one, UserText), one] for one in answers]
    data = json.dumps(by_user, ensure_ascii=False).encode(errors="replace")
    if len(data) > MAX_ANSWERS:
        return _failure(b"nonsense", f"its answers have {len(data)} bytes, and {MAX_ANSWERS} are allowed")
    return b"answers %b" % data.hex().encode()


def _failure(reason: bytes, detail: str) -> bytes:
    return b"%b %b" % (reason, detail[:300].encode(errors="replace").hex().encode())


def _one_line(error: BaseException) -> str:
    if isinstance(error, ScalerlError):
        return str(error)
    return traceback.format_exception_only(error)[-1].strip().splitlines()[0][:300]


def _watch(spaces: Iterable[Any]) -> _Watched:
    """Return the current functions and classes in the name spaces of modules and classes."""
    watched: _Watched = []
    for space in map(vars, spaces):
        names = [name for name, value in list(space.items()) if callable(value) or type(value) is classmethod]
        if names:
            get = itemgetter(*names, names[0])  # with a single name it would not return a tuple
            watched.append((space, get, get(space)))
    return watched


def _changed(watched: _Watched, all: Any = all, map: Any = map, is_: Any = is_) -> bool:
    """Return whether any watched name has a new value."""
    for space, get, values in watched:
        try:
            if not all(map(is_, get(space), values)):
                return True
        except KeyError:
            return True
    return False


def _exactly(fd: int, size: int, read: Any = os.read, leave: Any = os._exit) -> bytes:
    """Read `size` bytes; exit at the end of the channel."""
    data = b""
    while size > 0:
        part = read(fd, size)
        if not part:
            leave(0)
        data += part
        size -= part.__len__()
    return data


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):  # the verifier has closed it
        os.close(fd)


def _restrain(parent: int, memory: int) -> None:
    """Limit the memory of this process, mask Ctrl-C, and tie its life to its parent's."""
    leave_signals()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        if held >= memory:  # with this limit Python would fail anywhere, with any exception
            os._exit(1)
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    _die_with(parent)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process with its parent, even during a loop in C (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call above
        os._exit(1)


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    control.sendall(json.dumps(message).encode() + b"\n")
