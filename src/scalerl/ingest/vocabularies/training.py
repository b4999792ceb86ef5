"""Which metrics only a step of training logs, by the names that all trainers give them."""

from __future__ import annotations

import functools
import itertools
import re

from scalerl.ingest.vocabularies import VOCABULARIES
from scalerl.ingest.vocabularies.vocabulary import any_of, is_of_evaluation

_OF_TRAINING = (
    *("train_reward", "ratio_clipped", "staleness_mean", "kl", "grad_norm", "loss", "lr"),
    *("step_seconds", "tokens", "samples"),
)
"""Roles of what an evaluator does not log; lengths, entropies and counters so far it may."""
_OF_EITHER = re.compile(r"(?:.*/)?(?:accuracy|acc|success_rate|scores?)", re.DOTALL)


@functools.lru_cache(2**16)
def is_of_training(name: str) -> bool:
    """Whether a metric, by its name, is one that only a step of training logs, under whatever prefix."""
    if is_of_evaluation(name) or _OF_EITHER.fullmatch(name):
        return False
    return _names().fullmatch(name) is not None


@functools.cache
def _names() -> re.Pattern[str]:
    roles = (getattr(vocabulary, role) for vocabulary in VOCABULARIES for role in _OF_TRAINING)
    return re.compile(rf"(?:.*/)?{any_of(itertools.chain(*roles)).pattern}", re.DOTALL)
