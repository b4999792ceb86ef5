"""What encloses sandboxed processes, and the Python that they run; find.py finds those that work here.

    bwrap        bubblewrap makes the namespaces and the root
    namespaces   namespaces.py does; Landlock must confirm it

Both go on in jail.py, with a user of its own (or a user namespace), limits, Landlock and seccomp.
"""

import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

BackendName = Literal["bwrap", "namespaces"]
BWRAP = "bwrap"
"""The program, found by PATH."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
FOLDER = "/jail"
"""Where the files of this folder are in the sandbox."""
_BOOT = f"""\
import sys, types
sys.path[:] = [path for path in sys.path if path]
names = {__name__!r}.split(".")
for n in range(1, len(names)):
    name = ".".join(names[:n])
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
module.__path__ = [sys.argv[1], {FOLDER!r}]
from {__name__.removesuffix("backend")}jail import main
main(int(sys.argv[2]))
"""
"""Imports jail.py without the package around it, which is not in the sandbox."""
_MANY = 1 << 14
_CAPABILITIES = {"CAP_SETGID": 6, "CAP_SETUID": 7, "CAP_SETPCAP": 8, "CAP_SYS_ADMIN": 21}


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
class SandboxBackend:
    """A way to enclose processes that works on this machine."""

    name: BackendName
    version: str
    """Version of bubblewrap; for `namespaces`, of the kernel."""
    landlock: int
    """The kernel's version of Landlock; 0 for none."""

    @property
    def description(self) -> str:
        """Description for config.json, as `bwrap 0.8.0, user namespace, seccomp, landlock 7`."""
        user = "own user" if is_privileged() else "user namespace"
        landlock = f"landlock {self.landlock}" if self.landlock else "no landlock"
        return f"{self.name} {self.version}, {user}, seccomp, {landlock}"

    def command(self, python: Interpreter, job: dict[str, Any], fd: int) -> list[str]:
        """Return the command that runs `job`, whose JSON is in the file `fd`, in a new sandbox."""
        here = str(Path(__file__).parent)
        jail = [python.executable, "-S", "-s", "-B", "-c", _BOOT]
        if self.name == "namespaces":
            return [*jail, here, str(fd)]
        command = [BWRAP, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
        command += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        command += ["--unshare-user", "--uid", "1000", "--gid", "1000"] if job["uid"] is None else []
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


def is_privileged() -> bool:
    """Whether this process is root with what it takes to give others a user id of their own."""
    lines = Path("/proc/self/status").read_text().splitlines()
    held = int(next(line for line in lines if line.startswith("CapEff")).split()[1], 16)
    # Root of a user namespace with few ids (rootless containers) takes another namespace, as other users do.
    spare = all(_ids(kind)[1] >= _MANY for kind in ("uid", "gid"))
    return os.geteuid() == 0 and spare and all(held >> number & 1 for number in _CAPABILITIES.values())


def draw_id(kind: Literal["uid", "gid"]) -> int:
    """Return a random unused id of a user or group, from the upper half of the range."""
    first, length = _ids(kind)
    return first + length // 2 + random.SystemRandom().randrange(length // 4)


def _ids(kind: Literal["uid", "gid"]) -> tuple[int, int]:
    """Return the first and the number of the ids in the last range that this process may take."""
    first, _, length = map(int, Path(f"/proc/self/{kind}_map").read_text().splitlines()[-1].split())
    return first, length
