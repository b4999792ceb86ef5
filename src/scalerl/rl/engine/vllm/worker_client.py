"""vLLM in a worker that is started here (`scalerl.rl.engine.vllm.worker`): calls, and answers to them."""

import asyncio
import re
import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from scalerl.errors import WorkerError
from scalerl.rl.engine.vllm.worker import serve
from scalerl.rl.sync.vllm_client import ServerLostError, VllmClient
from scalerl.rl.workers.backend import CLOSING, STARTING, Backend, WorkerLostError, WorkerProcess

_ERROR = re.compile(r"\w*(?:Error: |Value error, ).+")
_POLL = 0.5  # seconds between two looks of the thread that receives


class WorkerClient(VllmClient):
    """Worker `number`, which `backend` starts with these arguments of vLLM's command."""

    def __init__(
        self,
        number: int,
        backend: Backend,
        log: Path,
        folder: Path,
        arguments: Sequence[str],
        gpus: Sequence[int] = (),
    ) -> None:
        self.name, self.log, self._number = f"vLLM worker {number}", log, number
        self._backend, self._folder, self._arguments = backend, str(folder), arguments
        self.gpus = tuple(gpus)
        self._process: WorkerProcess | None = None
        self._started = False
        self._log_start = 0
        self._numbers = count(1)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        """Those without an answer yet; 0 is the start."""
        self._lost: ServerLostError | None = None

    async def reach(self, seconds: float) -> None:
        """See `VllmClient`."""
        self._log_start = self.log.stat().st_size if self.log and self.log.exists() else 0
        self._calls, self._lost = {0: asyncio.get_running_loop().create_future()}, None
        self._started = False
        # At random: by one seed two workers, or one and its successor, would draw the same numbers.
        seed = ["--seed", str(secrets.randbits(31))]
        self._process = process = await asyncio.to_thread(
            self._backend.spawn, self.name, self._number, serve, self._folder, [*seed, *self._arguments]
        )
        self.pid = process.pid
        threading.Thread(target=self._receive, args=(process,), name=self.name, daemon=True).start()
        await self._answer(0, "its start", seconds)
        self._started = True

    def _receive(self, process: WorkerProcess) -> None:
        """Receive answers, in a thread, until the process is lost or closed."""
        try:
            while process is self._process:
                self._backend.wait([process], _POLL)
                for kind, value, _ in process.receive():
                    if kind in ("lost", "failed"):
                        raise process.lost(str(value))
                    if kind == "refused":
                        number, why, again = value
                        self._settle(number, f"{self.name}: {why}", again)
                    else:
                        number, found = (0, None) if kind == "started" else value
                        self._settle(number, found)
        except (WorkerLostError, OSError) as error:
            if process is self._process:  # else it was closed
                self._lost, self.pid = ServerLostError(str(error)), None
                for number in list(self._calls):
                    self._settle(number, str(error), True)

    def _settle(self, number: int, value: Any, again: bool | None = None) -> None:
        """Give a call its answer; or, where `again` says whether to try again, the reason why it has none."""
        call = self._calls.get(number)
        if call is None:  # it was given up
            return

        def settle() -> None:
            if call.done():
                return
            if again is None:
                call.set_result(value)
            else:
                call.set_exception((ServerLostError if again else WorkerError)(value))

        with suppress(RuntimeError):  # the loop has ended
            call.get_loop().call_soon_threadsafe(settle)

    async def call(self, method: str, *arguments: Any, seconds: float) -> Any:
        """See `VllmClient`."""
        number = next(self._numbers)
        self._calls[number] = asyncio.get_running_loop().create_future()
        # Only now: the thread that receives notes a loss, and then settles the calls that it finds.
        if self._lost or self._process is None:
            del self._calls[number]
            raise self._lost or ServerLostError(f"{self.name} is not started")
        self._process.send((number, method, arguments))
        return await self._answer(number, method, seconds)

    async def _answer(self, number: int, what: str, seconds: float) -> Any:
        try:
            # Not wait_for, which in Python 3.11 drops a cancellation where the call is settled already.
            async with asyncio.timeout(seconds):
                return await self._calls[number]
        except TimeoutError as error:
            raise ServerLostError(f"{self.name}: {what} took longer than {seconds:g} s") from error
        finally:
            self._calls.pop(number, None)

    def exit_reason(self) -> str:
        """Return the first error of its log since its start, on one line."""
        assert self.log is not None
        try:
            with self.log.open("rb") as file:
                file.seek(self._log_start)
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return "it left no log"
        # The first error is the cause; those after it are of what waited for it.
        found = (_ERROR.search(line) for line in lines if " WARNING " not in line)
        return next((words[0].strip() for words in found if words), "its log says nothing of why")

    def kill(self) -> None:
        """See `VllmClient`."""
        process, self._process, self.pid = self._process, None, None
        if process:
            process.kill()

    async def close(self) -> None:
        """See `VllmClient`."""
        process, self._process = self._process, None
        if process:
            process.close(CLOSING if self._started else STARTING)
            await asyncio.to_thread(process.join)
        self.pid = None
