"""Studies: recipes x seeds, run, and compared so that ceiling, efficiency and noise can be distinguished.

spec.py, arms.py, plan.py     the question, the arms, and the planned runs
run/       executes the runs in parallel; record.py reads the folder
verdict/   compares the arms; page/ shows the result
entry.py   the functions for scripts: run, verdict

Imported by `cli`.
"""

from typing import TYPE_CHECKING

from scalerl._lazy import lazy

if TYPE_CHECKING:
    from scalerl.study.arms import (
        Axis as Axis,
        Grid as Grid,
        LeaveOneOutArms as LeaveOneOutArms,
        Listed as Listed,
        SensitivityArms as SensitivityArms,
        SweepArms as SweepArms,
        Systems as Systems,
    )
    from scalerl.study.entry import run as run, verdict as verdict
    from scalerl.study.record import StudyRecord as StudyRecord
    from scalerl.study.run.runner import StudyProgress as StudyProgress
    from scalerl.study.spec import (
        LearningRate as LearningRate,
        Stop as Stop,
        Study as Study,
        load_study as load_study,
    )
    from scalerl.study.verdict.verdict import StudyVerdict as StudyVerdict


lazy(__name__)
