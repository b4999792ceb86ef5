"""What the process of one run does (`scalerl.study.run.job` starts it).

It sends to its parent {"share", "pass_rate"} after every evaluation and once a second, and at its end
{"outcome", "cause"}, where `outcome` is that of `scalerl.study.record.Attempt`, or "disk". It ends with its
parent.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from scalerl.errors import DivergedError, PausedError, ScalerlError, WriteError, brief_error
from scalerl.forecast.freeze import freeze
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.loop.progress import Progress
from scalerl.rl.train import train
from scalerl.rl.workers.process import stopped_by_signals


def work(
    parent: Connection, recipe: Recipe, folder: Path, until: float, log: Path, gpus: str | None = None
) -> None:
    """Train `recipe` in `folder` until `until` of its budget is spent; what is printed goes to `log`.

    `gpus` are the numbers of those that it may see; all where it is None.
    """
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus  # read when CUDA is first used, which it was not yet
    os.setsid()  # Ctrl-C is for the study, which stops its runs
    threading.Thread(target=_follow_the_parent, daemon=True).start()
    speaker = _ProgressSender(parent)
    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        speaker.say(outcome="disk", cause=f"{log}: {error.strerror}")
        return
    for stream in (1, 2):
        os.dup2(handle, stream)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    outcome, cause = "done", ""
    try:
        with stopped_by_signals() as stop:
            train(
                recipe,
                folder,
                resume=True,
                forecaster=freeze,
                progress=speaker,
                # One core is one run's where it has one process; the record is the same either way.
                evaluate_aside=recipe.placement.kind != "inline",
                stop=stop,
                until=until,
            )
    except KeyboardInterrupt:
        outcome, cause = "cut", "stopped"
    except WriteError as error:
        outcome, cause = "disk", str(error)
    except DivergedError as error:
        outcome, cause = "diverged", str(error)
    except PausedError as error:
        outcome, cause = "paused", str(error).partition(";")[0]
    except ScalerlError as error:
        outcome, cause = "failed", str(error)
    except Exception as error:
        traceback.print_exc()
        outcome, cause = "failed", brief_error(error)
    speaker.say(outcome=outcome, cause=cause)


class _ProgressSender:
    """Tells the parent how far the run is."""

    def __init__(self, parent: Connection) -> None:
        self._parent = parent
        self._spoke = -1.0

    def __call__(self, progress: Progress) -> None:
        if progress.finding:
            logging.getLogger(__name__).warning(progress.finding)
        now = time.monotonic()
        if progress.evaluated or now - self._spoke >= 1:
            self._spoke = now
            self.say(share=progress.share, pass_rate=progress.pass_rate)

    def say(self, **values: Any) -> None:
        """Send it."""
        try:
            self._parent.send(values)
        except OSError:
            os._exit(1)  # nobody is there


def _follow_the_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
