"""`scalerl train`: a recipe into a run folder."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalerl.cli._arguments import add_shared, positive
from scalerl.cli._parser import examples
from scalerl.cli._text import print_json
from scalerl.errors import InputError, InterruptedRunError, ScalerlError, WriteError

if TYPE_CHECKING:
    from scalerl.record.folder import RunFolder
    from scalerl.record.reader import RunRecord
    from scalerl.rl.config.recipe import Recipe


def add(commands: argparse._SubParsersAction) -> None:
    """The arguments of `scalerl train`."""
    train = commands.add_parser(
        "train",
        help="train a recipe into a run folder",
        description="Train a recipe into a run folder, forecast it on the way, and write its report.",
        epilog=examples("""
  scalerl train demo -o runs/mine                               # a recipe of the package
  scalerl train scalerl --set task.path=problems.jsonl --set model=MODEL
  scalerl train runs/mine --resume                              # go on with a run that was cut
  scalerl train demo --cluster ray --generators 2 --set cluster.address=local   # a cluster of its own, here
"""),
    )
    add_shared(train, "recipe")
    train.add_argument("-o", "--output", metavar="RUN", type=Path, help="run folder (runs/NAME-seedN)")
    add_shared(train, "--set", "change one key: loss.max_ratio=4")
    train.add_argument(
        "--until",
        type=positive,
        default=math.inf,
        metavar="C",
        help="stop with a checkpoint at this part of the budget, in its unit; --resume goes on",
    )
    again = train.add_mutually_exclusive_group()
    again.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint of the run folder; start where there is no run",
    )
    again.add_argument(
        "--restart",
        action="store_true",
        help="begin anew in the run folder; what is there is kept in its before-1, before-2 ...",
    )
    cluster = train.add_argument_group("on a cluster", "[cluster] in a recipe says the same, and more")
    cluster.add_argument("--cluster", choices=["ray"], help="place the parts of the run on a Ray cluster")
    cluster.add_argument("--generators", type=int, metavar="N", help="processes that decode (1)")
    cluster.add_argument(
        "--trainers", type=int, metavar="M", help="processes that train (1); FSDP2 from two on"
    )
    add_json_argument(train)
    train.set_defaults(run=run)


def add_json_argument(command: argparse.ArgumentParser) -> None:
    """`--json` of the commands that train."""
    add_shared(command, "--json", "print one JSON object at the end, and no table")


def run(args: argparse.Namespace) -> None:
    """Train the recipe, or go on with a run."""
    folder: Path | None = args.output
    if folder is None and (args.resume or args.restart) and Path(args.recipe).is_dir():
        folder = Path(args.recipe)
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    # The lock comes before the first read, which is that of the recipe in config.json, and before torch.
    place = None if by_torchrun or folder is None else _claim(folder, args)

    from scalerl.rl.config.recipe import load_recipe

    recipe = load_recipe(args.recipe, [*_cluster_overrides(args), *args.set])
    folder = folder or Path("runs") / f"{recipe.name}-seed{recipe.seed}"
    how = (args.resume, args.until, args.json)
    if not by_torchrun:
        return run_training(recipe, place or _claim(folder, args), *how, restart=args.restart)
    from scalerl.rl.learner.fsdp.launch import lead_or_follow, settings_of

    lead_or_follow(
        settings_of(recipe),
        lambda load: run_training(
            replace(recipe, cluster=None), _claim(folder, args), *how, load, restart=args.restart
        ),
    )


def _claim(folder: Path, args: argparse.Namespace) -> RunFolder:
    from scalerl.record.folder import RunFolder

    return RunFolder.claim(folder, new=not (args.resume or args.restart))


def _cluster_overrides(args: argparse.Namespace) -> list[str]:
    """What the options of a cluster set in the recipe."""
    if args.cluster is None:
        if args.generators or args.trainers:
            raise InputError("--generators and --trainers are those of a cluster: add --cluster ray")
        return []
    given = {"generators": args.generators, "trainers": args.trainers}
    overrides = [f"cluster.{name}={n}" for name, n in given.items() if n is not None]
    if args.trainers and args.trainers > 1:
        overrides.append("cluster.learner.kind=fsdp2")
    return overrides or ["cluster.generators=1"]


def run_training(
    recipe: Recipe,
    place: RunFolder,
    resume: bool = False,
    until: float = math.inf,
    as_json: bool = False,
    load: Callable[[Recipe, str], Any] | None = None,
    restart: bool = False,
) -> None:
    """Train, write the report, and print the closing table, or the same as JSON; then let go of `place`.

    `load` makes the learner, where it is not that of one process.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read at import; one bar is enough
    from scalerl.cli.console import TrainingProgress
    from scalerl.forecast.freeze import freeze
    from scalerl.record.reader import RunRecord
    from scalerl.rl.entry import train
    from scalerl.rl.learner.build import load_learner
    from scalerl.rl.loop.resume import resume_line
    from scalerl.rl.model.demo_base import find_model
    from scalerl.rl.workers.process import stopped_by_signals

    with closing(place):
        with TrainingProgress("base model") as bar:
            find_model(recipe, bar.base_model)  # once it is built, training finds it in the cache
        try:
            with TrainingProgress(recipe.name) as bar, stopped_by_signals() as stop:
                record = train(
                    recipe,
                    place,
                    resume=resume,
                    restart=restart,
                    forecaster=freeze,
                    progress=bar.update,
                    stop=stop,
                    until=until,
                    load=load or load_learner,
                )
        except KeyboardInterrupt:
            folder = place.here()
            if not (folder / "config.json").exists():
                raise
            fits = f", scalerl fit {folder} fits what was run" if (folder / "evals.jsonl").exists() else ""
            raise InterruptedRunError(f"interrupted; {resume_line(folder)} goes on{fits}") from None
        except WriteError:
            with suppress(ScalerlError):  # what was trained is told, whatever could not be saved
                _close(RunRecord.read(place.here()), as_json)
            raise
        _close(record, as_json)


def _close(record: RunRecord, as_json: bool) -> None:
    """Write the report, and print the closing table or the same as JSON.

    Raises:
        WriteError: the disk does not take the report; the rest is printed.
    """
    from scalerl.view import print_closing, write_report

    report = failed = None
    try:
        report = write_report(record)
    except WriteError as error:
        failed = error
    if as_json:
        print_json(_closing(record, report), indent=None)
    else:
        print_closing(record, report=report)
    if failed is not None:
        raise failed


def _closing(record: RunRecord, report: Path | None) -> dict[str, Any]:
    """The closing figures: what was measured, and the forecast that is judged by it, as it was frozen."""
    from scalerl.record.reader import final_folder
    from scalerl.view import frozen_forecasts, judge, main_forecast

    last = record.evals[-1] if record.evals else None
    frozen = main_forecast(frozen_forecasts(record))
    forecast = None
    if frozen is not None:
        outcome = judge(record, frozen)
        forecast = {
            "axis": frozen.axis,
            "made_at": frozen.compute,
            "target_compute": frozen.target_compute,
            "mean": frozen.mean,
            "prediction": frozen.prediction,
            "rerun": frozen.rerun,
            "identified": frozen.fit["identified"],
            "ceiling": frozen.fit["median"]["A"],
            "ceiling_interval": frozen.fit["intervals"]["A"],
            "measured": outcome.measured and outcome.measured.pass_rate,
            "outcome": outcome.word,
        }
    axes = record.logged_axes() if last else ()
    return {
        "run": str(record.path),
        "name": record.config["name"],
        "status": "finished" if final_folder(record.path).is_dir() else "cut",
        "step": last and last.step,
        "evaluations": len(record.evals),
        "pass_rate": last and last.pass_rate,
        "compute": {axis: float(record.compute(axis)[-1]) for axis in axes},
        "forecast": forecast,
        "alarms": len(record.alarms),
        "report": report and str(report),
    }
