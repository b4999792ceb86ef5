"""Verification in actors: the driver sends tokens, and goes on while they verify.

    completions -> shares -> idle actors -> outcomes, in order

Every actor has a `Verifier` of its own, with the worker processes of `task.limits`. One that is lost is
replaced, and its share is verified again by another: the outcomes do not depend on which actor verifies.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

import numpy as np
import torch

from scalerl.rl.config.recipe import Recipe
from scalerl.rl.model.causal_lm import load_tokenizer
from scalerl.rl.types import Pending, Prompt
from scalerl.rl.verify.pool import Outcome, VerifierPool, VerifierWorker
from scalerl.rl.verify.verifier import Completion, Verification, load_verifier
from scalerl.rl.workers.backend import Channel
from scalerl.rl.workers.ray.backend import RayActors, WorkerActor
from scalerl.rl.workers.ray.session import Session
from scalerl.rl.workers.timeline import Timeline

SHARES = 4
"""Of a collection, for each verifier: a quick one takes more of them."""
Share = tuple[list[dict[str, Any]], list[int], np.ndarray, np.ndarray]
"""Prompts of some completions, turns of each, where the tokens of each turn end, and the tokens of all."""


class VerifierActor(WorkerActor):
    """The process of a verifier."""


class RayVerifier(Verification):
    """Verification by `[cluster] verifiers` actors.

    Raises:
        InputError: what the task needs for its verifier cannot be loaded.
        WorkerError: the verifiers do not start; or (by what `submit` returns) are lost again and again.
    """

    def __init__(self, recipe: Recipe, model_folder: str, session: Session, timeline: Timeline) -> None:
        super().__init__()
        cluster, limits = recipe.on_cluster, recipe.on_cluster.timeouts
        smallest = recipe.task.limits.workers  # of the processes of an actor some would be idle
        workers = [
            VerifierWorker(f"verifier {i}", i, limits.step, limits.start) for i in range(cluster.verifiers)
        ]
        self.pool = VerifierPool(
            workers,
            RayActors(VerifierActor, session, "verifiers", limits.heartbeat),
            _packed,
            lambda n: max(math.ceil(n / (SHARES * len(workers))), smallest),
            serve,
            (recipe.without_prompts(), model_folder),
            limits.start,
            timeline,
        )
        try:
            self.pool.start()
            self.pool.wait_until_started()
        except BaseException:
            self.close()
            raise

    def submit(self, completions: Sequence[Completion]) -> Pending[list[Outcome]]:
        """See `Verification.submit`; completions that were submitted before are given up."""
        return self.pool.submit(completions)

    def close(self) -> None:
        """Kill the actors."""
        self.pool.close()


def serve(channel: Channel, recipe: Recipe, model_folder: str) -> None:
    """Verify the shares that come, in an actor."""
    torch.set_num_threads(1)
    verifier = load_verifier(recipe, load_tokenizer(model_folder))
    channel.send("started")
    while True:
        pending = verifier.submit(_unpacked(channel.receive()))
        pending.wait(math.inf)
        channel.send("done", pending.result())


def _packed(completions: Sequence[Completion]) -> Share:
    tokens = [turn_T for _, turns in completions for turn_T in turns]
    ends = np.cumsum([len(turn_T) for turn_T in tokens], dtype=np.int64)
    n_turns = [len(turns) for _, turns in completions]
    return [asdict(prompt) for prompt, _ in completions], n_turns, ends, np.concatenate(tokens)


def _unpacked(share: Share) -> list[Completion]:
    prompts, n_turns, ends, token_S = share
    parts = iter(np.split(token_S, ends[:-1]))
    return [
        (Prompt.from_json(prompt), list(islice(parts, n))) for prompt, n in zip(prompts, n_turns, strict=True)
    ]
