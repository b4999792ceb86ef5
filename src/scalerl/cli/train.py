"""`scalerl train`: train a recipe into a run folder."""

from __future__ import annotations

import argparse
import math
import os
import shlex
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalerl.cli.shared.arguments import option, output, positive, print_json, print_warnings, whole
from scalerl.errors import InputError, InterruptedRunError, ScalerlError, WriteError
from scalerl.files import reading

if TYPE_CHECKING:
    from scalerl.record.folder import RunFolder
    from scalerl.record.reader import RunRecord
    from scalerl.rl.config.recipe import Recipe

JSON_HELP = "print one JSON object at the end instead of the table"

HELP = "train a recipe into a run folder"
ABOUT = "Train a recipe into a run folder, with forecasts during the run and a final report."
EXAMPLES = """
  scalerl train demo -o runs/mine                               # a built-in recipe
  scalerl train runs/mine --resume                              # resume an interrupted run
  scalerl train scalerl_8x80gb --gpus 8 --dry-run               # which role gets which GPU; does it fit
  scalerl train demo --cluster ray --generators 2 --set cluster.address=local   # a local cluster
"""


def add(train: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    option(train, "recipe")
    option(train, "-o --output RUN", "run folder (default: runs/NAME-seedN)", type=output)
    option(train, "--set", "change one key of the recipe: loss.max_ratio=4")
    option(
        train,
        "--until C",
        "stop with a checkpoint once this much of the budget is spent, in its unit; see --resume",
        type=positive,
        default=math.inf,
    )
    again = train.add_mutually_exclusive_group()
    option(
        again,
        "--resume",
        "continue from the newest checkpoint in the run folder, or start if there is no run",
    )
    option(
        again, "--restart", "start over in the run folder; the old run moves to RUN/before-1, before-2 ..."
    )
    devices = train.add_argument_group(
        "devices", "more settings are in the recipe's [placement] and [cluster]"
    )
    option(
        devices,
        "--gpus N",
        "split N GPUs of this machine or cluster between the roles (default: as in the recipe)",
        type=whole(),
    )
    option(devices, "--generators N", "rollout workers", type=whole())
    option(devices, "--trainers M", "trainers; two or more use FSDP2", type=whole())
    option(devices, "--cluster", "run on a Ray cluster", choices=["ray"])
    option(devices, "--dry-run", "print recipe, devices and memory, and train nothing")
    option(train, "--json", JSON_HELP)


def run(args: argparse.Namespace) -> None:
    """Train the recipe, or resume a run."""
    folder: Path | None = args.output
    if folder is None and (args.resume or args.restart) and Path(args.recipe).is_dir():
        folder = Path(args.recipe)
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    # The lock must precede the first read, of the recipe in config.json; torch takes seconds to import.
    place = None if by_torchrun or args.dry_run or folder is None else _claim(folder, args)

    from scalerl.cli.dry_run import dry_run, notices, use_gpus
    from scalerl.rl.config.devices import visible_gpus
    from scalerl.rl.config.recipe import load_recipe

    recipe = load_recipe(args.recipe, [*_overrides(args), *args.set])
    if args.gpus and not by_torchrun:
        split = args.generators is None and args.trainers is None
        recipe, gpus = use_gpus(recipe, args.gpus, split)
    else:  # a rank of torchrun prints nothing about GPUs, and need not list them
        gpus = visible_gpus() if args.dry_run or not by_torchrun else ()
    if not by_torchrun:
        print_warnings(notices(recipe, gpus))
    if args.dry_run:
        return dry_run(recipe, gpus, args.json)
    folder = folder or Path("runs") / f"{recipe.name}-seed{recipe.seed}"
    how = (args.resume, args.until, args.json)
    if not by_torchrun and (recipe.cluster is not None or recipe.trainers == 1):
        return run_training(recipe, place or _claim(folder, args), *how, restart=args.restart)
    from scalerl.rl.learner.launch import lead_or_follow, local_ranks, timeout_of

    with nullcontext() if by_torchrun else local_ranks(recipe.trainers):
        lead_or_follow(
            timeout_of(recipe),
            lambda load: run_training(
                recipe.on_this_machine(), place or _claim(folder, args), *how, load, restart=args.restart
            ),
        )


def _claim(folder: Path, args: argparse.Namespace) -> RunFolder:
    from scalerl.record.folder import RunFolder, holds_run

    new = not (args.resume or args.restart)
    with reading(folder):
        if new and holds_run(folder):
            raise InputError(
                f"{folder} exists already: --resume continues this run, --restart starts over and moves it "
                "to before-1; or choose another folder with -o"
            )
    return RunFolder.claim(folder, new=new)


def _overrides(args: argparse.Namespace) -> list[str]:
    """Return the overrides for the device options."""
    table = "placement" if args.cluster is None else "cluster"
    given = {"generators": args.generators, "trainers": args.trainers}
    overrides = [f"{table}.{name}={n}" for name, n in given.items() if n is not None]
    if args.cluster is None:
        return ["placement.kind=local", *overrides] if overrides else []
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
    """Train, write the report, print the closing table or its JSON, and release `place`.

    `load` makes the learner; by default one in a single process.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # huggingface_hub reads it at import
    if _forks_workers(recipe):
        from scalerl.rl.workers.processes import start_fork_server

        # It loads torch while this process does too.
        start_fork_server("scalerl.rl.placement.rollout_worker", "scalerl.rl.placement.evaluate_aside")
    from scalerl.cli.console import TrainingProgress
    from scalerl.forecast.best import rates_by_step
    from scalerl.forecast.freeze import freeze
    from scalerl.record.reader import RunRecord
    from scalerl.rl.learner.load import load_learner
    from scalerl.rl.loop.resume import resume_line
    from scalerl.rl.model.named import find_model
    from scalerl.rl.train import train
    from scalerl.rl.workers.signals import stopped_by_signals

    with closing(place):
        with TrainingProgress("base model") as bar:
            find_model(recipe, bar.building)  # builds it, so that training finds it in the cache
        try:
            with TrainingProgress(recipe.name) as bar, stopped_by_signals() as stop:
                record = train(
                    recipe,
                    place,
                    resume=resume,
                    restart=restart,
                    forecaster=freeze,
                    smooth=rates_by_step,
                    progress=bar.update,
                    activity=bar.activity,
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
            with suppress(ScalerlError):  # show the result, although not all of it was saved
                _close(RunRecord.read(place.here()), as_json)
            raise
        _close(record, as_json)


def _forks_workers(recipe: Recipe) -> bool:
    # On a single GPU, everything except verification takes turns in this process.
    from scalerl.rl.config.devices import visible_gpus

    if recipe.cluster is not None or recipe.vllm:
        return False
    return recipe.placement.kind != "inline" or len(visible_gpus()) != 1


def _close(record: RunRecord, as_json: bool) -> None:
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
        hint = f"scalerl report {shlex.quote(str(record.path))} -o FILE writes the page elsewhere"
        raise WriteError(f"{failed}; {hint}") from failed


def _closing(record: RunRecord, report: Path | None) -> dict[str, Any]:
    """Return the measured end of the run, and the frozen forecast with its outcome."""
    from scalerl.record.saved_weights import final_folder
    from scalerl.view import judge, leading_forecast

    last = record.evals[-1] if record.evals else None
    frozen = leading_forecast(record)
    forecast = None
    if frozen is not None:
        outcome = judge(record, frozen)
        forecast = {
            "axis": frozen.axis,
            "made_at": frozen.compute,
            "target_compute": frozen.target_compute,
            "median": frozen.median,
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
