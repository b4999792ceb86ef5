"""`scalerl study`: recipes x seeds, run and compared."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from scalerl.errors import InterruptedRunError

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
    study.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Plan the study, run it, and print its verdict."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from scalerl.study.plan import make_plan
    from scalerl.study.spec import load_study

    plan = make_plan(load_study(args.study))
    folder = args.output or Path("studies") / plan.name
    _run(plan, folder, args.cores or len(os.sched_getaffinity(0)), args.study)


def _run(plan: Plan, folder: Path, cores: int, source: Path) -> None:
    from scalerl.console import StudyProgressBar
    from scalerl.rl.process import stopped_by_signals
    from scalerl.study.runner import run_study

    try:
        with StudyProgressBar(plan.name) as bar, stopped_by_signals() as stop:
            run_study(plan, folder, cores=cores, watch=bar.update, stop=stop)
    except KeyboardInterrupt:
        raise InterruptedRunError(f"interrupted; scalerl study {source} -o {folder} goes on") from None
