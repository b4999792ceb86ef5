"""CPU seconds that a program takes in the sandbox, and how many of them two cores verify in a minute.

    python benchmarks/sandbox.py [--programs 40]

For every backend that works here: a program with input and output, and a function with an assert, which takes
two sandboxes. Beside them the same program in a bare Python, without any sandbox. CPU time is that of all
processes, so that what else runs on the machine hardly matters.
"""

import argparse
import os
import resource
import subprocess
import time
from collections.abc import Callable

from scalerl.errors import InputError
from scalerl.rl.sandbox.find import find_backend, find_python
from scalerl.rl.sandbox.sandbox import Sandbox
from scalerl.rl.verify import proc

PROGRAM = "print(sum(map(int, input().split())))"
CODE = "def total(numbers):\n    return sum(numbers)"
TESTS = {"tests": ["assert total([1, 2]) == 3"], "setup": "", "reference": "", "entry_point": ""}
ASKED = 200  # programs a minute on two cores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--programs", type=int, default=40, help="of each kind")
    n = parser.parse_args().programs
    proc.adopt_orphans()  # also count processes that bubblewrap leaves behind
    python = find_python("")
    bare = measured(
        n, lambda: subprocess.check_output([python.executable, "-S", "-c", PROGRAM], input=b"1 2")
    )
    print("| | CPU ms | times bare Python | a minute on two cores | times the 200 asked |")
    print("|---|---|---|---|---|")
    show("bare Python, no sandbox", bare, bare)
    for name in ("bwrap", "namespaces"):
        try:
            sandbox = Sandbox(find_backend(name), python)
        except InputError as error:
            print(f"{name}: {error}")
            continue
        assert sandbox.run(PROGRAM, b"1 2", 60.0).output == b"3\n"
        assert sandbox.check(CODE, TESTS, 60.0).verdict == "passed"
        show(f"{name}: input and output", measured(n, lambda: sandbox.run(PROGRAM, b"1 2", 60.0)), bare)  # noqa: B023
        show(f"{name}: function and asserts", measured(n, lambda: sandbox.check(CODE, TESTS, 60.0)), bare)  # noqa: B023


def measured(n: int, verify: Callable[[], object]) -> float:
    """Return the CPU seconds of one call, including all processes that it starts."""
    verify()
    began = cpu_seconds()
    for _ in range(n):
        verify()
    return (cpu_seconds() - began) / n


def cpu_seconds() -> float:
    while proc.descendants(os.getpid()):
        time.sleep(0.01)
    proc.reap(())
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def show(name: str, seconds: float, bare: float) -> None:
    minute = 2 * 60 / seconds
    print(f"| {name} | {1e3 * seconds:.1f} | {seconds / bare:.1f} | {minute:,.0f} | {minute / ASKED:.1f} |")


if __name__ == "__main__":
    main()
