"""What the process that runs are forked from loads: what trains. It is imported there alone.

Schedulers send SIGTERM to all processes of a job, and a closed terminal SIGHUP: they are for the study and
its runs to answer. Without this process no run could be followed to its end.
"""

import signal

import scalerl.study.run.worker  # noqa: F401

for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
