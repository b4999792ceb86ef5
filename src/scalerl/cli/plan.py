"""`scalerl plan`: a recipe simulated on a cluster."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from scalerl.cli.shared.arguments import option, positive, print_json, print_warnings, whole
from scalerl.errors import InputError, counted
from scalerl.numbers import percent
from scalerl.view.terminal.rows import print_table

if TYPE_CHECKING:
    from scalerl.plan.job import PlannedJob
    from scalerl.plan.measured import Target
    from scalerl.plan.rates import Rates
    from scalerl.plan.simulate import SimulationResult
    from scalerl.record.reader import RunRecord
    from scalerl.rl.config.memory import DeviceMemory
    from scalerl.rl.config.recipe import Recipe

_WIDTH = 40  # characters of the longest bar

HELP = "simulate a recipe on a cluster before renting it"
ABOUT = "Simulate the training loop of a recipe on a cluster: speed, idle time, staleness, cost."
EXAMPLES = """
  scalerl plan scalerl_8x80gb --rates h100-8b --generators 64 --trainers 16
  scalerl plan scalerl_8x80gb --rates h100-8b --devices 80 --price 2.5   # the best split
  scalerl plan demo --from runs/mine --generators 2 --trainers 1 --target 0.6   # rates and curve of a run
"""


def add(plan: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    option(plan, "recipe")
    option(plan, "--generators N", "number of generators, each with the recipe's decode_slots", type=whole())
    option(plan, "--trainers M", "number of trainer devices", type=whole())
    option(plan, "--devices G", "total devices; finds the best split", type=whole())
    option(plan, "--set", "change one key of the recipe")
    rates = plan.add_argument_group("rates")
    option(rates, "--from RUN", "rates of a past run", dest="run_folder", type=Path)
    option(rates, "--rates FILE", "a TOML file, or a built-in name: h100-8b")
    option(rates, "--rate KEY=VALUE ...", "change one rate: decode.slot=2e-5")
    more = plan.add_argument_group("cost, and the simulation")
    option(more, "--price", "dollars per device-hour")
    option(more, "--target", "with --from: hours until this pass rate")
    option(more, "--level", "level of the interval (default: 0.95)")
    option(
        more, "--evaluate-every N", "steps between evaluations (default: as in recipe or run)", type=positive
    )
    option(more, "--steps N", "steps to simulate with a full pipeline", type=whole())
    option(more, "--seed S", "seed of the sampled lengths (default: 0)", type=whole(0), default=0)
    option(more, "--json")


def run(args: argparse.Namespace) -> None:
    """Simulate the recipe, and print the result.

    Raises:
        InputError: a role does not fit on a device like this machine's; everything is printed first.
    """
    _check(args)
    from scalerl.cli.dry_run import device_json
    from scalerl.plan.job import PlannedJob
    from scalerl.plan.measured import evaluated_every, to_target
    from scalerl.plan.simulate import simulate
    from scalerl.plan.split import best, splits
    from scalerl.rl.config.memory import check_memory, gib
    from scalerl.rl.config.recipe import load_recipe

    recipe = load_recipe(args.recipe, args.set)
    memory, unchecked = _memory(recipe)
    record, rates = _rates(args)
    job = PlannedJob.of(recipe)
    every = args.evaluate_every or (record and evaluated_every(record)) or job.evaluations.every
    job = replace(job, evaluations=replace(job.evaluations, every=every))
    tried: tuple[SimulationResult, ...] = ()
    from scalerl.cli.console import share_shown

    with share_shown("plan", "simulated") as watch:
        how = {"steps": args.steps, "seed": args.seed, "watch": watch}
        if args.devices:
            tried = splits(job, rates, args.devices, **how)
            fitting = [one for one in tried if all(device.fits for device in memory(one))]
            outcome = best(tuple(fitting) or tried)
        else:
            outcome = simulate(job, rates, args.generators, args.trainers, **how)
    devices = memory(outcome)
    print_warnings(_other_rates(recipe, args, record) + unchecked)
    hourly = None if args.price is None else outcome.devices * args.price
    target = None
    if args.target is not None and record is not None:
        target = to_target(record, args.target, outcome.steps_per_hour * job.completions, hourly, args.level)
    if args.json:
        answer = {"recipe": str(args.recipe), "rates": rates.to_json(), "plan": outcome.to_json()}
        answer |= {"splits": [one.to_json() for one in tried], "dollars_per_hour": hourly}
        answer |= {"memory": [device_json(device) for device in devices]}
        print_json(answer | {"target": target and target.to_json()})
        return check_memory(devices)
    batch = f"{job.prompts} x {job.samples} a step, {job.schedule.kind} {job.schedule.k}"
    rows = [("recipe", f"{args.recipe}: {batch}, {job.decode_slots} decode slots"), ("rates", rates.source)]
    rows += _rows(job, outcome)
    if hourly is not None:
        rows.append(("cost", f"{hourly:,.2f} dollars an hour"))
    held = ", ".join(f"{one.name} {gib(one.total)} of {gib(one.capacity)} GiB" for one in devices)
    rows.append(("memory", held or "not checked: SCALERL_GPUS=1x80 checks against GPUs of 80 GiB"))
    print_table(rows + (_target_rows(target) if target else []))
    _print_tables(outcome, tried)
    check_memory(devices)


def _memory(recipe: Recipe) -> tuple[Callable[[SimulationResult], list[DeviceMemory]], list[str]]:
    """Return a function for the memory of one device per role, like this machine's first GPU, and warnings.

    The function returns nothing without a GPU (`SCALERL_GPUS` can simulate one), and for a model whose shape
    is unknown, of which a warning says so.
    """
    from scalerl.cli.dry_run import planned_memory
    from scalerl.rl.config.devices import visible_gpus
    from scalerl.rl.model.shape import shape_of

    gpus, shape, unchecked = visible_gpus()[:1], None, list[str]()
    try:
        shape = shape_of(recipe) if gpus else None
    except InputError as error:
        unchecked = [f"memory is not checked: {error}"]

    def memory(one: SimulationResult) -> list[DeviceMemory]:
        return planned_memory(recipe, shape, gpus[0], one.generators, one.trainers) if shape else []

    return memory, unchecked


def _check(args: argparse.Namespace) -> None:
    """Raise an InputError if options do not go together, or the run does not exist."""
    from scalerl.record.folder import why_no_run

    if args.run_folder is not None and not args.run_folder.is_dir():
        raise InputError(f"plan: --from {args.run_folder}: {why_no_run(args.run_folder)}")
    if (args.run_folder is None) == (args.rates is None):
        raise InputError("plan: give either --from RUN or --rates FILE (built in: h100-8b)")
    if args.devices and (args.generators or args.trainers):
        raise InputError("plan: give either --devices, or --generators and --trainers")
    if not args.devices and not (args.generators and args.trainers):
        raise InputError("plan: give --generators and --trainers, or --devices to find the best split")
    if args.target is not None and args.run_folder is None:
        raise InputError("plan: --target needs the curve of a run: give --from RUN")


def _rates(args: argparse.Namespace) -> tuple[RunRecord | None, Rates]:
    """Return the measured run, if there is one, and the rates."""
    from scalerl.plan.rates import load_rates

    if args.run_folder is None:
        return None, load_rates(args.rates, args.rate)
    from scalerl.plan.measured import rates_of
    from scalerl.record.reader import RunRecord

    record = RunRecord.read(args.run_folder)
    rates = rates_of(record)
    return record, load_rates(rates, args.rate) if args.rate else rates


def _other_rates(recipe: Recipe, args: argparse.Namespace, record: RunRecord | None) -> list[str]:
    """Return a warning if the rates are known to be of another model or engine than the recipe's."""
    from scalerl.plan.rates import names
    from scalerl.rl.config.engine import BUILT_IN
    from scalerl.rl.model.shape import is_made_here

    source, of = args.run_folder or args.rates, "a model of billions of weights"
    if record is not None:
        of = record.config["recipe"]["model"]
        other = of != recipe.model
    else:
        other = is_made_here(recipe.model) and args.rates in names()
    found = [f"the rates of {source} are of {of}, and the recipe's model is {recipe.model}"] * other
    if not found and source in names() and recipe.engine == BUILT_IN:
        slow = "the recipe generates with the built-in engine, which is many times slower on a GPU"
        found = [f"the rates of {source} are of an engine like vLLM: {slow}"]
    return found


def _print_tables(outcome: SimulationResult, tried: tuple[SimulationResult, ...]) -> None:
    print()
    bounds = sorted(outcome.at_least.items(), key=lambda item: -item[1])
    rows = [(name, f"{s:.3g}", percent(s / outcome.seconds_per_step)) for name, s in bounds]
    print_table(rows, ("a step takes at the least, by", "seconds", "of the step"))
    print()
    widest = max(outcome.staleness_histogram, default=0.0)
    rows = [
        (str(lag), f"{part:.1%}", "#" * math.ceil(_WIDTH * part / widest))
        for lag, part in enumerate(outcome.staleness_histogram)
    ]
    print_table(rows, ("staleness", "of the trained tokens", ""))
    if tried:
        print()
        rows = [
            (
                f"{one.generators:,}",
                f"{one.trainers:,}",
                _readable(one.steps_per_hour),
                percent(one.generators_idle),
                percent(one.trainers_train),
                one.bound_by,
                "<- best" if one is outcome else "",
            )
            for one in tried
        ]
        header = ("generators", "trainers", "steps/hour", "generators idle", "trainers train", "bound by", "")
        print_table(rows, header)


def _rows(job: PlannedJob, outcome: SimulationResult) -> list[tuple[str, str]]:
    waits = {
        "for groups": outcome.wait_for_groups,
        "for verification": outcome.wait_for_verification,
        "for the driver": outcome.wait_for_driver,
        "for evaluations": outcome.wait_for_evaluation,
    }
    shown = ", ".join(f"{percent(part)} {name}" for name, part in waits.items() if part >= 0.005)
    roles = f"{counted(outcome.generators, 'generator')}, {counted(outcome.trainers, 'trainer')}"
    steps, seconds = _readable(outcome.steps_per_hour), _readable(outcome.seconds_per_step)
    slots = f"{percent(outcome.slots_in_use)} of {job.decode_slots:,} decode slots in use"
    found = f"mean {outcome.staleness_mean:.2f}, largest {outcome.staleness_max}"
    return [
        ("devices", f"{outcome.devices:,}: {roles}"),
        ("speed", f"{steps} steps/hour, {seconds} s a step"),
        ("tokens", f"{_readable(outcome.tokens_per_second)} a second"),
        ("generators", f"{percent(outcome.generators_idle)} idle; {slots}"),
        ("trainers", f"train {percent(outcome.trainers_train)}" + (f", wait {shown}" if shown else "")),
        ("evaluations", _evaluations(job, outcome)),
        ("staleness", f"{found} (the bound is {job.schedule.max_staleness})"),
        ("queue", f"{outcome.generating:,.0f} groups generating, {outcome.generated:,.0f} generated"),
        ("bound by", outcome.bound_by),
    ]


def _evaluations(job: PlannedJob, outcome: SimulationResult) -> str:
    asked = job.evaluations
    if not math.isfinite(asked.every):
        return "left out: its budget is not in steps (see --evaluate-every)"
    by = "by all generators" if asked.by_generators else "by one evaluator beside them"
    of = f"one of {counted(asked.completions, 'completion')} every {asked.every:,.3g} steps"
    return f"{of} takes {_readable(outcome.evaluation_seconds)} s, {by}"


def _readable(value: float) -> str:
    """Format with four significant digits and without an exponent: 105,500 and 0.4213."""
    digits = 3 - math.floor(math.log10(value)) if value > 0 else 0
    text = f"{round(value, digits):,.{max(digits, 0)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _target_rows(target: Target) -> list[tuple[str, str]]:
    def span(ends: tuple[float, float], unit: str) -> str:
        low, high = (f"{end:,.3g}" if math.isfinite(end) else "never" for end in ends)
        return f"[{low}, {high}] {unit}"

    parts = [span(target.samples, "completions"), span(target.hours, "hours")]
    if target.dollars is not None:
        parts.append(span(target.dollars, "dollars"))
    said = f"{', '.join(parts)} ({percent(target.level)})"
    return [(f"to {target.pass_rate:g}", said), ("curve", target.why)]
