"""Entry into the sandbox, run as the first lines of the sandboxed Python.

    namespaces (by bubblewrap, or by namespaces.py) -> a /tmp of its own -> user -> capabilities -> limits
    -> Landlock -> seccomp -> "ready" -> the program

The process can undo none of this, so the code of a model may run in the same process.
"""

import itertools
import json
import os
import resource
import sys
import types
from collections.abc import Mapping
from typing import Any

from scalerl.rl.sandbox import kernel
from scalerl.rl.sandbox.seccomp import own_filter

_INODES = 4096
_MAX_FILES = 64
_ALL_FILES = 1 << 20


def main(fd: int) -> None:
    """Enter the sandbox that the JSON object in the file `fd` describes, and run its job."""
    with os.fdopen(fd, "rb") as file:
        job = json.load(file)
    if job["backend"] == "namespaces":
        from scalerl.rl.sandbox.namespaces import enter

        enter(job)
    _confine(job)
    if job["site"]:
        import site

        site.main()
    os.write(job["ready"], b"ready")
    os.close(job["ready"])
    if job["run"] == "candidate":
        from scalerl.rl.sandbox.candidate import serve as run
    elif job["run"] == "harness":
        from scalerl.rl.sandbox.harness import judge as run
    else:
        run = _program
    arguments = job["arguments"]
    del job  # it has paths of the host, and the program could inspect these frames
    run(**arguments)


def _confine(job: Mapping[str, Any]) -> None:
    kept = [2, *sorted({job["ready"], *job["fds"]}), _ALL_FILES]
    for before, after in itertools.pairwise(kept):
        os.closerange(before + 1, after)
    options = f"mode=0777,size={job['disk']},nr_inodes={_INODES}"
    kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC, options)
    os.chdir("/tmp")
    kernel.bound_capabilities()
    if job["uid"] is not None:
        os.setgroups([])
        os.setresgid(job["gid"], job["gid"], job["gid"])
        os.setresuid(job["uid"], job["uid"], job["uid"])
    kernel.drop_capabilities()
    for name, most in job["limits"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_FILES, _MAX_FILES))
    abi = kernel.restrict_files(job["read"], ["/tmp"], job["devices"])
    if abi == 0 and job["backend"] == "namespaces":
        raise OSError("the kernel has no Landlock")
    kernel.filter_system_calls(own_filter())


def _program(source: str) -> None:
    """Run a program as Python runs a script."""
    sys.argv = ["program.py"]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    exec(compile(source, "program.py", "exec"), main.__dict__)
