"""The process of one run, a job of `scalerl.study.run.jobs`.

It sends "progress" (share of the budget, pass rate) after every evaluation and once a second, and at its end
"ended" (outcome, cause), where the outcome is that of `scalerl.study.record.Attempt`, or "disk".
"""

import logging
import os
import time
import traceback
from pathlib import Path

from scalerl.errors import DivergedError, PausedError, ScalerlError, WriteError, brief_error
from scalerl.forecast.best import rates_by_step
from scalerl.forecast.freeze import freeze
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.loop.progress import Progress
from scalerl.rl.train import train
from scalerl.rl.workers.backend import Channel
from scalerl.rl.workers.signals import stopped_by_signals
from scalerl.study.run.jobs import when_stopped


def work(
    channel: Channel, recipe: Recipe, folder: Path, until: float, log: Path, gpus: str | None = None
) -> None:
    """Train `recipe` in `folder` until `until` of its budget is spent; what is printed goes to `log`.

    `gpus` are the numbers of those that it may see; all where it is None.
    """
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus  # read when CUDA is first used, which it was not yet
    os.setsid()  # Ctrl-C is for the study, which stops its runs
    try:
        with log.open("ab") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
    except OSError as error:
        channel.send("ended", ("disk", f"{log}: {error.strerror}"))
        return
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    outcome, cause = "done", ""
    try:
        with stopped_by_signals() as stop:
            when_stopped(channel, stop.set)
            train(
                recipe,
                folder,
                resume=True,
                forecaster=freeze,
                smooth=rates_by_step,
                progress=_Progress(channel),
                # One core is one run's where it has one process; the record is the same either way.
                evaluate_aside=recipe.placement.kind != "inline",
                stop=stop,
                until=until,
            )
    except KeyboardInterrupt:
        outcome, cause = "cut", "stopped"
    except ScalerlError as error:
        kinds = ((WriteError, "disk"), (DivergedError, "diverged"), (PausedError, "paused"))
        outcome = next((name for kind, name in kinds if isinstance(error, kind)), "failed")
        cause = str(error).partition(";")[0] if outcome == "paused" else str(error)
    except Exception as error:
        traceback.print_exc()
        outcome, cause = "failed", brief_error(error)
    channel.send("ended", (outcome, cause))


class _Progress:
    """Sends how far the run is."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._sent = channel, -1.0

    def __call__(self, progress: Progress) -> None:
        if progress.finding:
            logging.getLogger(__name__).warning(progress.finding)
        now = time.monotonic()
        if progress.evaluated or now - self._sent >= 1:
            self._sent = now
            self._channel.send("progress", (progress.share, progress.pass_rate))
