"""`scalerl study`: recipes x seeds, run and compared."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from scalerl.commands._text import print_rows, print_table, print_warnings
from scalerl.errors import InputError, InterruptedRunError

if TYPE_CHECKING:
    from scalerl.study.plan import Plan


def add(commands: argparse._SubParsersAction) -> None:
    """The arguments of `scalerl study`."""
    study = commands.add_parser("study", help="run a study, recipes x seeds, and compare its arms")
    study.add_argument("study", metavar="STUDY.toml", type=Path, help="a study file (docs/studies.md)")
    study.add_argument("-o", "--output", metavar="STUDY", type=Path, help="its folder (studies/NAME)")
    study.add_argument(
        "--dry-run", action="store_true", help="print the runs and what they cost; run nothing"
    )
    study.add_argument(
        "--cores", type=int, metavar="N", help="use so many (all); a run takes one for each of its devices"
    )
    study.add_argument(
        "--like",
        type=Path,
        action="append",
        default=[],
        metavar="RUN",
        help="a run that shows how long such training takes, for --dry-run",
    )
    study.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Plan the study, run it, and print its verdict."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from scalerl.study.plan import make_plan
    from scalerl.study.spec import load_study

    plan = make_plan(load_study(args.study))
    folder = args.output or Path("studies") / plan.name
    cores = args.cores or len(os.sched_getaffinity(0))
    if cores < 1:
        raise InputError(f"--cores: a number of 1 or more, found {cores}")
    print_warnings(plan.warnings)
    if args.dry_run:
        _print_cost(plan, folder, args.like, cores)
        return
    _run(plan, folder, cores, args.study)


def _run(plan: Plan, folder: Path, cores: int, source: Path) -> None:
    from scalerl.console import StudyProgressBar
    from scalerl.rl.process import stopped_by_signals
    from scalerl.study.runner import run_study

    try:
        with StudyProgressBar(plan.name) as bar, stopped_by_signals() as stop:
            run_study(plan, folder, cores=cores, watch=bar.update, stop=stop)
    except KeyboardInterrupt:
        raise InterruptedRunError(f"interrupted; scalerl study {source} -o {folder} goes on") from None


def _print_cost(plan: Plan, folder: Path, like: list[Path], cores: int) -> None:
    """The table of runs, and what they cost in all."""
    from scalerl.report.numbers import unit_for
    from scalerl.study.estimate import estimate
    from scalerl.study.plan import rate_in_words
    from scalerl.study.table import flat

    cost = estimate(plan, folder, like, cores)
    unit = unit_for(plan.axis, cost.compute)
    rows = [
        (arm.arm, f"{arm.runs}", unit.show(arm.compute), _hours(arm.gpu_hours), _size(arm.memory_bytes))
        for arm in cost.arms
    ]
    header = ("arm", "runs", "compute", "GPU-hours", "memory of one")
    said = [", ".join(flat(arm.changes)) or "-" for arm in plan.arms]
    print_table([*header, "changes"], [(*row, text) for row, text in zip(rows, said, strict=True)])
    hint = "" if cost.gpu_hours is not None else "; --like RUN takes it from a run"
    dollars = "-" if cost.dollars is None else f"{cost.dollars:,.2f} dollars"
    print()
    print_rows(
        [
            ("runs", f"{cost.runs}: {len(plan.arms)} arms, seeds {', '.join(map(str, plan.seeds))}"),
            ("budgets", ", ".join(unit_for(plan.axis, b).show(b) for b in plan.budgets)),
            ("learning rate", rate_in_words(plan)),
            ("compute", unit.show(cost.compute)),
            ("time", f"{_hours(cost.gpu_hours)} GPU-hours, {_hours(cost.wall_hours)} on {cores} cores{hint}"),
            ("price", dollars),
            ("folder", str(folder)),
        ]
    )


def _hours(hours: float | None) -> str:
    return "?" if hours is None else f"{hours:,.3g}"


def _size(n_bytes: int | None) -> str:
    return "?" if n_bytes is None else f"{n_bytes / 2**30:,.3g} GiB"
