"""Lower bounds of the seconds of a step, in closed form: each part as if there were nothing else.

Shapes in names: B groups, G completions of a group, S batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scalerl.plan.job import PlannedJob
from scalerl.plan.rates import Rates

_DRAWN = 20_000
"""Completions that the means are taken over."""


@dataclass(frozen=True)
class TokenCounts:
    """Tokens of a recipe's completions, the cut included, on average."""

    completion: float
    longest: float
    """Tokens of the longest completion of a batch."""
    context: float
    """Positions that a completion attends to, its prompt included, averaged over the decode steps."""

    @classmethod
    def of(cls, job: PlannedJob, rates: Rates) -> TokenCounts:
        """Estimate them from draws with a fixed seed."""
        rng, n_batches = np.random.default_rng(0), -(-_DRAWN // job.completions)
        length_BG = rates.lengths.draw(rng, n_batches * job.prompts, job.samples, job.cut)
        longest_S = length_BG.reshape(n_batches, -1).max(axis=1)
        mean, square = float(length_BG.mean()), float((length_BG.astype(float) ** 2).mean())
        # A completion of L tokens attends to 0, 1, ..., L - 1 of its own.
        context = rates.lengths.prompt + (square / mean - 1) / 2
        return cls(mean, float(longest_S.mean()), context)


def seconds_per_slot(rates: Rates, tokens: TokenCounts) -> float:
    """Seconds by which a decode step is longer for each decode slot in use."""
    return rates.decode.slot + rates.decode.position * tokens.context


def train_seconds(rates: Rates, trainers: int, tokens: float, longest: float) -> float:
    """Seconds of a step on `tokens`: shared evenly, but that a completion is on one trainer as a whole."""
    return rates.trainer.fixed + rates.trainer.token * max(tokens / trainers, longest)


def verify_seconds(job: PlannedJob, rates: Rates) -> float:
    """Seconds in which the completions of a step are verified."""
    return job.completions * rates.verify.completion / rates.verify.workers


def evaluation_seconds(job: PlannedJob, rates: Rates, counts: TokenCounts, generators: int) -> float:
    """Seconds of an evaluation by an evaluator with slots like a generator's, or by all generators: at the
    least those of its tokens with all slots in use, and of its longest completion."""
    asked, decode = job.evaluations, rates.decode
    shared_by = generators if asked.by_generators else 1
    if rates.evaluate is not None:
        return rates.evaluate / shared_by
    if not asked.completions:
        return 0.0
    slot, share = seconds_per_slot(rates, counts), asked.completions / shared_by
    tokens = share * counts.completion * (decode.base / min(asked.slots, share) + slot)
    prompts = asked.prompts / shared_by * rates.lengths.prompt * decode.prompt
    return max(tokens + prompts, counts.longest * (decode.base + slot))


def bounds(job: PlannedJob, rates: Rates, generators: int, trainers: int) -> dict[str, float]:
    """Seconds of a step if one thing alone bounded it:

    generation     with all decode slots of all generators always in use, and what they evaluate
    training       the trainers
    driver         what the driver does by itself
    verification   of the completions
    evaluations    by an evaluator, one after the other
    broadcast      of the weights, one version after the other
    in order       the longest completion of a batch: a batch is admitted when the weights of k + 1 steps
                   before are there, so that the time of the longest, of the weights and of a step's
                   other parts fits into k + 1 steps. It decodes beside as many others as such a step needs
    """
    counts = TokenCounts.of(job, rates)
    slot, decode, weights = seconds_per_slot(rates, counts), rates.decode, rates.weights
    used = job.completions * rates.trainer.used
    generation = job.completions * counts.completion * (decode.base / job.decode_slots + slot)
    generation += job.prompts * rates.lengths.prompt * decode.prompt
    training = train_seconds(rates, trainers, used * counts.completion, counts.longest * (used >= 1))
    verification = verify_seconds(job, rates)
    evaluating = evaluation_seconds(job, rates, counts, generators) / job.evaluations.every
    driver = job.completions * rates.driver.completion + rates.driver.step
    phase = job.steps_of_a_phase
    after = phase * (training + driver + verification) + weights.publish + weights.send + weights.update
    least = {
        "generation": generation / generators + evaluating * job.evaluations.by_generators,
        "training": training,
        "driver": driver + weights.publish / phase,
        "verification": verification,
        "broadcast": weights.send / phase,
        "evaluations": evaluating * (not job.evaluations.by_generators),
    }

    def in_order(step: float) -> float:
        tokens = job.completions * counts.completion / generators / step  # a second, of one generator
        slots = min(decode.base * tokens / max(1 - slot * tokens, 1e-9), job.decode_slots)
        return (counts.longest * (decode.base + slot * max(slots, 1.0)) + after) / job.batches_in_flight

    low = max(least.values())
    high = in_order(low)
    while high > low * 1.0001:  # the longer a step is, the fewer slots it needs
        middle = (low + high) / 2
        low, high = (middle, high) if in_order(middle) > middle else (low, middle)
    return least | {"in order": in_order(high)}
