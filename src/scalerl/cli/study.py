"""`scalerl study`: run and compare recipes x seeds; `scalerl study report`: the verdict of a study."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from scalerl.cli.shared.arguments import amount, option, output, print_json, print_warnings, whole
from scalerl.errors import InputError, InterruptedRunError
from scalerl.view.terminal.rows import print_table

if TYPE_CHECKING:
    from scalerl.study.plan import Plan

HELP = "run recipes x seeds, and compare them"
ABOUT = "Run a study (recipes x seeds), and separate ceiling effects from noise."
EXAMPLES = """
  scalerl study study.toml --dry-run                            # print the runs and their cost, run nothing
  scalerl study study.toml -o studies/mine --cores 2            # run or resume it
  scalerl study report studies/mine --budget 16000              # print its verdict again, write its page
"""


def add(study: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    study.usage = "scalerl study STUDY.toml [options]\n       scalerl study report FOLDER [options]"
    option(study, "what STUDY.toml", "a study file; or `report` and the folder of a study", nargs="+")
    option(study, "-o --output FOLDER", "study folder (default: studies/NAME)", type=output)
    running = study.add_argument_group("running")
    option(running, "--dry-run", "print the runs and their cost; run nothing")
    option(
        running,
        "--cores N",
        "cores to use, or GPUs if there are any (default: all); a run takes one for each of its devices",
        type=whole(),
    )
    option(running, "--like RUN ...", "estimate the time for --dry-run from this run", type=Path)
    verdict = study.add_argument_group("the verdict")
    option(verdict, "--x", "compute axis (default: that of the budgets)")
    option(verdict, "--budget", "compare the pass rates at this compute", type=amount(True))
    option(verdict, "--target", "compare the compute that reaches this pass rate")
    option(verdict, "--level")
    option(
        verdict,
        "--figures",
        "also write the figures as files",
        nargs="+",
        choices=("svg", "png", "pdf"),
        default=[],
    )
    option(verdict, "--json", "print one JSON object, and write no report")


def run(args: argparse.Namespace) -> None:
    """Plan the study, run or resume it, then print its verdict and write its report."""
    if args.what[0] == "report":
        if len(args.what) != 2:
            raise InputError(f"study report: expected one folder of a study, found {len(args.what) - 1}")
        folder = Path(args.what[1])
        if args.budget is not None:
            from scalerl.study.record import read_plan

            _settle_budget(args, str(read_plan(folder)["axis"]))
        _report(folder, args)
        return
    if len(args.what) != 1:
        raise InputError(f"study: expected one study file, found {len(args.what)}: {' '.join(args.what)}")
    source = Path(args.what[0])
    if (source / "study.json").is_file():
        raise InputError(f"{source}: a study that was run; scalerl study report {source} shows its verdict")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from scalerl.study.plan import check_plan, make_plan
    from scalerl.study.spec import load_study

    plan = make_plan(load_study(source))
    _settle_budget(args, plan.axis)
    folder = args.output or Path("studies") / plan.study.name
    import torch

    from scalerl.rl.config.settings import usable_cores
    from scalerl.study.run.decisions import with_combined
    from scalerl.study.run.estimate import check_models, short_of_steps

    check_plan(with_combined(plan, folder), folder)
    # Runs are placed on GPUs if there are any, else on cores.
    cores = args.cores or torch.cuda.device_count() or usable_cores()

    warnings = [*plan.warnings, *short_of_steps(plan)]
    if not (args.dry_run and args.json):
        print_warnings(warnings)
    if args.dry_run:
        _print_cost(plan, folder, args, cores, warnings)
        return
    args.output = None
    check_models(plan)
    from scalerl.cli.console import StudyProgressBar
    from scalerl.rl.workers.signals import stopped_by_signals
    from scalerl.study.run.runner import run_study

    try:
        with StudyProgressBar(plan.study.name) as bar, stopped_by_signals() as stop:
            run_study(plan, folder, cores=cores, watch=bar.update, stop=stop)
    except KeyboardInterrupt:
        raise InterruptedRunError(f"interrupted; scalerl study {source} -o {folder} goes on") from None
    _report(folder, args)


def _settle_budget(args: argparse.Namespace, axis: str) -> None:
    """Replace --budget by a number on the axis of the verdict: --x, else that of the study."""
    from scalerl.record.evaluation import AXES

    if args.budget is not None:
        args.budget = args.budget.on("--budget", args.x or axis, None, AXES)


def _report(folder: Path, args: argparse.Namespace) -> None:
    """Print the verdict of the study in `folder`, and write its report there or to --output."""
    from scalerl.cli.console import share_shown
    from scalerl.study.entry import verdict as judge
    from scalerl.study.page.page import print_study, write_study_report

    with share_shown("study report", "of the runs fitted") as shown:
        asked = {"axis": args.x, "budget": args.budget, "target": args.target, "level": args.level}
        verdict = judge(folder, **asked, progress=shown)
    if args.json:
        print_json(verdict.to_json())
        return
    print_study(verdict)
    written = write_study_report(verdict, args.output or folder, args.figures)
    print(f"\nreport  {written[0]}")


def _print_cost(plan: Plan, folder: Path, args: argparse.Namespace, cores: int, warnings: list[str]) -> None:
    """Print the table of runs and their total cost, or the same as JSON."""
    from scalerl.numbers import unit_for
    from scalerl.study.plan import rate_in_words
    from scalerl.study.run.estimate import estimate
    from scalerl.view.table import changes_in_words

    cost = estimate(plan, folder, args.like, cores)
    if args.json:
        changes = {arm.name: arm.changes for arm in plan.arms}
        answer = {
            "name": plan.study.name,
            "folder": str(folder),
            "axis": plan.axis,
            "budgets": plan.budgets,
            "seeds": plan.seeds,
            "learning_rate": rate_in_words(plan),
            "cores": cores,
            **vars(cost),
            "arms": [vars(arm) | {"changes": changes.get(arm.arm)} for arm in cost.arms],
            "warnings": warnings,
        }
        print_json(answer)
        return
    unit = unit_for(plan.axis, cost.compute)
    rows = [
        (arm.arm, f"{arm.runs}", unit.show(arm.compute), _hours(arm.gpu_hours), memory)
        for arm in cost.arms
        for memory in ["?" if arm.memory_bytes is None else f"{arm.memory_bytes / 2**30:,.3g} GiB"]
    ]
    header = ("arm", "runs", "compute", "GPU-hours", "memory of one")
    said = [changes_in_words(arm.changes) or "-" for arm in plan.arms]
    said += ["decided once they have run"] * (len(rows) - len(said))
    print_table([(*row, text) for row, text in zip(rows, said, strict=True)], (*header, "changes"))
    hint = "; --like RUN takes it from a run" if math.isnan(cost.gpu_hours) else ""
    total = [
        ("runs", f"{cost.runs}: {len(cost.arms)} arms, seeds {', '.join(map(str, plan.seeds))}"),
        ("budgets", ", ".join(unit_for(plan.axis, b).show(b) for b in plan.budgets)),
        ("learning rate", rate_in_words(plan)),
        ("compute", unit.show(cost.compute)),
        ("training", f"{_hours(cost.gpu_hours)} GPU-hours{hint}"),
        ("evaluations", f"{_hours(cost.evaluation_hours)} GPU-hours"),
        ("in all", f"{_hours(cost.wall_hours)} hours on {cores} cores, starts of processes apart"),
        ("price", "-" if math.isnan(cost.dollars) else f"{cost.dollars:,.2f} dollars"),
        ("folder", str(folder)),
    ]
    print()
    print_table(total)


def _hours(hours: float) -> str:
    return "?" if math.isnan(hours) else f"{hours:,.3g}"
