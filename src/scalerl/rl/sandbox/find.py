"""Finding a Python and a working sandbox backend on this machine.

A backend is used only after it has contained a program that probes its defences. Without one, no code is run.
"""

import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

from scalerl.errors import InputError, brief, brief_error
from scalerl.rl.sandbox import kernel
from scalerl.rl.sandbox.backend import BWRAP, FOLDER, BackendName, Interpreter, SandboxBackend, SandboxError
from scalerl.rl.sandbox.sandbox import THREADS, Sandbox
from scalerl.rl.sandbox.seccomp import MACHINES

# Eight threads must start, and THREADS more must not. Stacks are small, so that the limit on threads refuses
# them, not a lack of memory. A memfd could hold more than /tmp may, whose f_blocks is 0 without a limit.
_PROBE = """
import os, socket, threading
def refused(call, *args):
    try:
        call(*args)
    except (OSError, RuntimeError):
        return True
waiting = threading.Event()
threading.stack_size(1 << 18)
threads = [threading.Thread(target=waiting.wait, daemon=True) for _ in range({threads} + 8)]
for thread in threads[:8]:
    thread.start()
checks = {{
    "threads": refused(lambda: [thread.start() for thread in threads[8:]]),
    "processes": refused(os.fork),
    "network": refused(socket.socket),
    "files": refused(os.listdir, {here!r}) and not os.path.exists("/proc") and refused(open, "/probe", "w"),
    "memory": refused(os.memfd_create, "probe") and os.statvfs("/tmp").f_blocks > 0,
    "user": os.getuid() != 0,
}}
open("/tmp/probe", "w").write("x")
print(*sorted(name for name, held in checks.items() if not held), "held", flush=True)
os._exit(0)
"""
_INSTALL = (
    "install bubblewrap (apt install bubblewrap; dnf install bubblewrap), and allow user namespaces: "
    "sysctl kernel.unprivileged_userns_clone=1 or kernel.apparmor_restrict_unprivileged_userns=0; in a "
    "container, docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined"
)
# After importing every extension module, /proc/self/maps names all shared libraries that they need.
_QUERY = """
import glob, importlib, json, os, site, sys, sysconfig
for folder in [path for path in sys.path if path.endswith("lib-dynload")]:
    for name in sorted(os.listdir(folder)):
        if not name.startswith(("_test", "_xx", "xx")):
            try:
                importlib.import_module(name.partition(".")[0])
            except ImportError:
                pass
files = {line.split(None, 5)[-1].strip() for line in open("/proc/self/maps") if ".so" in line}
print(json.dumps({
    "executable": sys.executable,
    "library": [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")],
    "packages": [*site.getsitepackages(), *[p for p in [sys.prefix] if p != sys.base_prefix]],
    "shared": sorted({os.path.dirname(file) for file in files if file.startswith("/")}),
    "loaders": glob.glob("/lib*/ld-*.so*"),
}))
"""


@lru_cache
def find_python(path: str) -> Interpreter:
    """Return the Python at a path with its packages; for "", this Python with only the standard library.

    Raises:
        InputError: it cannot be run, or is below /tmp.
    """
    executable = path or os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    try:
        found = json.loads(
            subprocess.check_output([executable, "-I", "-c", _QUERY], stderr=subprocess.DEVNULL)
        )
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise InputError(f"task.python: {brief(executable)} cannot be run ({brief_error(error)})") from error
    executable = found["executable"]
    paths = [*found["library"], *found["shared"], *found["loaders"], *_links(executable), "/etc/ld.so.cache"]
    paths += found["packages"] if path else []
    if below := [path for path in paths if path.startswith("/tmp/")]:
        where = f"{brief(below[0])} is below /tmp, of which the sandbox has its own"
        raise InputError(f"task.python: {where}: put this Python elsewhere, or name another")
    read = {FOLDER: str(Path(__file__).parent)}
    # Sorted, so that a folder comes before its contents, which then need no mounts of their own.
    for target in sorted({*paths, *map(os.path.realpath, paths)}):
        above = any(target.startswith(f"{folder}/") for folder in read)
        if Path(target).exists() and not above:
            read[target] = os.path.realpath(target)
    return Interpreter(executable, tuple(read.items()), bool(path))


def _links(path: str) -> list[str]:
    """Return a path and the path behind every symbolic link that it leads through."""
    found = [path]
    while Path(found[-1]).is_symlink():
        found.append(os.path.normpath(Path(found[-1]).parent / Path(found[-1]).readlink()))
    return found


def find_backend(wanted: Literal["auto", "bwrap", "namespaces"], python: str = "") -> SandboxBackend:
    """Return the first backend that works here, or the one that is `wanted`.

    Raises:
        InputError: none works; the message says why, and what to install.
    """
    names: tuple[BackendName, ...] = get_args(BackendName) if wanted == "auto" else (wanted,)
    reasons: list[str] = []
    for name in names:
        found = _checked_backend(name, python)
        if isinstance(found, SandboxBackend):
            return found
        reasons.append(f"{name}: {found}")
    raise InputError(f"task.sandbox: no sandbox for code works here ({'; '.join(reasons)}); {_INSTALL}")


@lru_cache
def _checked_backend(name: BackendName, python: str) -> SandboxBackend | str:
    """Return a backend that has passed the probe, or the reason why there is none."""
    # Reasons are returned, not raised, as lru_cache keeps no exceptions and a check may start a sandbox.
    if sys.platform != "linux":
        return "requires Linux"
    if (machine := os.uname().machine) not in MACHINES:
        return f"no table of system calls for {machine}"
    version, landlock = os.uname().release, kernel.landlock_abi()
    if name == "namespaces" and not landlock:
        return "the kernel has no Landlock (Linux 5.13, with landlock in its list of security modules)"
    if name == "bwrap":
        try:
            version = subprocess.check_output([BWRAP, "--version"], text=True).split()[-1]
        except (OSError, subprocess.CalledProcessError):
            return "the program bwrap is not installed"
    backend = SandboxBackend(name, version, landlock)
    return _probe(backend, find_python(python)) or backend


def _probe(backend: SandboxBackend, python: Interpreter) -> str:
    """Return what a sandbox fails to contain, or why it does not start; empty if it is sound."""
    program = _PROBE.format(threads=THREADS, here=str(Path(__file__).parent))
    try:
        ran = Sandbox(backend, python).run(program, b"", seconds=20.0)
    except SandboxError as error:
        return str(error)
    if ran.output == b"held\n":
        return ""
    failed = ran.output.decode(errors="replace").removesuffix("held\n").strip()
    last = ran.errors.decode(errors="replace").strip().rpartition("\n")[2]
    return f"its sandbox does not hold {failed or brief(last)}"
