"""Backends that enclose sandboxed processes, and the Python that these run; find.py finds working ones.

    bwrap        bubblewrap makes the namespaces and the root
    namespaces   namespaces.py makes them; Landlock is required too

Both continue in jail.py, with a separate user (or a user namespace), limits, Landlock and seccomp.
"""

import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

BackendName = Literal["bwrap", "namespaces"]
BWRAP = "bwrap"
"""The program, found on PATH."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
FOLDER = "/jail"
"""The path of this folder's files in the sandbox."""
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
"""Imports jail.py without its package, which is not in the sandbox."""
_MANY = 1 << 14
_CAPABILITIES = {"CAP_SETGID": 6, "CAP_SETUID": 7, "CAP_SETPCAP": 8, "CAP_SYS_ADMIN": 21}


class SandboxError(Exception):
    """A sandbox did not start, so nothing ran in it."""


@dataclass(frozen=True)
class Interpreter:
    """A Python to run in the sandbox, and the files that it needs."""

    executable: str
    read: tuple[tuple[str, str], ...]
    """Pairs of a path in the sandbox and the real path behind it: folders and files, read-only."""
    packages: bool
    """Whether its site packages are importable, or only the standard library."""


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
        """Description for config.json, such as `bwrap 0.8.0, user namespace, seccomp, landlock 7`."""
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
        for name in _CAPABILITIES:  # jail.py drops them again
            command += ["--cap-add", name]
        for target, source in job["read"].items():
            # Make folders above a file here, as those made by bubblewrap itself are closed to other users.
            for above in reversed(Path(target).parents[:-1]):
                command += ["--dir", str(above)]
            command += ["--ro-bind", source, target]
        command += ["--dir", "/dev"]
        for device in job["devices"]:
            command += ["--dev-bind", device, device]
        command += ["--dir", "/tmp", "--remount-ro", "/", "--chdir", "/", "--info-fd", str(job["info"])]
        return [*command, "--", *jail, FOLDER, str(fd)]


def is_privileged() -> bool:
    """Whether this process is root, with the capabilities and spare ids to run others as separate users."""
    lines = Path("/proc/self/status").read_text().splitlines()
    held = int(next(line for line in lines if line.startswith("CapEff")).split()[1], 16)
    # Root in a user namespace with few ids (rootless containers) needs another namespace, as other users do.
    spare = all(_ids(kind)[1] >= _MANY for kind in ("uid", "gid"))
    return os.geteuid() == 0 and spare and all(held >> number & 1 for number in _CAPABILITIES.values())


def draw_id(kind: Literal["uid", "gid"]) -> int:
    """Return a random user or group id from the upper half of the range, which is hardly in use."""
    first, length = _ids(kind)
    return first + length // 2 + random.SystemRandom().randrange(length // 4)


def _ids(kind: Literal["uid", "gid"]) -> tuple[int, int]:
    """Return the first id and the number of ids in the last range that this process may use."""
    first, _, length = map(int, Path(f"/proc/self/{kind}_map").read_text().splitlines()[-1].split())
    return first, length
