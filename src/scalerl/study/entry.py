"""What a script calls: run a study, and compare the arms of one that was run."""

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
    """Run a study into a folder, or go on with it, as `scalerl study` does.

    A script that calls this needs the usual `if __name__ == "__main__":`, as processes are started:

        from scalerl import rl, study

        if __name__ == "__main__":
            base, arms = rl.load_recipe("demo"), {"dapo": {"loss": rl.Dapo()}, "gspo": {"loss": rl.Gspo()}}
            study.run(study.Study(base, seeds=3, arm=arms), "studies/losses", cores=2)
            print(study.verdict("studies/losses").to_json())

    Args:
        study: the base recipe, its arms, seeds and budgets; `load_study` reads one from a file.
        folder: of the study; what has run there is not run again.
        cores: how many to use, GPUs where there are any; a run takes one for each of its devices.
        progress: called several times a second, and whenever there is something to say.
        stop: once it is set, every run makes a checkpoint, and the study ends by KeyboardInterrupt.

    Raises:
        InputError: a recipe is refused, the study could not compare what it runs, or another study is in the
            folder.
        WriteError: the disk does not take what is written.
        KeyboardInterrupt: it was stopped; a second call goes on.
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
    """Judge the study in a folder, finished or not, as `scalerl study report` does: nothing is run.

    Args:
        folder: of the study.
        axis: of compute; that of the study by default.
        budget: compute at which pass rates are compared; the last of the study by default, or on another axis
            the largest compute that all arms with a fit have reached.
        target: pass rate whose compute is compared; that of the study by default.
        level: of the intervals; 1 - level is the family-wise error of the verdicts by curves, and of those as
            measured, each under its assumptions.
        progress: is called with the share of the runs that are fitted.

    Raises:
        InputError: the folder holds no study, or a file in it cannot be read.
        CannotAnswerError: its evaluations do not say enough.
    """
    from scalerl.study.verdict.verdict import judge_study

    record = StudyRecord.read(folder)
    return judge_study(record, axis=axis, budget=budget, target=target, level=level, progress=progress)
