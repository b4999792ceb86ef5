"""What encloses sandboxed processes on this machine, and the Python that they run.

    bwrap        bubblewrap makes the namespaces and the root
    namespaces   namespaces.py does; Landlock must confirm it

Both go on in jail.py, with a user of its own (or a user namespace), limits, Landlock and seccomp. A backend
counts as there once it has held a program that tries the limits; where none does, nothing is run.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

from scalerl.errors import InputError, brief, brief_error
from scalerl.rl.sandbox import kernel
from scalerl.rl.sandbox.seccomp import MACHINES

BackendName = Literal["bwrap", "namespaces"]
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
FOLDER = "/jail"
"""Where the files of this folder are in the sandbox."""
_BOOT = f"""\
import sys, types
sys.path[:] = [path for path in sys.path if path]
for name in ("scalerl", "scalerl.rl", "scalerl.rl.sandbox"):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
module.__path__ = [sys.argv[1], {FOLDER!r}]
from scalerl.rl.sandbox.jail import main
main(int(sys.argv[2]))
"""
"""Imports jail.py without the package around it, which is not in the sandbox."""
_CAPABILITIES = {"CAP_SETGID": 6, "CAP_SETUID": 7, "CAP_SETPCAP": 8, "CAP_SYS_ADMIN": 21}
_PROBE = """
import os, socket, threading
def refused(call, *args):
    try:
        call(*args)
    except (OSError, RuntimeError):
        return True
waiting = threading.Event()
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


class SandboxError(Exception):
    """A sandbox did not start, so that nothing ran in it."""


@dataclass(frozen=True)
class Interpreter:
    """A Python to run in the sandbox, and the files that it needs."""

    executable: str
    read: tuple[tuple[str, str], ...]
    """Paths in the sandbox, and the real paths of what is there: folders and files, read-only."""
    packages: bool
    """Whether its site packages are importable; else the standard library alone is."""


@dataclass(frozen=True)
class Backend:
    """A way to enclose processes that works on this machine."""

    name: BackendName
    version: str
    """Of bubblewrap; of the kernel for `namespaces`."""
    landlock: int
    """The kernel's version of Landlock; 0 for none."""

    @property
    def description(self) -> str:
        """What is recorded of it, as `bwrap 0.8.0, user namespace, seccomp, landlock 7`."""
        user = "own user" if is_privileged() else "user namespace"
        landlock = f"landlock {self.landlock}" if self.landlock else "no landlock"
        return f"{self.name} {self.version}, {user}, seccomp, {landlock}"

    def command(self, python: Interpreter, job: dict[str, Any], fd: int) -> list[str]:
        """Return the command that runs `job`, whose JSON is in the file `fd`, in a new sandbox."""
        here = str(Path(__file__).parent)
        jail = [python.executable, "-S", "-s", "-B", "-c", _BOOT]
        if self.name == "namespaces":
            return [*jail, here, str(fd)]
        command = [_bwrap(), "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
        command += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        command += ["--unshare-user"] if job["uid"] is None else []
        for name in _CAPABILITIES:  # which jail.py drops
            command += ["--cap-add", name]
        for target, source in job["read"].items():
            # Folders that bubblewrap makes above a file are closed to other users.
            for above in reversed(Path(target).parents[:-1]):
                command += ["--dir", str(above)]
            command += ["--ro-bind", source, target]
        command += ["--dir", "/dev"]
        for device in job["devices"]:
            command += ["--dev-bind", device, device]
        command += ["--dir", "/tmp", "--remount-ro", "/", "--chdir", "/", "--info-fd", str(job["info"])]
        return [*command, "--", *jail, FOLDER, str(fd)]


def _bwrap() -> str:
    return shutil.which("bwrap") or "bwrap"


@lru_cache
def find_python(path: str) -> Interpreter:
    """Return the Python of a path with its packages; for none, this one with the standard library alone.

    Raises:
        InputError: it cannot be run.
    """
    executable = path or os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    try:
        found = json.loads(
            subprocess.check_output([executable, "-I", "-c", _QUERY], stderr=subprocess.DEVNULL)
        )
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise InputError(f"task.python: {executable} cannot be run ({brief_error(error)})") from error
    executable = found["executable"]
    paths = [*found["library"], *found["shared"], *found["loaders"], *_links(executable), "/etc/ld.so.cache"]
    paths += found["packages"] if path else []
    read = {FOLDER: str(Path(__file__).parent)}
    for target in sorted({*paths, *map(os.path.realpath, paths)}):
        above = any(target.startswith(f"{folder}/") for folder in read)
        if Path(target).exists() and not above:
            read[target] = os.path.realpath(target)
    return Interpreter(executable, tuple(read.items()), bool(path))


def _links(path: str) -> list[str]:
    """Return a path and, while it is a symbolic link, the paths that it leads to."""
    found = [path]
    while Path(found[-1]).is_symlink():
        found.append(os.path.normpath(Path(found[-1]).parent / Path(found[-1]).readlink()))
    return found


def find_backend(wanted: Literal["auto", "bwrap", "namespaces"], python: str = "") -> Backend:
    """Return the first backend that works here, or the one that is `wanted`.

    Raises:
        InputError: none does; says why, and what to install.
    """
    names: tuple[BackendName, ...] = get_args(BackendName) if wanted == "auto" else (wanted,)
    reasons: list[str] = []
    for name in names:
        found = _checked_backend(name, python)
        if isinstance(found, Backend):
            return found
        reasons.append(f"{name}: {found}")
    raise InputError(f"task.sandbox: no sandbox for code works here ({'; '.join(reasons)}); {_INSTALL}")


@lru_cache
def _checked_backend(name: BackendName, python: str) -> Backend | str:
    """Return a backend that has held a program that tries it; or why there is none."""
    if sys.platform != "linux":
        return "requires Linux"
    if (machine := os.uname().machine) not in MACHINES:
        return f"no table of system calls for {machine}"
    backend = Backend(name, os.uname().release, kernel.landlock_abi())
    if name == "namespaces" and not backend.landlock:
        return "the kernel has no Landlock (Linux 5.13, with landlock in its list of security modules)"
    if name == "bwrap":
        try:
            version = subprocess.check_output([_bwrap(), "--version"], text=True).split()[-1]
        except (OSError, subprocess.CalledProcessError):
            return "the program bwrap is not installed"
        backend = Backend(name, version, backend.landlock)
    return _probe(backend, find_python(python)) or backend


def _probe(backend: Backend, python: Interpreter) -> str:
    """Return what a sandbox fails to hold, or why it does not start; empty where it is sound."""
    from scalerl.rl.sandbox.sandbox import THREADS, Sandbox

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


def is_privileged() -> bool:
    """Whether this process is root with what it takes to enclose others without a user namespace."""
    lines = Path("/proc/self/status").read_text().splitlines()
    held = int(next(line for line in lines if line.startswith("CapEff")).split()[1], 16)
    return os.geteuid() == 0 and all(held >> number & 1 for number in _CAPABILITIES.values())


def draw_id(kind: Literal["uid", "gid"]) -> int:
    """Return a random id of a user or group that nobody has: from the upper half of those that there are."""
    line = Path(f"/proc/self/{kind}_map").read_text().splitlines()[-1]
    first, _, length = map(int, line.split())
    return first + length // 2 + random.SystemRandom().randrange(max(length // 4, 1))
