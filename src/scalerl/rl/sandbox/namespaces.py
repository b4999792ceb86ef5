"""Entry into namespaces without another program; it runs at the start of a sandboxed process.

    outer    in the namespaces of the caller; reports the pid of `init`, and waits for it
    init     process 1 of the sandbox; the kernel kills it with `outer`, and all others with it
    program  continues in the jail

The program is never process 1 itself, as it could then outlive `outer` by a call of prctl.
"""

import json
import os
import select
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scalerl.rl.sandbox import kernel

_NAMESPACES = kernel.NEWNS | kernel.NEWPID | kernel.NEWNET | kernel.NEWIPC | kernel.NEWUTS | kernel.NEWCGROUP
_BASE, _OLD = "/tmp", "/.old"


def enter(job: Mapping[str, Any]) -> None:
    """Return in a new process, in namespaces whose root holds only `job["read"]` and `job["devices"]`."""
    kernel.die_with_parent()
    if os.getppid() != job["parent"]:
        os._exit(1)
    user, group = os.getuid(), os.getgid()
    kernel.unshare(_NAMESPACES | (kernel.NEWUSER if job["uid"] is None else 0))
    if job["uid"] is None:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"1000 {user} 1")
        Path("/proc/self/gid_map").write_text(f"1000 {group} 1")
    alive, held = os.pipe()
    init = os.fork()
    if init:
        os.write(job["info"], json.dumps({"child-pid": init}).encode())
        _wait_for(init, kept=held)
    os.close(held)
    kernel.die_with_parent()
    if select.select([alive], [], [], 0)[0]:  # `outer` ended before die_with_parent
        os._exit(1)
    os.close(alive)
    os.setsid()
    _make_root(job)
    program = os.fork()
    if program:
        _wait_for(program)


def _wait_for(process: int, kept: int = -1) -> None:
    """Wait for a process without keeping its files open, and exit with its status."""
    os.closerange(0, max(kept, 0))
    os.closerange(kept + 1, 1 << 20)
    while True:
        pid, status = os.wait()
        if pid == process:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _make_root(job: Mapping[str, Any]) -> None:
    """Make a root that holds some files of the old one, read-only, and some devices."""
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    options = "mode=0755,size=1m,nr_inodes=1k"
    kernel.mount("tmpfs", _BASE, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    Path(_BASE + _OLD).mkdir()
    kernel.pivot_root(_BASE, _BASE + _OLD)
    os.chdir("/")
    for target, source in [*job["read"].items(), *((path, path) for path in job["devices"])]:
        _place_for(Path(target), Path(_OLD + source))
        kernel.mount(_OLD + source, target, None, kernel.MS_BIND | kernel.MS_REC)
        if target in job["read"]:
            kernel.make_read_only(target)
    Path("/tmp").mkdir()
    kernel.unmount(_OLD)
    Path(_OLD).rmdir()
    kernel.make_read_only("/", recursive=False)


def _place_for(target: Path, source: Path) -> None:
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
