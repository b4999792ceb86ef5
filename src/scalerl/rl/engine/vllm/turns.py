"""Completions of several turns with vLLM: every turn is a request, and its answer starts the next one.

    a server completes a turn -> this thread: `TaskEnvironment` -> the tokens that follow -> the next request

The decode slot of a turn is free while the environment answers. The next request has the cache salt of the
first, so that the server finds the KV cache of the earlier turns, which older weights may have computed. The
current weights read only evicted blocks, the end of the last block, and the answer.
"""

import asyncio
import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np

from scalerl.rl.engine.sampling import Request, Sampling
from scalerl.rl.engine.vllm.completions import Completed, turn_of
from scalerl.rl.types import Prompt
from scalerl.rl.verify.environment import TaskEnvironment, TurnAnswer

_MOMENT = 0.01
"""Seconds to wait for answers before newly ended turns are handled."""


@dataclass(eq=False)
class _EndedTurn:
    prompt: Prompt
    turns: list[np.ndarray]
    answered: Future[np.ndarray | None] = field(default_factory=Future)
    """See `TurnAnswer.result`."""
    answer: TurnAnswer | None = None


class TurnsThread:
    """A thread that lets an environment answer turns, so that a trainer step does not delay answers."""

    def __init__(self, environment: TaskEnvironment, sampling: Sampling) -> None:
        self._environment, self._sampling = environment, sampling
        self._inbox: queue.SimpleQueue[_EndedTurn | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="turns", daemon=True)
        self._thread.start()

    async def next_turn(self, completed: Completed) -> Request | Completed:
        """Return the request of the next turn, or the completion if this turn was the last.

        Raises:
            ScalerlError: the processes of the environment do not start.
        """
        request, most = completed.request, self._sampling.length.max_tokens
        turn, truncated = turn_of(completed, self._sampling)
        turns = [one.token_T[one.sampled_T] for one in (*request.turns, turn)]
        if truncated or len(turns) >= self._environment.turns:
            return completed
        ended = _EndedTurn(request.prompt, turns)
        # Only this object's thread uses the environment; the event loop just waits for the future.
        self._inbox.put(ended)
        answer_T = await asyncio.wrap_future(ended.answered)
        if answer_T is not None and not len(answer_T):
            return completed
        if answer_T is not None:
            turn, _ = turn_of(completed, self._sampling, answer_T)
            if sum(len(one.token_T) for one in (*request.turns, turn)) < most:  # one more token fits
                return replace(request, turns=(*request.turns, turn))
        return replace(completed, truncated=True)

    def close(self) -> None:
        """Stop the thread and the processes of the environment."""
        self._inbox.put(None)
        self._thread.join()
        self._environment.close()

    def _run(self) -> None:
        under_way: list[_EndedTurn] = []
        try:
            self._answer(under_way)
        except Exception as error:
            for ended in under_way:
                ended.answered.set_exception(error)
            # Later turns fail too: a completion whose future is never set would wait forever.
            while ended := self._inbox.get():
                if ended.answered.set_running_or_notify_cancel():
                    ended.answered.set_exception(error)

    def _answer(self, under_way: list[_EndedTurn]) -> None:
        """Answer turns until `close` ends the thread."""
        while True:
            # Block only if no answer is pending: otherwise arriving answers would wait for a new turn.
            while not under_way or not self._inbox.empty():
                if (ended := self._inbox.get()) is None:
                    return
                if ended.answered.set_running_or_notify_cancel():
                    under_way.append(ended)
                    ended.answer = self._environment.ask(ended.prompt, ended.turns)
            self._environment.poll(_MOMENT)
            for ended in list(under_way):
                if ended.answer and ended.answer.done:
                    under_way.remove(ended)
                    ended.answered.set_result(ended.answer.result())
