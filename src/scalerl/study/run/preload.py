"""Loaded by the process that runs are forked from: torch and all that trains. Import it nowhere else.

Schedulers send SIGTERM to all processes of a job, and a closed terminal SIGHUP: the study and its runs handle
them. Without this process no run could be followed to its end, so it ignores them.
"""

import os
import signal

# Runs share the machine: one thread each. It has to be set before torch is loaded.
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

import scalerl.forecast.best
import scalerl.forecast.freeze
import scalerl.rl.train  # noqa: F401

for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
