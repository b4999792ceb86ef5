"""The system calls that sandboxed Python may make: a seccomp filter that lists the allowed ones.

All others fail with EPERM: starting processes and programs, signals to others, network, mounts, namespaces,
credentials, ptrace, keys, io_uring, perf, memory that no limit counts (memfd, System V), and new calls of
future kernels. Threads, files, timers and pipes work.
"""

import os
import struct

_ALLOWED = """
read:0:63 write:1:64 close:3:57 fstat:5:80 lseek:8:62 mmap:9:222 mprotect:10:226 munmap:11:215 brk:12:214
rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 pread64:17:67 pwrite64:18:68 readv:19:65
writev:20:66 preadv:295:69 pwritev:296:70 preadv2:327:286 pwritev2:328:287 sched_yield:24:124 mremap:25:216
msync:26:227 mincore:27:232 madvise:28:233 dup:32:23 dup3:292:24 nanosleep:35:101 clock_nanosleep:230:115
getitimer:36:102 setitimer:38:103 getpid:39:172 gettid:186:178 getppid:110:173 getuid:102:174
geteuid:107:175 getgid:104:176 getegid:108:177 getgroups:115:158 getresuid:118:148 getresgid:120:150
getpgid:121:155 getsid:124:156 exit:60:93 exit_group:231:94 wait4:61:260 waitid:247:95 uname:63:160
fcntl:72:25 flock:73:32 fsync:74:82 fdatasync:75:83 truncate:76:45 ftruncate:77:46 getcwd:79:17 chdir:80:49
fchdir:81:50 mkdirat:258:34 unlinkat:263:35 renameat:264:38 renameat2:316:276 linkat:265:37 symlinkat:266:36
readlinkat:267:78 openat:257:56 openat2:437:437 faccessat:269:48 faccessat2:439:439 newfstatat:262:79
statx:332:291 statfs:137:43 fstatfs:138:44 utimensat:280:88 umask:95:166 getdents64:217:61
gettimeofday:96:169 times:100:153 getrusage:98:165 getrlimit:97:163 sysinfo:99:179 futex:202:98
futex_waitv:449:449 set_robust_list:273:99 get_robust_list:274:100 set_tid_address:218:96
sigaltstack:131:132 rt_sigpending:127:136 rt_sigtimedwait:128:137 rt_sigsuspend:130:133
clock_gettime:228:113 clock_getres:229:114 timer_create:222:107 timer_settime:223:110 timer_gettime:224:108
timer_getoverrun:225:109 timer_delete:226:111 getrandom:318:278 sched_getaffinity:204:123
sched_getparam:143:121 sched_getscheduler:145:120 sched_get_priority_max:146:125
sched_get_priority_min:147:126 getcpu:309:168 getpriority:140:141 ppoll:271:73 pselect6:270:72
epoll_create1:291:20 epoll_ctl:233:21 epoll_pwait:281:22 epoll_pwait2:441:441 eventfd2:290:19 pipe2:293:59
timerfd_create:283:85 timerfd_settime:286:86 timerfd_gettime:287:87 socketpair:53:199 sendto:44:206
recvfrom:45:207 sendmsg:46:211 recvmsg:47:212 shutdown:48:210 getsockopt:55:209 setsockopt:54:208
getsockname:51:204 getpeername:52:205 membarrier:324:283 rseq:334:293 restart_syscall:219:128 sendfile:40:71
copy_file_range:326:285 fallocate:285:47 fadvise64:221:223 close_range:436:436
open:2: stat:4: lstat:6: poll:7: access:21: pipe:22: select:23: dup2:33: alarm:37: getdents:78: rename:82:
mkdir:83: rmdir:84: link:86: unlink:87: symlink:88: readlink:89: time:201: epoll_create:213: epoll_wait:232:
eventfd:284: arch_prctl:158: getpgrp:111: utime:132: utimes:235: futimesat:261: pause:34:
"""
"""`name:number on x86-64:number on AArch64`, from the kernel's headers; the last exist only on x86-64."""
_CHECKED = "kill:62:129 tgkill:234:131 clone:56:220 prctl:157:167 ioctl:16:29 prlimit64:302:261 fchmod:91:52 \
fchmodat:268:53 chmod:90:"
_CLONE3 = 435

MACHINES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}
"""Machines whose numbers are known: the column above, and the code of the architecture in a filter."""
_LOAD, _AND, _EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_KILL, _ALLOW, _ERROR = 0x80000000, 0x7FFF0000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_THREAD, _NAMESPACES, _SETID = 0x10000, 0x7E020000, 0o6000
_WHOLE = 0xFFFFFFFF


def filter_for(machine: str, pid: int) -> bytes:
    """Return the filter for a machine and a process that may send signals only to itself, `pid`."""
    column, architecture = MACHINES[machine]
    # (argument, mask, value): allowed if the masked argument equals the value.
    checks = {
        "kill": [(0, _WHOLE, pid)],
        "tgkill": [(0, _WHOLE, pid)],
        "clone": [(0, _THREAD | _NAMESPACES, _THREAD)],  # a thread, in no new namespace
        "prctl": [(0, _WHOLE, 15), (0, _WHOLE, 16)],  # the name of a thread
        "ioctl": [
            (1, _WHOLE, code) for code in (0x5401, 0x541B, 0x5421, 0x5450, 0x5451)
        ],  # isatty, FIONREAD, cloexec
        "prlimit64": [(0, _WHOLE, 0)],
        "fchmod": [(1, _SETID, 0)],
        "fchmodat": [(2, _SETID, 0)],
        "chmod": [(1, _SETID, 0)],
    }
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    for number in _numbers(_ALLOWED, column).values():
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    program += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERROR | _ENOSYS)]  # then the C library calls clone
    for name, number in _numbers(_CHECKED, column).items():
        rules: list[tuple[int, int, int, int]] = []
        for argument, mask, value in checks[name]:
            rules += [(_LOAD, 0, 0, 16 + 8 * argument), (_AND, 0, 0, mask)]
            rules += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
        rules.append((_RETURN, 0, 0, _ERROR | _EPERM))
        program += [(_EQUAL, 0, len(rules), number), *rules]
    program.append((_RETURN, 0, 0, _ERROR | _EPERM))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def _numbers(table: str, column: int) -> dict[str, int]:
    rows = [entry.split(":") for entry in table.split()]
    return {row[0]: int(row[column]) for row in rows if row[column]}


def own_filter() -> bytes:
    """Return the filter for this process."""
    return filter_for(os.uname().machine, os.getpid())
