"""Lower bounds on the seconds per step, in closed form: each part as if it were the only one.

Shapes in names: B groups, G completions of a group, S batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scalerl.plan.job import PlannedJob
from scalerl.plan.rates import Rates

_DRAWN = 20_000
"""Number of completions over which means are taken."""


@dataclass(frozen=True)
class TokenCounts:
    """Mean tokens of a recipe's completions, after truncation and interruption."""

    completion: float
    longest: float
    """Tokens of the longest completion of a batch."""
    context: float
    """Positions that a completion attends to, prompt included, averaged over its decode steps."""

    @classmethod
    def of(cls, job: PlannedJob, rates: Rates) -> TokenCounts:
        """Estimate the means from draws with a fixed seed."""
        rng, n_batches = np.random.default_rng(0), -(-_DRAWN // job.completions)
        length_BG = rates.lengths.draw(rng, n_batches * job.prompts, job.samples, job.cut)
        longest_S = length_BG.reshape(n_batches, -1).max(axis=1)
        mean, square = float(length_BG.mean()), float((length_BG.astype(float) ** 2).mean())
        # The tokens of a completion of length L attend to 0, 1, ..., L - 1 earlier ones.
        context = rates.lengths.prompt + (square / mean - 1) / 2
        return cls(mean, float(longest_S.mean()), context)


def seconds_per_slot(rates: Rates, tokens: TokenCounts) -> float:
    """Return the seconds that each decode slot in use adds to a decode step."""
    return rates.decode.slot + rates.decode.position * tokens.context


def train_seconds(rates: Rates, trainers: int, tokens: float, longest: float) -> float:
    """Return the seconds of a step on `tokens`, shared evenly, with each completion whole on one trainer."""
    return rates.trainer.fixed + rates.trainer.token * max(tokens / trainers, longest)


def verify_seconds(job: PlannedJob, rates: Rates) -> float:
    """Return the seconds to verify the completions of a step."""
    return job.completions * rates.verify.completion / rates.verify.workers


def evaluation_seconds(job: PlannedJob, rates: Rates, counts: TokenCounts, generators: int) -> float:
    """Return the seconds of an evaluation, by all generators or by an evaluator with as many slots as one: at
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
    """Return the seconds per step if one part alone were the limit:

    generation     all decode slots of all generators always in use, plus evaluations by generators
    training       the trainers
    driver         the driver's own work
    verification   verifying the completions
    evaluations    by an evaluator, one after the other
    broadcast      of the weights, one version after the other
    in order       the longest completion of a batch: a batch is admitted once the weights of k + 1 steps
                   earlier have arrived, so the longest completion, the weights and a step's other parts
                   must fit into k + 1 steps. It decodes beside as many completions as such a step needs
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
        tokens = job.completions * counts.completion / generators / step  # per second and generator
        slots = min(decode.base * tokens / max(1 - slot * tokens, 1e-9), job.decode_slots)
        return (counts.longest * (decode.base + slot * max(slots, 1.0)) + after) / job.batches_in_flight

    low = max(least.values())
    high = in_order(low)
    while high > low * 1.0001:  # bisection: a longer step needs fewer slots
        middle = (low + high) / 2
        low, high = (middle, high) if in_order(middle) > middle else (low, middle)
    return least | {"in order": in_order(high)}
