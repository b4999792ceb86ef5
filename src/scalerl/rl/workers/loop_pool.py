"""A worker pool in the event loop of its own thread, for work that consists of many concurrent calls.

another thread -- _call --> loop:   poll     as soon as a worker has sent something, and at an interval
                                    tasks    of the pool, which send to workers and wait for answers

the loop runs --close, or an error of poll or of a task--> tasks are cancelled, and polling continues until
they have ended --> workers are closed --> _stopped
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any

from scalerl.rl.workers.backend import Backend, Target, WorkerLostError
from scalerl.rl.workers.pool import PoolWorker, W, WorkerPool

_EVERY = 0.1  # longest interval between two polls, in seconds


class LoopPool(WorkerPool[W]):
    """A pool that its own thread polls; only that thread changes its workers and tasks."""

    def __init__(self, workers: Sequence[W], backend: Backend, target: Target) -> None:
        super().__init__(workers, backend, target)
        self._loop, self._arrived = asyncio.new_event_loop(), asyncio.Event()
        self._tasks, self._error = set[asyncio.Task[None]](), None
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)

    def _stopped(self, error: BaseException | None) -> None:
        """Handle, in the thread, that the workers are closed: because of an `error`, or by `close`."""

    def start(self) -> None:
        """Start the thread, which starts the processes."""
        self._thread.start()

    def close(self) -> None:
        """Stop the tasks and the processes."""
        self._call(self._stop)
        self._thread.join(timeout=60)

    def _call(self, function: Callable[[], None]) -> None:
        """Call a function in the loop; any thread may call this."""
        with suppress(RuntimeError):  # the loop has ended, and `_stopped` has been called
            self._loop.call_soon_threadsafe(function)

    # -- in the loop -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._main())
        except BaseException as error:
            self._error = self._error or error
        self._stopped(self._error)

    async def _main(self) -> None:
        while not self._ended:
            await self._poll_next()
        for task in self._tasks:
            task.cancel()
        while self._tasks:  # the last work of a task may be a call, whose answer needs polling
            await self._poll_next()
        self._unwatch(*self._workers)  # before they are closed one after another
        await asyncio.to_thread(super().close)

    async def _poll_next(self) -> None:
        self._arrived.clear()
        try:
            self.poll(0)
        except Exception as error:
            self._stop(error)
        with suppress(TimeoutError):
            async with asyncio.timeout(_EVERY):
                await self._arrived.wait()

    def _spawn(self, worker: W) -> None:
        super()._spawn(worker)
        for fd in _watched([worker]):
            self._loop.add_reader(fd, self._arrived.set)

    def _lose(self, worker: W, error: WorkerLostError) -> None:
        self._unwatch(worker)  # before its descriptors are closed and their numbers may be reused
        super()._lose(worker, error)

    def _unwatch(self, *workers: W) -> None:
        # Actors share one descriptor.
        others = _watched(worker for worker in self._workers if worker not in workers)
        for fd in _watched(workers) - others:
            self._loop.remove_reader(fd)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task; its failure stops the pool, because its work would stay in flight forever."""

        def note(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._arrived.set()
            if not task.cancelled() and (error := task.exception()):
                self._stop(error)

        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(note)
        if self._ended:
            task.cancel()
        return task

    def _stop(self, error: BaseException | None = None) -> None:
        if not self._ended:
            self._error = error
        self._ended = True  # no more workers are started
        self._arrived.set()


def _watched(workers: Iterable[PoolWorker]) -> set[int]:
    return {fd for worker in workers if worker.process for fd in worker.process.watched()}
