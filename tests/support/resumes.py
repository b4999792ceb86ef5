"""Resumes in processes of their own: python resumes.py MODEL CUT FOLDER race|kill NUMBER...

The processes are forked from this one, which has loaded what trains and done nothing with it: a resume
begins at once. Prints a JSON line for each number: seconds by which the second of two resumes comes later, or
the file operation at which a resume is killed, before another goes on.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cut_runs import recipe_of, run
from killed_at import killed_at

from scalerl.errors import ScalerlError


def main() -> None:
    """As the module says."""
    model, cut, folder = map(Path, sys.argv[1:4])
    recipe = recipe_of(model)
    for number in sys.argv[5:]:
        path = shutil.copytree(cut, folder / number)
        try_once = {"race": race, "kill": kill}[sys.argv[4]]
        print(json.dumps(try_once(lambda path=path: run(recipe, path, resume=True), float(number), path)))


def race(resume: Callable[[], object], later: float, path: Path) -> dict[str, Any]:
    """Two of them."""
    started, said = time.monotonic(), Path(f"{path}.said")
    first = forked(resume, said)
    time.sleep(later)
    second = forked(resume, said)
    ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in (second, first)]
    seconds = time.monotonic() - started
    return {"path": str(path), "status": sorted(ended), "said": said.read_text(), "seconds": seconds}


def kill(resume: Callable[[], object], number: float, path: Path) -> dict[str, Any]:
    """One that is killed, and another."""
    said = Path(f"{path}.said")
    killed = killed_at(int(number), path, resume)
    status = os.waitstatus_to_exitcode(os.waitpid(forked(resume, said), 0)[1])
    return {"path": str(path), "status": [killed, status], "said": said.read_text()}


def forked(do: Callable[[], object], said: Path) -> int:
    """Do it in a fork, whose number is returned; its errors go to `said`."""
    said.touch()
    if child := os.fork():
        return child
    status = 1
    try:
        do()
        status = 0
    except ScalerlError as error:
        with said.open("a") as file:
            file.write(f"{error}\n")
        status = error.exit_status
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
