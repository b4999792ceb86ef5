"""Loaded by the process that runs are forked from: torch and all that trains. Import it in runs alone."""

import os

# Of every run: they share the machine, one thread each. It has to be set before torch is loaded.
os.environ |= (ENVIRONMENT := {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"})

import scalerl.forecast.best
import scalerl.forecast.freeze
import scalerl.rl.train  # noqa: F401
