"""The vocabularies of RL trainers, one file for each.

Every file says from which version of the trainer its names are. Another trainer needs a file with one table,
and its place in `VOCABULARIES`.
"""

from scalerl.ingest.trainers.any_trainer import ANY
from scalerl.ingest.trainers.nemo_rl import NEMO_RL
from scalerl.ingest.trainers.open_instruct import OPEN_INSTRUCT
from scalerl.ingest.trainers.openrlhf import OPENRLHF
from scalerl.ingest.trainers.pipeline_rl import PIPELINE_RL
from scalerl.ingest.trainers.prime_rl import PRIME_RL
from scalerl.ingest.trainers.scalerl import SCALERL
from scalerl.ingest.trainers.skyrl import SKYRL
from scalerl.ingest.trainers.trl import TRL
from scalerl.ingest.trainers.verl import VERL

VOCABULARIES = (SCALERL, TRL, VERL, PRIME_RL, PIPELINE_RL, SKYRL, OPENRLHF, NEMO_RL, OPEN_INSTRUCT, ANY)
"""All of them; the last has no signs, and is for logs that show none."""

__all__ = [
    "ANY",
    "NEMO_RL",
    "OPENRLHF",
    "OPEN_INSTRUCT",
    "PIPELINE_RL",
    "PRIME_RL",
    "SCALERL",
    "SKYRL",
    "TRL",
    "VERL",
    "VOCABULARIES",
]
