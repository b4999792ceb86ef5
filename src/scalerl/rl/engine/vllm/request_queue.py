"""Completions that no server has yet, of training and of evaluations, and the versions of weights for them.

A server is to have the version of the oldest evaluation that has completions for it, and else the newest. So
versions are evaluated on the way, in order, and training goes on beside with what a server has: admission
control holds it back where that gets too old. Where a version is older than what training has sampled by (a
resumed run, a lost server), or is none that training samples by, the server first completes what training has
there, and gets no more of it until it has the newest again.
"""

import heapq
from collections.abc import Iterable, Iterator
from concurrent.futures import InvalidStateError
from contextlib import suppress

from scalerl.errors import ScalerlError
from scalerl.rl.engine.sampling import Request
from scalerl.rl.engine.vllm.completions import Completed
from scalerl.rl.engine.vllm.server_state import Flight, ServedEvaluation, ServerState


class RequestQueue:
    """What waits, in its order: evaluations first."""

    def __init__(self, version: int) -> None:
        self.newest = version
        """The version that training is to sample by."""
        self._training: list[Request] = []
        self._evaluations: list[ServedEvaluation] = []
        self._unfinished: list[ServedEvaluation] = []
        """Evaluations whose futures fail where there are no servers any more; of any thread."""
        self._ended: ScalerlError | None = None

    def add(self, requests: Iterable[Request]) -> None:
        """Add completions of training."""
        for request in requests:
            heapq.heappush(self._training, request)

    def put_back(self, flight: Flight) -> None:
        """Add a completion that is to be sampled again."""
        heapq.heappush(flight.evaluation.waiting if flight.evaluation else self._training, flight.request)

    def announce(self, evaluation: ServedEvaluation) -> None:
        """Have an evaluation fail with the servers from now on; may be called by any thread."""
        self._unfinished.append(evaluation)
        if self._ended:
            self.end(self._ended)

    def add_evaluation(self, evaluation: ServedEvaluation) -> None:
        """Add the completions of an evaluation."""
        evaluation.offered = evaluation.version == self.newest
        self._evaluations.append(evaluation)

    def complete(self, evaluation: ServedEvaluation, completed: Completed) -> bool:
        """Note a completion of an evaluation; return whether it was the last."""
        evaluation.completed.append(completed)
        if len(evaluation.completed) < evaluation.n_requests:
            return False
        self._evaluations.remove(evaluation)
        self._unfinished.remove(evaluation)
        evaluation.done.set_result(evaluation.completed)
        return True

    def end(self, error: ScalerlError) -> None:
        """Have all evaluations fail, those to come as well."""
        self._ended = error
        for evaluation in list(self._unfinished):
            with suppress(InvalidStateError):  # another thread was first
                evaluation.done.set_exception(error)

    def __iter__(self) -> Iterator[tuple[list[Request], ServedEvaluation | None]]:
        """Yield the heaps of what waits, with the evaluations that they are of."""
        yield from [(evaluation.waiting, evaluation) for evaluation in self._evaluations]
        yield self._training, None

    # -- versions --------------------------------------------------------------------------------------------

    def target(self, server: ServerState) -> int:
        """Return the version that a server is to have."""
        for flight in server.flights.values():
            if flight.evaluation:
                return flight.evaluation.version
        return next((e.version for e in self._evaluations if e.waiting or e.answering), self.newest)

    def is_offered(self, version: int) -> bool:
        """Return whether training may sample by a version."""
        return version in [self.newest, *(e.version for e in self._evaluations if e.offered)]

    def must_drain(self, server: ServerState, version: int) -> bool:
        """Return whether a server must complete what training has there before it installs a version."""
        trains = any(flight.evaluation is None for flight in server.flights.values())
        return trains and (version < server.installed or not self.is_offered(version))
