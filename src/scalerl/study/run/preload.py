"""Loads torch and the trainer in the process from which runs are forked; do not import it elsewhere."""

import os

# Runs share the machine, with one thread each. This must be set before torch is loaded.
os.environ |= (ENVIRONMENT := {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"})

import scalerl.forecast.best
import scalerl.forecast.freeze
import scalerl.rl.train  # noqa: F401
