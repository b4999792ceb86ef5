"""The probe: does the trainer give the generator's tokens the probabilities they were sampled with?

Trained tokens cannot tell: most are a few versions old, and a difference may be age. So the probe keeps a copy
of the weights of one version, waits for completions that this version began, and scores them with that copy
by the trainer's own forward pass:

    hold     the weights of version v as they are published
    score    in the batches of the next steps, a few completions whose KV cache was begun by v: their tokens up
             to the first that another version sampled, so that neither weights nor KV cache differ
    release  once no token of v can come any more (v is older than the schedule allows); hold the next

What is left between the two log-probabilities is kernels and precision (the gap), and a wrong temperature,
weights that got lost or corrupted on their way, or a head of another precision show in it. Whether the tokens
are a sample of the trainer's distribution at all is a second figure (the rank), as a generator may well
record the probabilities of a distribution that it did not sample from.

It costs a forward pass of `completions` of the batch's completions, and memory for one copy of the trained
weights. The copy is of the learner's own weights, not of what was published.

Shapes in names: N completions, T positions (prompt and completion), W wanted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scalerl.rl.learner import Learner
from scalerl.rl.schedule import AnySchedule
from scalerl.rl.types import Rollout


class Probe:
    """Holds a version of the learner's weights, and scores what it sampled; `completions` = 0 is off."""

    def __init__(self, learner: Learner, schedule: AnySchedule, completions: int) -> None:
        self._learner = learner
        self._schedule = schedule
        self._completions = completions
        self._trained = [p for p in learner.model.parameters() if p.requires_grad]
        self._held: list[Tensor] = []
        self.version = learner.version
        self._hold()

    def __call__(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Score some of what the latest step consumed; the fields for its line, none where nothing fits.

        `logp_gap` and `logp_gap_max` in nats, `rank` and `rank_variance` (see `scalerl.rl.health.Sampling`), all
        over `probe_tokens` tokens.
        """
        if not self._completions:
            return {}
        fresh = [r for r in rollouts if r.first_version == self.version]
        some = fresh[:: max(1, len(fresh) // self._completions)][: self._completions]
        found = self._score(some) if some else {}
        now = self._learner.version
        if now - self.version > self._schedule.max_age and self._schedule.publishes(now):
            self._hold()
        return found

    def state(self) -> dict[str, Any]:
        """What a resume needs to go on as if nothing had happened: a version, and tensors."""
        return {"version": self.version, "held": self._held}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.version, self._held = state["version"], state["held"]

    def _hold(self) -> None:
        self.version = self._learner.version
        if self._completions:
            self._held = [p.detach().to("cpu", copy=True) for p in self._trained]

    @torch.no_grad()
    def _score(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        token_NT, wanted_NT, recorded_W = self._tokens(rollouts)
        if not len(recorded_W):
            return {}
        with self._held_weights():
            logp_WV = self._learner.distributions(token_NT, wanted_NT)
        chosen_W1 = token_NT[:, 1:][wanted_NT][:, None].to(logp_WV.device)
        logp_W1 = logp_WV.gather(-1, chosen_W1)
        gap_W = (logp_W1[:, 0].cpu().double() - torch.from_numpy(recorded_W)).abs()
        p_WV = logp_WV.double().exp()
        likelier_W = torch.where(logp_WV > logp_W1, p_WV, 0).sum(-1)
        tied_W = torch.where(logp_WV == logp_W1, p_WV, 0).sum(-1)
        return {
            "probe_tokens": len(recorded_W),
            "logp_gap": float(gap_W.mean()),
            "logp_gap_max": float(gap_W.max()),
            "rank": float((likelier_W + tied_W / 2).mean()),
            "rank_variance": float((1 - (p_WV**3).sum(-1)).mean() / 12),
        }

    def _tokens(self, rollouts: Sequence[Rollout]) -> tuple[Tensor, Tensor, np.ndarray]:
        """Padded tokens, which of them (after the first) the held version sampled, and their recorded
        log-probabilities."""
        own = [r.version_T == self.version for r in rollouts]  # versions never fall within a completion
        ends = [len(r.prompt_T) + int(of.sum()) for r, of in zip(rollouts, own, strict=True)]
        token_NT = np.zeros((len(rollouts), max(ends)), dtype=np.int64)
        wanted_NT = np.zeros(token_NT.shape, dtype=bool)
        for n, (r, end) in enumerate(zip(rollouts, ends, strict=True)):
            start = len(r.prompt_T)
            token_NT[n, :start], token_NT[n, start:end] = r.prompt_T, r.token_T[: end - start]
            wanted_NT[n, start:end] = r.sampled_T[: end - start]
        recorded = [r.logp_T[of & r.sampled_T] for r, of in zip(rollouts, own, strict=True)]
        return torch.from_numpy(token_NT), torch.from_numpy(wanted_NT[:, 1:]), np.concatenate(recorded)

    @contextmanager
    def _held_weights(self) -> Iterator[None]:
        """The learner's model with the weights held; its own are put back as they were."""
        own = [p.detach().clone() for p in self._trained]
        try:
            _install(self._held, self._trained)
            yield
        finally:
            _install(own, self._trained)


def _install(values: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    for value, parameter in zip(values, parameters, strict=True):
        parameter.detach().copy_(value)
