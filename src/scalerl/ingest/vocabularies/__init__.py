"""The vocabularies of RL trainers, one file for each.

Every file says from which version of the trainer its names are. Another trainer needs a file with one table,
and its place in `VOCABULARIES`.
"""

from scalerl.ingest.vocabularies.any_trainer import ANY
from scalerl.ingest.vocabularies.nemo_rl import NEMO_RL
from scalerl.ingest.vocabularies.open_instruct import OPEN_INSTRUCT
from scalerl.ingest.vocabularies.openrlhf import OPENRLHF
from scalerl.ingest.vocabularies.pipeline_rl import PIPELINE_RL
from scalerl.ingest.vocabularies.prime_rl import PRIME_RL
from scalerl.ingest.vocabularies.scalerl import SCALERL
from scalerl.ingest.vocabularies.skyrl import SKYRL
from scalerl.ingest.vocabularies.trl import TRL
from scalerl.ingest.vocabularies.verl import VERL

VOCABULARIES = (SCALERL, TRL, VERL, PRIME_RL, PIPELINE_RL, SKYRL, OPENRLHF, NEMO_RL, OPEN_INSTRUCT, ANY)
"""All of them; the last has no signs, and is for logs that show none."""

__all__ = ["ANY", "VOCABULARIES"]
