"""What code may try in order to get out of a sandbox or to forge its verdict, and what shows that it did.

    python abuses.py bwrap        tries all in that backend, and prints the consequences of each as JSON

Every abuse prints ESCAPED, or what it has stolen, where it works; `Outside` watches what it could reach:
files, servers, processes and signals of the one who runs it.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from abuse_programs import CODES, HEADER, PROGRAMS, TESTS

from scalerl.rl.sandbox.find import find_backend, find_python
from scalerl.rl.sandbox.sandbox import Sandbox
from scalerl.rl.verify import proc

SECRET = "a-secret-of-the-host"
SECONDS, ENDLESS_SECONDS = 20.0, 2.0
MEMORY = 512 << 20
MOST = 1 << 20

ENDLESS = (
    *("clearing the death signal", "huge errors", "CPU spin", "sleep forever"),
    *("standard input that never comes", "a test that never returns", "an answer without end"),
)
"""What goes on until it is stopped."""
SPARED = (
    # They would end or change the machine that runs the tests.
    *("kill(-1)", "a signal to every process", "mount", "chroot", "setns"),
    # What a host may forbid by itself.
    *("keyctl", "io_uring", "ptrace", "memory of another process", "bpf and userfaultfd", "perf_event_open"),
    *("unshare again", "32-bit system calls", "another user", "raising a limit", "shared memory of System V"),
    # Attacks on what carries values between two sandboxes, which one process does not have.
    *("an exception that is passed on", "builtins patched", "the pipe answered by hand"),
    *("an answer without end", "an answer nested without end"),
)
"""What is not tried without a sandbox."""


@dataclass
class Outside:
    """What an abuse could reach; `consequences` says what it did."""

    folder: Path

    def __enter__(self):
        self.kept = proc.descendants(os.getpid())  # of other tests
        for name, text in {"secret": SECRET, "verifier.py": "def verify(): ..."}.items():
            (self.folder / name).write_text(text)
        self.connections, self.signals = 0, 0
        self.servers = [socket.create_server(("127.0.0.1", 0))]
        self.port, self.name = (
            self.servers[0].getsockname()[1],
            f"scalerl-{os.getpid()}-{time.monotonic_ns()}",
        )
        for address in ("\0" + self.name, str(self.folder / "socket")):
            server = socket.socket(socket.AF_UNIX)
            server.bind(address)
            server.listen()
            self.servers.append(server)
        for server in self.servers:
            threading.Thread(target=self._serve, args=(server,), daemon=True).start()
        self.held = os.open(self.folder / "secret", os.O_RDONLY)
        os.set_inheritable(self.held, True)
        os.environ["SECRET_OF_THE_HOST"] = SECRET
        self.victim = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        self.before = signal.signal(signal.SIGUSR1, self._signalled)
        proc.adopt_orphans()
        self.files = self._files()
        return self

    def __exit__(self, *error):
        signal.signal(signal.SIGUSR1, self.before)
        proc.end(os.getpid(), self.kept)
        self.victim.wait()
        ctypes.CDLL(None).prctl(36, 0)  # orphans are no longer adopted
        for server in self.servers:
            server.shutdown(socket.SHUT_RDWR)  # ends the accept of its thread
            server.close()
        os.close(self.held)
        del os.environ["SECRET_OF_THE_HOST"]

    def header(self):
        """The lines before an abuse, which tell it where everything is."""
        where = {"folder": str(self.folder), "port": self.port, "name": self.name, "victim": self.victim.pid}
        return HEADER.format(**where)

    def consequences(self):
        """What has happened out here."""
        found = []
        if self.connections:
            found.append("a server was reached")
        if self.signals:
            found.append("a signal came")
        if self.victim.poll() is not None:
            found.append("a process was killed")
        elif "TracerPid:\t0" not in Path(f"/proc/{self.victim.pid}/status").read_text():
            found.append("a process is traced")
        if self._files() != self.files:
            found.append("a file was written")
        until = time.monotonic() + 5  # for a process that is ending
        kept = self.kept | {self.victim.pid}
        while (left := proc.descendants(os.getpid()) - kept) and time.monotonic() < until:
            time.sleep(0.02)
        if left:
            found.append("a process is left")
        return found

    def _files(self):
        files = [path for path in self.folder.iterdir() if path.is_file()]
        return {path.name: path.read_bytes() for path in files}

    def _serve(self, server):
        try:
            while True:
                server.accept()[0].close()
                self.connections += 1
        except OSError:
            pass

    def _signalled(self, number, frame):
        self.signals += 1


def consequences_of(name, sandbox, folder):
    """What an abuse brings about in a sandbox: nothing, where that holds."""
    with Outside(folder) as outside:
        began, found = time.monotonic(), []
        seconds = ENDLESS_SECONDS if name in ENDLESS else SECONDS
        if name in CODES:
            tests = {"tests": TESTS.splitlines(), "setup": "", "reference": "", "entry_point": ""}
            if sandbox.check(CODES[name], tests, seconds).verdict == "passed":
                found.append("the verdict is forged")
        else:
            ran = sandbox.run(outside.header() + PROGRAMS[name], b"", seconds, MOST)
            found += said(ran.output)
            if len(ran.output) > MOST or len(ran.errors) > MOST:
                found.append("its output is without a limit")
        if time.monotonic() - began > seconds + 3:
            found.append("it took too long")
        return found + outside.consequences()


def said(output):
    """What an abuse says that it has done."""
    found = ["it says so"] if b"ESCAPED" in output else []
    return found + ["it has a secret"] * (SECRET.encode() in output)


def consequences_without(name, folder):
    """What an abuse brings about without a sandbox: in a process that runs code and tests in one."""
    with Outside(folder) as outside:
        source = f"{CODES[name]}\n{TESTS}" if name in CODES else outside.header() + PROGRAMS[name]
        pipe = subprocess.Popen(
            [sys.executable, "-c", source],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[outside.held],
        )
        timer = threading.Timer(ENDLESS_SECONDS, pipe.kill)
        timer.start()
        assert pipe.stdout is not None
        with pipe.stdout:
            output = pipe.stdout.read(MOST + 1)
        found = said(output) + ["its output is without a limit"] * (len(output) > MOST)
        if len(output) > MOST:
            pipe.kill()
        status = pipe.wait()
        found += ["it runs on"] * (status == -signal.SIGKILL and not timer.is_alive())
        timer.cancel()
        found += ["the verdict is forged"] * (name in CODES and status == 0)
        return found + outside.consequences()


def main(backend):
    """Try everything; print the consequences as JSON."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sandbox = Sandbox(find_backend(backend), find_python(""), MEMORY)
    found = {}
    for name in [*PROGRAMS, *CODES]:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = consequences_of(name, sandbox, Path(folder))
    print(json.dumps({"sandbox": sandbox.backend.description, "consequences": found}))


if __name__ == "__main__":
    main(sys.argv[1])
