"""The vocabularies of RL trainers, one file for each.

Every file says from which version of the trainer its names are. Another trainer needs a file with one table,
and its place in `VOCABULARIES`.

Imported by `cli`, `ingest`, `ingest.formats`, `ingest.formats.console`, `ingest.logs`.
"""

import functools
import itertools
import re

from scalerl.ingest.vocabularies.any_trainer import ANY
from scalerl.ingest.vocabularies.nemo_rl import NEMO_RL
from scalerl.ingest.vocabularies.open_instruct import OPEN_INSTRUCT
from scalerl.ingest.vocabularies.openrlhf import OPENRLHF
from scalerl.ingest.vocabularies.pipeline_rl import PIPELINE_RL
from scalerl.ingest.vocabularies.prime_rl import PRIME_RL
from scalerl.ingest.vocabularies.scalerl import SCALERL
from scalerl.ingest.vocabularies.skyrl import SKYRL
from scalerl.ingest.vocabularies.slime import SLIME
from scalerl.ingest.vocabularies.trl import TRL
from scalerl.ingest.vocabularies.verl import VERL
from scalerl.ingest.vocabularies.vocabulary import any_of
from scalerl.record.metric import is_of_evaluation

VOCABULARIES = (
    SCALERL,
    TRL,
    VERL,
    PRIME_RL,
    PIPELINE_RL,
    SKYRL,
    OPENRLHF,
    NEMO_RL,
    OPEN_INSTRUCT,
    SLIME,
    ANY,
)
"""All of them; the last has no signs, and is for logs that show none."""
BY_TRAINER = {vocabulary.trainer: vocabulary for vocabulary in VOCABULARIES}
_OF_TRAINING = (
    *("train_reward", "ratio_clipped", "staleness_mean", "kl", "grad_norm", "loss", "lr"),
    *("step_seconds", "tokens", "samples"),
)
"""Roles that an evaluator does not log; lengths, entropies and counters so far it may."""
_OF_EITHER = re.compile(r"(?:.*/)?(?:accuracy|acc|success_rate|scores?)", re.DOTALL)

__all__ = ["ANY", "BY_TRAINER", "VOCABULARIES", "is_of_training"]


@functools.lru_cache(2**16)
def is_of_training(name: str) -> bool:
    """Whether a metric, by its name, is one that only a step of training logs, under whatever prefix."""
    is_of_either = is_of_evaluation(name) or _OF_EITHER.fullmatch(name)
    return not is_of_either and _training_names().fullmatch(name) is not None


@functools.cache
def _training_names() -> re.Pattern[str]:
    roles = (getattr(vocabulary, role) for vocabulary in VOCABULARIES for role in _OF_TRAINING)
    return re.compile(rf"(?:.*/)?{any_of(itertools.chain(*roles)).pattern}", re.DOTALL)
