"""Something that is done in a process of its own, and killed at a given step of what it does to its files."""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

_CHANGING = {"open", "os.rename", "os.remove", "os.truncate", "os.mkdir", "os.rmdir", "os.link"}
DONE = 0
KILLED = 9


def killed_at(step: int, folder: Path, do: Callable[[], object]) -> int:
    """Do it in a fork, which ends before its `step`-th call that changes or opens a file in `folder`.

    Returns KILLED, DONE if it came to its end first, or 1 if it raised.
    """
    child = os.fork()
    if not child:
        _die_at(step, str(folder))
        try:
            do()
            os._exit(DONE)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _die_at(step: int, folder: str) -> None:
    seen = 0

    def count(event: str, args: tuple[object, ...]) -> None:
        nonlocal seen
        # A file that is opened by the handle of its folder has a bare name.
        if event in _CHANGING and (str(args[0]).startswith(folder) or _is_bare_record(args[0])):
            seen += 1
            if seen >= step:
                os._exit(KILLED)

    sys.addaudithook(count)


def _is_bare_record(path: object) -> bool:
    return isinstance(path, str) and path.endswith(".jsonl") and "/" not in path
