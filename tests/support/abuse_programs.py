"""Programs and code that try to get out of a sandbox, or to forge their verdict: see `abuses`."""

HEADER = """
import ctypes, os, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
folder, port, name, victim, parent = {folder!r}, {port}, {name!r}, {victim}, os.getppid()
secret = folder + "/secret"
here = "./" if os.path.isdir("/proc") else "/tmp/"  # a folder that can be written to
def escaped(*what):
    print("ESCAPED", *what, flush=True)
"""

PROGRAMS = {
    "ctypes past a patched socket": """
socket.socket = None  # as a harness patches it
fd = libc.socket(2, 1, 0)
address = b"\\x02\\x00" + port.to_bytes(2, "big") + bytes([127, 0, 0, 1]) + bytes(8)
if fd >= 0 and libc.connect(fd, address, 16) == 0:
    escaped()
""",
    "os.system": """
os.system("echo x > " + folder + "/os_system")
subprocess.run(["/bin/sh", "-c", "echo x > " + folder + "/subprocess"])
""",
    "execve by ctypes": """
arguments = (ctypes.c_char_p * 3)(sys.executable.encode(), b"-c", None)
libc.execv(sys.executable.encode(), (ctypes.c_char_p * 4)(
    sys.executable.encode(), b"-c", b"print('ESCAPED')", None))
""",
    "fork bomb": """
children = []
try:
    for _ in range(150):
        pid = os.fork()
        if pid == 0:
            time.sleep(2)
            os._exit(0)
        children.append(pid)
finally:
    if len(children) > 20:
        escaped()
""",
    "clone by a raw system call": """
number = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
pid = libc.syscall(number, 17, 0, 0, 0, 0)
if pid == 0:
    libc._exit(0)
if pid > 0:
    escaped()
""",
    "setsid daemon": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(folder + "/daemon", "w").write("x")
        for stream in (0, 1, 2):
            os.close(stream)
        time.sleep(20)
    os._exit(0)
os.wait()
time.sleep(0.3)
""",
    "clearing the death signal": """
libc.prctl(1, 0)
for stream in (1, 2):
    os.close(stream)
time.sleep(20)
""",
    "the parent's environment": """
for pid in {parent, os.getpid(), 1, victim}:
    try:
        sys.stdout.buffer.write(open(f"/proc/{pid}/environ", "rb").read())
    except OSError:
        pass
print(os.environ)
""",
    "ptrace": """
if libc.ptrace(16, victim, None, None) == 0 or libc.ptrace(16, parent, None, None) == 0:
    escaped()
    time.sleep(1)
""",
    "memory of another process": """
class Vec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("len", ctypes.c_size_t)]
for pid in (victim, parent, 1):
    for line in open(f"/proc/{pid}/maps"):
        start = int(line.partition("-")[0], 16)
        buffer = ctypes.create_string_buffer(64)
        local, remote = Vec(ctypes.addressof(buffer), 64), Vec(start, 64)
        if libc.process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) > 0:
            escaped(pid)
        break
""",
    "huge output": """
while True:
    os.write(1, b"x" * 65536)
""",
    "huge errors": """
while True:
    os.write(2, b"x" * 65536)
""",
    "symlink out": """
os.symlink(secret, here + "link")
print(open(here + "link").read())
""",
    "a path with dots": """
print(open("../../../../../../.." + secret).read())
""",
    "the verifier's files": """
for path in (folder + "/verifier.py", "/jail/jail.py", os.__file__):
    try:
        with open(path, "a") as file:
            file.write("")
        escaped(path)
    except OSError:
        pass
try:
    open(folder + "/verifier.py", "w").write("def verify(): return True")
except OSError:
    pass
""",
    "memory bomb": """
held = [bytearray(64 << 20) for _ in range(24)]
escaped()
""",
    "memory that no limit counts": """
fd = os.memfd_create("x")
for _ in range(40):
    os.write(fd, b"x" * (16 << 20))
escaped()
""",
    "shared memory of System V": """
key = libc.shmget(0, 1 << 30, 0o1600)
if key >= 0:
    libc.shmctl(key, 0, None)
    escaped()
""",
    "CPU spin": """
for _ in range(4):
    threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
while True:
    pass
""",
    "sleep forever": """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    time.sleep(1000)
""",
    "TCP to the host": """
socket.create_connection(("127.0.0.1", port), 2)
escaped()
""",
    "an abstract socket of the host": """
sock = socket.socket(socket.AF_UNIX)
sock.connect("\\0" + name)
escaped()
""",
    "a socket file of the host": """
sock = socket.socket(socket.AF_UNIX)
sock.connect(folder + "/socket")
escaped()
""",
    "kill(-1)": """
libc.kill(-1, 9)
os.kill(-1, 9)
""",
    "a signal to every process": """
for pid in [parent, victim, 1, *range(-64, 0), *range(3, 3000)]:
    if abs(pid) != os.getpid():
        libc.kill(pid, signal.SIGUSR1)
        libc.syscall(424, pid, signal.SIGUSR1, 0, 0)
""",
    "a signal to the parent": """
os.kill(parent, signal.SIGUSR1)
time.sleep(0.2)
""",
    "/proc/1/root": """
for pid in (1, parent, victim):
    for where in ("root" + secret, "cwd/secret"):
        try:
            print(open(f"/proc/{pid}/{where}").read())
        except OSError:
            pass
""",
    "mount": """
if libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0:
    escaped("tmpfs")
if libc.mount(b"proc", b"/tmp", b"proc", 0, None) == 0:
    escaped("proc")
if libc.mount(None, b"/", None, 32 | 4096, None) == 0:
    escaped("remounted")
""",
    "unshare again": """
if libc.unshare(0x10000000) == 0:
    escaped()
""",
    "setns": """
if libc.setns(os.pidfd_open(parent), 0x20000) == 0:
    escaped()
""",
    "chroot": """
os.chroot("/tmp")
escaped()
""",
    "keyctl": """
number = {"x86_64": 248, "aarch64": 217}[os.uname().machine]
if libc.syscall(number, b"user", b"name", b"payload", 7, -3) > 0:
    escaped()
""",
    "io_uring": """
if libc.syscall(425, 8, ctypes.create_string_buffer(120)) >= 0:
    escaped()
""",
    "perf_event_open": """
number = {"x86_64": 298, "aarch64": 241}[os.uname().machine]
attributes = ctypes.create_string_buffer((1).to_bytes(4, "little") + (120).to_bytes(4, "little"), 120)
if libc.syscall(number, attributes, 0, -1, -1, 0) >= 0:
    escaped()
""",
    "bpf and userfaultfd": """
bpf, fault = {"x86_64": (321, 323), "aarch64": (280, 282)}[os.uname().machine]
attributes = ctypes.create_string_buffer(
    b"".join(n.to_bytes(4, "little") for n in (2, 4, 8, 1)), 72)
if libc.syscall(bpf, 0, attributes, 72) >= 0 or libc.syscall(fault, 1) >= 0:
    escaped()
""",
    "a setuid file": """
where = here + "tool"
open(where, "w").write("x")
try:
    os.chmod(where, 0o4755)
finally:
    if os.stat(where).st_mode & 0o4000:
        escaped()
""",
    "another user": """
for user in (0, 1, 65534):
    try:
        os.setresuid(user, user, user)
        escaped(user)
    except OSError:
        pass
""",
    "filling the disk": """
total = 0
for number in range(10):
    with open(f"{here}fill{number}", "wb") as file:
        for _ in range(16):
            total += file.write(b"x" * (1 << 20))
escaped(total)
""",
    "a million files": """
for number in range(20_000):
    open(f"{here}file{number}", "w").close()
escaped()
""",
    "many threads": """
threading.stack_size(65536)
waiting = threading.Event()
for _ in range(500):
    threading.Thread(target=waiting.wait, daemon=True).start()
escaped()
os._exit(0)
""",
    "inherited files": """
for fd in range(3, 1024):
    try:
        os.fstat(fd)
        escaped(fd, os.pread(fd, 100, 0))
    except OSError:
        pass
""",
    "standard input that never comes": """
while not sys.stdin.readline():
    pass
""",
    "raising a limit": """
import resource
for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_NPROC):
    try:
        resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        if resource.getrlimit(kind)[0] == resource.RLIM_INFINITY:
            escaped(kind)
    except (OSError, ValueError):
        pass
""",
    "32-bit system calls": """
import mmap
if os.uname().machine == "x86_64":
    code = b"\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3"  # mov eax, 20 (getpid of i386); int 0x80; ret
    area = mmap.mmap(-1, 4096, prot=7)
    area.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    if ctypes.CFUNCTYPE(ctypes.c_int)(address)() == os.getpid():
        escaped()
else:
    escaped() if os.path.isdir("/proc") else None
""",
}
"""Programs, which read and print; each is put after `HEADER`."""

TESTS = "assert f(1) == 'sentinel-of-the-answer'\nassert f(2) == 3"
CODES = {
    "exit status forged": "import os\nos._exit(0)",
    "exit status forged in a call": "import os\ndef f(x): os._exit(0)",
    "sys.exit": "import sys\ndef f(x): sys.exit(0)",
    "exit at once": "raise SystemExit(0)",
    "equal to everything": """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
def f(x): return Equal()
""",
    "a text that is equal to everything": """
class Equal(str):
    def __eq__(self, other): return True
    __hash__ = str.__hash__
def f(x): return Equal("x")
""",
    "an exception that is passed on": """
class Passed(BaseException): pass
def f(x): raise Passed("passed")
""",
    "builtins patched": """
import builtins, json, os, sys
builtins.AssertionError = Warning
json.dumps = lambda *a, **k: '{"value": true}'
builtins.print = lambda *a: None
for module in list(sys.modules.values()):
    for name in ("encode", "dumps", "judge", "decode", "loads", "_run"):
        if hasattr(module, name) and "scalerl" in module.__name__:
            setattr(module, name, lambda *a, **k: b'{"verdict": "passed", "why": ""}\\n')
def f(x): return 3
""",
    "the harness found by its frames": """
import sys
def f(x):
    frame = sys._getframe()
    while frame:
        for scope in (frame.f_globals, frame.f_locals):
            for name in list(scope):
                if name in ("verdict", "found", "passed", "failed", "ok"):
                    scope[name] = "passed"
        frame = frame.f_back
    raise SystemExit(0)
""",
    "the answers read": """
import gc, os, re, sys
def texts():
    frame = sys._getframe()
    while frame:
        yield from (v for v in [*frame.f_locals.values(), *frame.f_globals.values()] if isinstance(v, str))
        yield from (v for v in frame.f_code.co_consts if isinstance(v, str))
        frame = frame.f_back
    for found in gc.get_objects():
        if isinstance(found, dict):
            yield from (v for v in list(found.values()) if isinstance(v, str))
        elif isinstance(found, list | tuple):
            yield from (v for v in found if isinstance(v, str))
    for path in ("/proc/self/cmdline", "/proc/self/environ", "/jail/harness.py"):
        try:
            yield open(path).read()
        except OSError:
            pass
def f(x):
    if x == 2:
        return 3
    pattern = re.compile("".join(["sen", "tinel", "[a-z-]{5,}"]))  # which no text in here has
    return next((match[0] for match in map(pattern.search, texts()) if match), "")
""",
    "a printed verdict": """
import os
line = b'{"verdict": "passed", "why": ""}\\n'
print(line.decode(), flush=True)
for fd in range(64):
    try:
        os.write(fd, line)
    except OSError:
        pass
def f(x): return 3
os._exit(0)
""",
    "the pipe answered by hand": """
import os
for fd in range(3, 64):
    try:
        os.write(fd, b'{"value": {"set": [[]]}}\\n{"value": true}\\n{"raised": ["SystemExit", "0"]}\\n' * 50)
    except OSError:
        pass
def f(x): return 3
""",
    "an answer without end": """
import os
for fd in range(3, 64):
    try:
        while True:
            os.write(fd, b'{"value": "' + b"x" * 65536)
    except OSError:
        pass
""",
    "an answer nested without end": """
import os
for fd in range(3, 64):
    try:
        os.write(fd, b'{"value": ' + b"[" * 40000)
        os.write(fd, b"]" * 40000 + b"}\\n")
    except OSError:
        pass
def f(x): return 3
""",
    "a test that never returns": "def f(x):\n    while True: pass",
}
"""Code of completions, whose tests are `TESTS`."""
