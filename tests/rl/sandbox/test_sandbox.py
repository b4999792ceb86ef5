"""The sandbox for honest code: what programs may do, what tests may ask, what is recorded and refused."""

import re
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from sandboxes import backend_or_skip

from scalerl.errors import InputError
from scalerl.rl.sandbox import find
from scalerl.rl.sandbox.backend import SandboxError
from scalerl.rl.sandbox.find import find_backend, find_python
from scalerl.rl.sandbox.plain import NotPlainError, decode, encode
from scalerl.rl.sandbox.sandbox import Sandbox
from scalerl.rl.sandbox.seccomp import _ALLOWED, _CHECKED, MACHINES, filter_for
from scalerl.rl.verify import proc

REFUSAL = "task.sandbox: no sandbox for code works here"


@pytest.fixture(params=["bwrap", "namespaces"])
def sandbox(request):
    return Sandbox(backend_or_skip(request.param), find_python(""), 512 << 20)


def checked(sandbox, code, *tests, setup="", reference="", entry_point=""):
    given = {"tests": tests, "setup": setup, "reference": reference, "entry_point": entry_point}
    return sandbox.check(code, given, 10.0)


def test_a_program_reads_and_prints(sandbox):
    ran = sandbox.run("import sys\nprint(sum(map(int, sys.stdin)))\nsys.exit(3)", b"1\n2\n", 10.0)
    assert (ran.output, ran.status, ran.stopped) == (b"3\n", 3, None)


def test_a_program_has_threads_files_and_the_standard_library(sandbox):
    program = """
import asyncio, decimal, random, sqlite3, tempfile, threading
from concurrent.futures import ThreadPoolExecutor
threading.stack_size(64 << 20)
print(list(ThreadPoolExecutor(4).map(abs, [-1, 2])), asyncio.run(asyncio.sleep(0.01, 5)))
with tempfile.TemporaryFile() as file:
    file.write(bytes(1 << 20))
    print(file.tell(), sqlite3.connect(":memory:").execute("select 7").fetchall(), hash("a") == hash("a"))
print(open("/dev/null").read() == "", len(set("abcdef")), __name__)
"""
    ran = sandbox.run(program, b"", 10.0)
    assert ran.output.decode().splitlines() == ["[1, 2] 5", "1048576 [(7,)] True", "True 6 __main__"], (
        ran.errors
    )


def test_many_threads_fit_into_the_memory_of_a_program(sandbox):
    program = """
import threading
barrier = threading.Barrier(41)
def work():
    barrier.wait()
    print(sum(range(10 ** 4)) and len([bytearray(10 ** 5) for _ in range(10)]), end="")
    barrier.wait()
for _ in range(40):
    threading.Thread(target=work).start()
barrier.wait()
barrier.wait()
"""
    ran = sandbox.run(program, b"", 20.0)
    assert (ran.status, ran.output) == (0, b"10" * 40), ran.errors


def test_the_order_of_a_set_is_the_same_every_time(sandbox):
    outputs = {sandbox.run("print(set('abcdefgh'))", b"", 10.0).output for _ in range(3)}
    assert len(outputs) == 1


def test_what_a_program_prints_to_stderr_is_kept_and_a_crash_is_a_status(sandbox):
    ran = sandbox.run(
        "import ctypes, sys\nprint('why', file=sys.stderr, flush=True)\nctypes.string_at(0)", b"", 10.0
    )
    assert (ran.status, ran.errors) == (139, b"why\n")


def test_a_program_that_closes_its_output_is_waited_for(sandbox):
    ran = sandbox.run("import os, time\nos.close(1); os.close(2)\ntime.sleep(0.5)\nos._exit(7)", b"", 10.0)
    assert (ran.status, ran.stopped) == (7, None)


def test_a_python_below_tmp_is_refused(tmp_path):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        with pytest.raises(
            InputError, match=r"^task\.python: '/tmp/.* is below /tmp, of which the sandbox has its own"
        ):
            find_python(f"{folder}/bin/python")


def test_a_python_that_is_none_is_named():
    with pytest.raises(InputError, match=r"^task.python: '/no/such/python' cannot be run \(.*No such file"):
        find_python("/no/such/python")


# -- tests of functions --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "tests", "verdict"),
    [
        ("def f(x): return x + 1", ["assert f(1) == 2", "assert f(x=2) == 3"], "passed"),
        ("def f(x): return x - 1", ["assert f(1) == 2"], "failed"),
        ("def f(x): return [x, (x,), {x}, {x: b'x'}, 1.5, None, 1j, range(x)]",
         ["assert f(1) == [1, (1,), {1}, {1: b'x'}, 1.5, None, 1j, range(1)]",
          "assert type(f(1)[1]) is tuple and type(f(1)[2]) is set"], "passed"),
        ("def f(x): return 10 ** x", ["assert f(9000) == 10 ** 9000"], "passed"),
        ("from collections import *\ndef f(x): return Counter(x), OrderedDict(x=1), defaultdict(int, x=2)",
         ["assert f('aab') == ({'a': 2, 'b': 1}, {'x': 1}, {'x': 2})"], "passed"),
        ("def f(x): raise KeyError(x)", ["try:\n f(1)\n assert False\nexcept KeyError: pass"], "passed"),
        ("class E(Exception): pass\ndef f(x): raise E", ["f(1)"], "failed"),
        ("def g(x): return x", ["assert f(1) == 1"], "failed"),
        ("def f(x) return x", ["assert f(1) == 1"], "failed"),
        ("def f(x): return float('nan')", ["assert f(1) != f(1)"], "passed"),
        # What a test catches is still the end of the process, and no exception:
        ("import os\ndef f(x): os._exit(0)", ["try:\n f(1)\nexcept Exception: pass"], "failed"),
        ("import os\nfor n in range(3, 64):\n try: os.write(n, b'no reply\\n')\n except OSError: pass",
         ["try:\n f(1)\nexcept Exception: pass"], "failed"),
        ("def f(x): import nothing", ["f(1)"], "failed"),
        # Honest code whose tests need more than plain data:
        ("def f(x): return (i for i in x)", ["assert list(f([1])) == [1]"], "unsupported"),
        ("def f(x): return x(1)", ["assert f(lambda y: y + 1) == 2"], "unsupported"),
        ("class N:\n def __init__(self, v): self.v = v", ["assert N(1).v == 1"], "unsupported"),
        ("x = 3", ["assert x == 3"], "unsupported"),
        ("def f(x): x.sort()", ["y = [2, 1]\nf(y)\nassert y == [1, 2]"], "unsupported"),
        # Code that sorts what it was given, and is judged by what it returns:
        ("def f(x): x.sort(); return x[0]", ["assert f([2, 1]) == 1"], "passed"),
        ("def f(x): x.sort(); return x[1]", ["assert f([2, 1]) == 1"], "failed"),
        ("def f(x): x.sort(); return x[0]", ["y = [2, 1]\nassert f(y) == 1"], "passed"),
        ("def f(x): x.clear(); return []", ["y = [2, 1]\nassert f(y) == sorted(y)"], "unsupported"),
    ],
)  # fmt: skip
def test_verdicts(sandbox, code, tests, verdict):
    assert checked(sandbox, code, *tests).verdict == verdict


def test_an_unsupported_test_says_why(sandbox):
    assert (
        checked(sandbox, "def f(x): return iter(x)", "f([1])").why
        == "f returned a value of type list_iterator"
    )
    assert checked(sandbox, "def f(x): return x", "f(f)").why == "f is called with a value of type _Proxy"
    assert checked(sandbox, "x = 1", "x.real").why == "the test uses x.real"


def test_a_test_cannot_hide_that_it_is_unsupported(sandbox):
    test = "try:\n    f(len)\nexcept BaseException:\n    pass"
    assert checked(sandbox, "def f(x): return x", test).verdict == "unsupported"


def test_tests_that_need_a_package_which_is_not_there_are_no_fault_of_the_code(sandbox):
    reference = "import nothing\ndef f(): return nothing.value"
    verdict = checked(sandbox, "def f(): return 1", "assert f() == 1", reference=reference)
    assert (verdict.verdict, verdict.why) == (
        "unsupported",
        "its tests need what the Python of the sandbox lacks: No module named 'nothing'",
    )


def test_imports_of_the_reference_and_set_up_are_there_for_tests(sandbox):
    verdict = checked(
        sandbox,
        "def sum(a): return 2.0 * a",
        "assert math.isclose(sum(two), 4)",
        setup="two = 2",
        reference="import math\ndef sum(a): return a * 2",
    )
    assert verdict.verdict == "passed"


def test_the_helpers_of_a_prompt_are_not_those_of_the_code(sandbox):
    prompt = "def same(a, b):\n    return a == b\n\ndef f(x):\n    '''Return x + 1.'''\n"
    test = "def check(candidate):\n    assert same(candidate(1), 2)"
    forged = "def same(a, b): return True\ndef f(x): return 0"
    assert checked(sandbox, forged, test, setup=prompt, entry_point="f").verdict == "failed"
    honest = prompt + "    return x + 1"
    assert checked(sandbox, honest, test, setup=prompt, entry_point="f").verdict == "passed"


def test_code_keeps_its_state_between_calls(sandbox):
    code = "calls = 0\ndef f():\n    global calls\n    calls += 1\n    return calls"
    assert checked(sandbox, code, "assert f() == 1", "assert f() == 2").verdict == "passed"


@pytest.mark.parametrize(
    "value",
    [
        [1, (2, 3)],
        {"a": {1, 2}},
        -0.0,
        1 << 20_000,
        frozenset([1]),
        b"\x00\xff",
        "\ud800",
        {(1,): None},
        True,
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_values_come_back_as_they_were(value):
    found = decode(encode(value))
    assert (found, type(found)) == (value, type(value))
    assert isinstance(value, int) or repr(found) == repr(value)


def test_what_is_not_plain_is_not_sent():
    class Text(str):
        __slots__ = ()

    endless = []
    endless.append(endless)
    for value in (object(), Text("x"), iter([]), [Text("x")], {1: lambda: 0}, endless):
        with pytest.raises(NotPlainError):
            encode(value)


# -- what is there, and what is refused ----------------------------------------------------------------------


def test_the_backend_that_is_used_is_described(sandbox):
    name, version, *_ = sandbox.backend.description.split()
    assert name == sandbox.backend.name
    assert version.strip(",")[0].isdigit()
    assert "seccomp" in sandbox.backend.description


def test_where_nothing_works_it_is_refused_and_says_what_to_install(monkeypatch):
    find._checked_backend.cache_clear()
    monkeypatch.setenv("PATH", "/nowhere")  # no bwrap
    monkeypatch.setattr(find.kernel, "landlock_abi", lambda: 0)
    try:
        with pytest.raises(InputError, match=REFUSAL) as refused:
            find_backend("auto")
        with pytest.raises(InputError, match=REFUSAL):
            find_backend("namespaces")
    finally:
        find._checked_backend.cache_clear()
    if sys.platform == "linux":
        assert "bwrap: the program bwrap is not installed" in str(refused.value)
        assert "namespaces: the kernel has no Landlock" in str(refused.value)
    assert "apt install bubblewrap" in str(refused.value)


@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox requires Linux")
@pytest.mark.parametrize("backend", ["bwrap", "namespaces"])
def test_where_namespaces_are_forbidden_it_is_refused(backend):
    """As in a container: seccomp forbids unshare and clone with new namespaces."""
    code = f"""
import os, struct
from scalerl.rl.sandbox import kernel, seccomp
unshare, clone = {{"x86_64": (272, 56), "aarch64": (97, 220)}}[os.uname().machine]
load, equal, any_of, leave, allow, eperm, enosys = 0x20, 0x15, 0x45, 6, 0x7FFF0000, 0x50001, 0x50026
program = [
    (load, 0, 0, 0), (equal, 0, 1, unshare), (leave, 0, 0, eperm),
    (equal, 0, 1, 435), (leave, 0, 0, enosys), (equal, 0, 3, clone), (load, 0, 0, 16),
    (any_of, 0, 1, 0x7E020000), (leave, 0, 0, eperm), (leave, 0, 0, allow),
]
kernel._prctl("PR_SET_NO_NEW_PRIVS", 38, 1)
kernel.filter_system_calls(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
from scalerl.rl.sandbox.find import find_backend
find_backend({backend!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert REFUSAL in last
    assert "not permitted" in last or "not installed" in last or "no Landlock" in last, last


def test_a_sandbox_with_a_hole_is_refused(sandbox):
    """The trial that a backend must pass finds what does not hold: a folder of the host is there."""
    hole = str(Path(find.__file__).parent)
    if hole.startswith("/tmp/"):
        pytest.skip("this package is below /tmp, of which the sandbox has its own")
    python = replace(sandbox.python, read=(*sandbox.python.read, (hole, hole)))
    assert find._probe(sandbox.backend, python) == "its sandbox does not hold files"


def test_a_sandbox_that_does_not_start_is_no_verdict(sandbox):
    broken = Sandbox(sandbox.backend, replace(sandbox.python, executable="/no/python"))
    with pytest.raises(SandboxError, match=r"(does not start a sandbox|cannot be started).*No such file"):
        broken.run("print(1)", b"", 10.0)


def test_a_process_that_is_killed_takes_its_sandbox_with_it(sandbox, tmp_path):
    """As a verifier worker is at its time limit."""
    code = f"""
from scalerl.rl.sandbox.find import find_backend, find_python
from scalerl.rl.sandbox.sandbox import Sandbox
sandbox = Sandbox(find_backend({sandbox.backend.name!r}), find_python(""))
print("ready", flush=True)
sandbox.run("import ctypes, time; ctypes.CDLL(None).prctl(1, 0)\\nwhile True: time.sleep(1)", b"", 600.0)
"""
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert worker.stdout is not None
    with worker.stdout:
        assert worker.stdout.readline() == b"ready\n"
    until = time.monotonic() + 20
    while len(proc.descendants(worker.pid)) < 3 and time.monotonic() < until:  # outer, process 1, program
        time.sleep(0.02)
    time.sleep(0.3)
    below = proc.descendants(worker.pid)
    assert len(below) == 3
    worker.kill()
    worker.wait()
    while any(map(proc.running, below)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(map(proc.running, below))


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_refuses_what_it_does_not_know(machine):
    """Run by hand: every number but those that are listed, and other architectures."""
    column, architecture = MACHINES[machine]
    unshare, read, kill, clone = {1: (272, 0, 62, 56), 2: (97, 63, 129, 220)}[column]
    program = filter_for(machine, 42)

    def result(number, *arguments, arch=architecture):
        return run_filter(program, number, arch, arguments)

    allow, eperm = 0x7FFF0000, 0x50001
    assert result(read, 0, 0, 0) == allow
    assert [result(n) for n in (unshare, 425, 450, 999, read | 0x40000000)] == [eperm] * 5
    assert (result(kill, 42), result(kill, 43), result(kill, 0xFFFFFFFF)) == (allow, eperm, eperm)
    thread = 0x3D0F00
    assert (result(clone, thread), result(clone, 17), result(clone, thread | 0x10000000)) == (
        allow,
        eperm,
        eperm,
    )
    assert result(435) == 0x50026  # clone3 is not there
    assert result(read, 0, 0, 0, arch=0x40000003) == 0x80000000


def run_filter(program, number, arch, arguments):
    """Interpret a filter as the kernel does."""
    words = [number, arch, 0, 0] + [part for a in (*arguments, *[0] * 6)[:6] for part in (a & 0xFFFFFFFF, 0)]
    code = [struct.unpack_from("HBBI", program, at) for at in range(0, len(program), 8)]
    at, accumulator = 0, 0
    while True:
        operation, true, false, k = code[at]
        at += 1
        if operation == 0x20:
            accumulator = words[k // 4]
        elif operation == 0x54:
            accumulator &= k
        elif operation == 0x15:
            at += true if accumulator == k else false
        else:
            return k


def test_the_numbers_of_system_calls_are_those_of_the_kernel():
    """Where the kernel's headers are installed."""
    headers = {
        1: Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
        2: Path("/usr/include/asm-generic/unistd.h"),
    }
    for column, header in headers.items():
        if not header.exists():
            pytest.skip(f"no {header}")
        found = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text()))
        found["newfstatat"] = found.get("newfstatat" if column == 1 else "fstatat")
        for entry in (_ALLOWED + _CHECKED).split():
            row = entry.split(":")
            if row[column]:
                assert found[row[0]] == row[column], row[0]
