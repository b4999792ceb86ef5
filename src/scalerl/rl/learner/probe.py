"""The probe: does the trainer give the generator's tokens the probabilities they were sampled with?

Trained tokens do not show this: most are a few versions old, and a difference may be staleness. So the probe
keeps a copy of the weights of one version, waits for completions that this version started, and scores them
with that copy by the trainer's own forward pass:

    hold     the weights of version v when they are published
    score    a few completions in each of the next batches whose KV cache was started by v: their tokens up to
             the first sampled by another version, so that neither weights nor KV cache differ
    release  v once the schedule allows no more tokens of it, and hold the next version

The two log-probabilities then differ only by kernels and precision. Three figures are computed:

    gap      |trainer - recorded|: large if the temperature differs, or weights were lost or corrupted in sync
    head     the gap less |trainer with its LM head in the other precision - recorded|: above 0 if the
             generator's head has the other precision, which bfloat16 noise would hide in the gap
    rank     the ranks of the tokens in the trainer's distribution: they show whether the tokens are a sample
             of it, as a generator can record probabilities of a distribution it did not sample from

The probe costs a forward pass (two in a low precision) over a few completions of a batch, and memory for one
copy of the trained weights. It copies the learner's own weights, not those that were published.

Shapes in names: N completions, T positions (prompt and completion), W wanted tokens, V vocabulary,
L layers with experts, K experts of a token.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scalerl.rl.config.recipe import Recipe
from scalerl.rl.learner.batch import padded
from scalerl.rl.learner.learner import Learner
from scalerl.rl.types import Rollout


class Probe:
    """A copy of one version of the learner's weights, to score `health.probe` completions that it started."""

    def __init__(self, learner: Learner, recipe: Recipe) -> None:
        self._learner = learner
        self._schedule = recipe.schedule
        self._completions = recipe.health.probe
        # In float32 there is no other head; and if the recipe itself sets different heads, they must differ.
        self._two_heads = recipe.precision != "float32" and recipe.fp32_logits in ("both", "neither")
        self._cuts = recipe.top_p < 1 or recipe.top_k > 0
        self._held: list[Tensor] = []
        self.version = learner.version
        self._hold()

    def __call__(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Score some completions of the latest step; return the fields for its line, if there are any.

        They are `logp_gap` and `logp_gap_max` in nats, `rank` and `rank_variance`, and in a low precision
        `head_gap` and `head_gap_rms` in nats, all over `probe_tokens` tokens. See `sampling` and `head` of
        `scalerl.rl.health.figures.FIGURES` for their use.
        """
        if not self._completions:
            return {}
        fresh = [r for r in rollouts if r.first_version == self.version]
        some = fresh[:: max(1, len(fresh) // self._completions)][: self._completions]
        found = self._score(some) if some else {}
        now = self._learner.version
        # Completions have only published versions: with OffPolicy every k-th.
        if now - self.version > self._schedule.max_staleness and self._schedule.publishes(now):
            self._hold()
        return found

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs: a version, and tensors."""
        return {"version": self.version, "held": list(self._held)}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        if self._held and state["held"]:
            self.version, self._held = state["version"], state["held"]
        else:  # the probe was off, or the ranks hold the weights: hold the current ones
            self._hold()

    def _hold(self) -> None:
        self.version = self._learner.version
        if self._completions:
            self._held = self._learner.hold()

    def _score(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        n = len(rollouts)
        batch = padded([self._up_to_next_version(r) for r in rollouts], np.arange(n), np.zeros(n), np.ones(n))
        wanted_NT = batch.sampled_NT[:, 1:]
        recorded_W, expert_NTLK = batch.behaviour_logp_NT[:, 1:][wanted_NT], batch.expert_NTLK
        if not len(recorded_W):
            return {}
        fp32 = self._learner.fp32_logits
        heads = (fp32, not fp32) if self._two_heads else (fp32,)
        tokens = torch.from_numpy(batch.token_NT), torch.from_numpy(wanted_NT)
        experts = None if expert_NTLK is None else expert_NTLK[:, :-1]  # the last token is not read
        logp_WH, rank_W2 = self._learner.held_scores(self._held, *tokens, heads, experts)
        gap_WH = (logp_WH - torch.from_numpy(recorded_W)[:, None]).abs()
        # Rounding may put a token at the edge of top_p or top_k outside: drop its infinite gap.
        gap_WH = gap_WH[gap_WH.isfinite().all(1)] if self._cuts else gap_WH
        rank, variance = rank_W2.mean(0).tolist()
        found = {
            "probe_tokens": len(recorded_W),
            "logp_gap": float(gap_WH[:, 0].mean()),
            "logp_gap_max": float(gap_WH[:, 0].max()),
            "rank": rank,
            "rank_variance": variance,
        }
        if self._two_heads:
            excess_W = gap_WH[:, 0] - gap_WH[:, 1]
            found |= {
                "head_gap": float(excess_W.mean()),
                "head_gap_rms": float(excess_W.square().mean().sqrt()),
            }
        return found

    def _up_to_next_version(self, rollout: Rollout) -> Rollout:
        """Return a completion cut before its first token of another version than the held one."""
        end = int((rollout.version_T == self.version).sum())  # versions never decrease within a completion
        own = {name: getattr(rollout, name)[:end] for name in ("token_T", "sampled_T", "logp_T", "version_T")}
        if rollout.expert_PLK is not None:
            own["expert_PLK"] = rollout.expert_PLK[: len(rollout.prompt_T) + end - 1]
        return replace(rollout, **own)
