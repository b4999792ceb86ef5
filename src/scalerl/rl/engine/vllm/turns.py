"""Completions of several turns with vLLM: every turn is a request, and what it is answered begins the next.

    a server completes a turn -> `TaskEnvironment` -> the tokens that follow -> the next request

All of it is in the loop of the servers, where a step of the trainer holds up no answer. The decode slot of a
turn is free while its answer is under way. The next request has the cache salt of the first, so that the
server finds the KV cache of the turns before, as weights of then have made it; what was evicted meanwhile,
the end of the last block and the answer are read by the weights of now.
"""

import asyncio
from dataclasses import replace

from scalerl.rl.engine.sampling import Request, Sampling
from scalerl.rl.engine.vllm.completions import Completed, turn_of
from scalerl.rl.verify.environment import TaskEnvironment, TurnAnswer


class Turns:
    """Answers turns by an environment; its methods are called in the loop of the servers alone."""

    def __init__(self, environment: TaskEnvironment, sampling: Sampling) -> None:
        self.environment, self._sampling = environment, sampling
        self._waiting: list[tuple[TurnAnswer, asyncio.Future[None]]] = []

    async def next_turn(self, completed: Completed) -> Request | Completed:
        """Return the request of the turn that follows, or the completion where this was the last."""
        request, most = completed.request, self._sampling.length.max_tokens
        turn, truncated = turn_of(completed, self._sampling)
        turns = [one.token_T[one.sampled_T] for one in (*request.turns, turn)]
        if truncated or len(turns) >= self.environment.turns:
            return completed
        answer, there = self.environment.ask(request.prompt, turns), asyncio.Future[None]()
        self._waiting.append((answer, there))
        await there
        answer_T = answer.result()
        if answer_T is not None and not len(answer_T):
            return completed
        if answer_T is not None:
            turn, _ = turn_of(completed, self._sampling, answer_T)
            if sum(len(one.token_T) for one in (*request.turns, turn)) < most:  # a token fits behind it
                return replace(request, turns=(*request.turns, turn))
        return replace(completed, truncated=True)

    def poll(self) -> None:
        """Receive the answers that are there.

        Raises:
            WorkerError: the processes of the environment do not start.
        """
        # Those whose server or run has ended meanwhile are not waited for any more.
        self._waiting = [(answer, there) for answer, there in self._waiting if not there.done()]
        if self._waiting:
            self.environment.poll(0.0)
        for answer, there in self._waiting:
            if answer.done:
                there.set_result(None)
