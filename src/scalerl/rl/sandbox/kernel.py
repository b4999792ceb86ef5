"""Calls of the Linux kernel that Python lacks: mounts, credentials, Landlock. It runs inside the sandbox."""

import contextlib
import ctypes
import os
import signal
import struct
from collections.abc import Iterable

_libc = ctypes.CDLL(None, use_errno=True)

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 24, 22, 38
_PR_SET_DUMPABLE = 4
# Newer system calls, which have the same number on every machine.
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 442, 444, 445, 446
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION_3 = 0x20080522

# Rights of Landlock on files: execute, write, read, list, remove (2), make (7), refer, truncate, ioctl.
_READ, _LIST, _WRITE, _TRUNCATE = 1 << 2, 1 << 3, 1 << 1, 1 << 14
_NEVER = 1 << 0 | 1 << 6 | 1 << 9 | 1 << 11  # execute; make devices and sockets


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _syscall(what: str, number: int, *arguments: int | bytes | None) -> int:
    words = [ctypes.c_long(a) if isinstance(a, int) else ctypes.c_char_p(a) for a in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number), *words), what)


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Mount; see mount(2)."""
    words = [None if text is None else text.encode() for text in (source, target, kind, data)]
    found = _libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3])
    _checked(found, f"mount {target}")


def make_read_only(path: str, recursive: bool = True) -> None:
    """Make a mount (if `recursive`, with all below it) read-only, without devices and setuid programs."""
    attributes = struct.pack("=QQQQ", _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    _syscall(f"mount_setattr {path}", _MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, attributes, 32)


def pivot_root(new: str, old: str) -> None:
    """Make `new` the root, and move the root to `old`."""
    _syscall("pivot_root", _PIVOT_ROOT[os.uname().machine], new.encode(), old.encode())


def unmount(path: str) -> None:
    """Detach a mount with all below it."""
    _checked(_libc.umount2(path.encode(), MNT_DETACH), f"umount {path}")


def unshare(flags: int) -> None:
    """Leave namespaces; see unshare(2)."""
    _checked(_libc.unshare(flags), "unshare")


def _prctl(what: str, option: int, *arguments: int) -> None:
    words = [ctypes.c_ulong(a) for a in (*arguments, 0, 0, 0, 0)[:4]]
    _checked(_libc.prctl(option, *words), what)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    _prctl("PR_SET_PDEATHSIG", _PR_SET_PDEATHSIG, signal.SIGKILL)


def bound_capabilities() -> None:
    """Drop all capabilities for later programs; this needs a capability, so it precedes a change of user."""
    for capability in range(64):
        with contextlib.suppress(OSError):  # the kernel has fewer
            _prctl("PR_CAPBSET_DROP", _PR_CAPBSET_DROP, capability)


def drop_capabilities() -> None:
    """Drop all capabilities of this process, and any that a setuid program would give."""
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _syscall("capset", _CAPSET[os.uname().machine], header, bytes(24))
    _prctl("PR_SET_NO_NEW_PRIVS", _PR_SET_NO_NEW_PRIVS, 1)
    _prctl(
        "PR_SET_DUMPABLE", _PR_SET_DUMPABLE, 0
    )  # so that a crash starts no core-dump handler, which runs outside the sandbox


def filter_system_calls(program: bytes) -> None:
    """Install a seccomp filter, a program of 8-byte instructions, for good."""
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    address = ctypes.create_string_buffer(header, len(header))
    _prctl("PR_SET_SECCOMP", _PR_SET_SECCOMP, 2, ctypes.addressof(address))


def landlock_abi() -> int:
    """Return the version of Landlock that the kernel has; 0 for none."""
    with contextlib.suppress(OSError):
        return _syscall("landlock", _LANDLOCK_CREATE, None, 0, 1)
    return 0


def restrict_files(read: Iterable[str], write: Iterable[str], devices: Iterable[str]) -> int:
    """Restrict this process to these files and folders, without TCP, or signals and abstract sockets outside.

    Returns:
        the kernel's version of Landlock, 0 for none; newer versions deny more.
    """
    abi = landlock_abi()
    if abi == 0:
        return 0
    # Only the rights that the version knows, as unknown ones are an error.
    rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    attributes = struct.pack("=QQQ", rights, 3, 3)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = _syscall("landlock", _LANDLOCK_CREATE, attributes, len(attributes), 0)
    rules = [(path, _READ | _LIST) for path in read] + [(path, rights & ~_NEVER) for path in write]
    for path, allowed in rules + [(path, _READ | _WRITE) for path in devices]:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        files = allowed if os.path.isdir(path) else allowed & (_READ | _WRITE | _TRUNCATE)  # noqa: PTH112
        _syscall("landlock", _LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", files, fd), 0)
        os.close(fd)
    _syscall("landlock", _LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)
    return abi
