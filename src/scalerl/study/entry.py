"""Functions for scripts: run a study, and compare the arms of a study that was run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from scalerl.own_code import check_main_guard
from scalerl.study.record import StudyRecord

if TYPE_CHECKING:
    from scalerl.study.run.runner import Watch
    from scalerl.study.spec import Study
    from scalerl.study.verdict.verdict import StudyVerdict


def run(
    study: Study,
    folder: str | Path,
    *,
    cores: int = 1,
    progress: Watch = lambda progress: None,
    stop: threading.Event | None = None,
) -> StudyRecord:
    """Run a study into a folder, or continue it, as `scalerl study` does.

    A script that calls this needs the usual `if __name__ == "__main__":`, as it starts processes:

        from scalerl import rl, study

        if __name__ == "__main__":
            base, arms = rl.load_recipe("demo"), {"dapo": {"loss": rl.Dapo()}, "gspo": {"loss": rl.Gspo()}}
            study.run(study.Study(base, seeds=3, arm=arms), "studies/losses", cores=2)
            print(study.verdict("studies/losses").to_json())

    Args:
        study: the base recipe, its arms, seeds and budgets; `load_study` reads one from a file.
        folder: the folder of the study; runs that are finished there are not run again.
        cores: how many cores to use, or GPUs if there are any; a run takes one for each of its devices.
        progress: called several times a second, and at every event.
        stop: once it is set, every run saves a checkpoint, and the study raises KeyboardInterrupt.

    Raises:
        InputError: a recipe is invalid, the runs could not be compared, or the folder holds another study.
        WriteError: a file cannot be written to the disk.
        KeyboardInterrupt: the study was stopped; a second call continues it.
    """
    from scalerl.study.plan import make_plan
    from scalerl.study.run.runner import run_study

    check_main_guard()
    return run_study(make_plan(study), Path(folder), cores=cores, watch=progress, stop=stop)


def verdict(
    folder: str | Path,
    *,
    axis: str | None = None,
    budget: float | None = None,
    target: float | None = None,
    level: float = 0.95,
    progress: Callable[[float], None] | None = None,
) -> StudyVerdict:
    """Compare the arms of the study in a folder, finished or not, as `scalerl study report` does.

    Args:
        folder: the folder of the study; nothing in it is run.
        axis: the compute axis; defaults to that of the study.
        budget: compute at which pass rates are compared; defaults to the last budget of the study, or on
            another axis to the largest compute that all arms with a fit have reached.
        target: pass rate to which the compute is compared; defaults to that of the study.
        level: level of the intervals; 1 - level is the family-wise error of the verdicts by curves, and of
            those as measured, each under its assumptions.
        progress: called with the share of the runs that have been fitted.

    Raises:
        InputError: the folder holds no study, or a file in it cannot be read.
        CannotAnswerError: there are too few evaluations.
    """
    from scalerl.study.verdict.verdict import judge_study

    record = StudyRecord.read(folder)
    return judge_study(record, axis=axis, budget=budget, target=target, level=level, progress=progress)
