"""`scalerl compare`: which recipe has the higher ceiling or the higher efficiency, beyond seed noise."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scalerl.cli.shared.arguments import amount, option, print_json, print_warnings
from scalerl.cli.shared.data import (
    add_data_arguments,
    check_one_axis,
    fit_options,
    name_among,
    paths_of,
    read_each,
    recipes_of,
    settle_amounts,
)
from scalerl.errors import CannotAnswerError, InputError, counted
from scalerl.view.terminal.rows import print_table

if TYPE_CHECKING:
    from scalerl.curve import Fit
    from scalerl.forecast.paired import PairedPrompts
    from scalerl.ingest.formats.format import Unread
    from scalerl.ingest.load import Data

    Run = tuple[Data, Fit]

HELP = "compare recipes by their runs, with seed noise"
ABOUT = "Find which recipe has the higher ceiling or efficiency, beyond seed noise."
EXAMPLES = """
  scalerl compare runs/a-seed0 runs/b-seed0 --budget 16000      # runs of one recipe are its seeds
  scalerl compare old.csv new.csv --target 0.55 --json          # a file is a recipe
  scalerl compare --group old=runs/a-seed0,runs/a-seed1 --group new=runs/b-seed0,runs/b-seed1 --paired
"""


def add(compare: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    option(
        compare,
        "runs RUN|FILE",
        "run folders (runs of one recipe are its seeds); CSV, JSONL, logs of other trainers, or runs on "
        "a server, wandb:ENTITY/PROJECT?group=NAME, mlflow:EXPERIMENT/RUN (one recipe each)",
        nargs="*",
    )
    option(compare, "--group", "treat these runs as the seeds of one recipe; NAME='runs/a-*' takes all")
    option(compare, "--base", "recipe to compare the others with (default: first group, else first run)")
    option(compare, "--paired", "compare seed by seed: equal seeds share their base model, prompts and order")
    add_data_arguments(compare, several=True)
    option(compare, "--budget", "compare the pass rates at this compute", type=amount(True))
    option(compare, "--target", "compare the compute that reaches this pass rate")


def run(args: argparse.Namespace) -> None:
    """Fit every run, compare the recipes, and print the table or the JSON."""
    from scalerl.forecast import compare
    from scalerl.forecast.recipes import seed_prior, seeds_if_known, seeds_of
    from scalerl.record.devices import OF_ONE_DEVICE, is_of_one_device

    found, unread = read_each(paths_of(args), args, least=2)
    check_one_axis(found)
    far = settle_amounts(args, found)
    fitted, unfitted = _fitted(found, args)
    unread += unfitted
    recipes = recipes_of(args, fitted)
    named = {name: [(data.path, data.record) for data, _ in runs] for name, runs in recipes.items()}
    seeds = seeds_of(named) if args.paired else seeds_if_known(named)
    result = compare(
        {name: [fit for _, fit in runs] for name, runs in recipes.items()},
        base=args.base,
        budget=args.budget,
        target=args.target,
        level=args.level,
        # Within pairs, differences between base models cancel.
        seed_prior=seed_prior([] if args.paired else (data.record for data, _ in fitted)),
        blocks=seeds if args.paired else None,
        seeds=seeds,
    )
    pairs = [(recipes[pair.base], recipes[pair.recipe]) for pair in result.pairs]
    prompts = [_paired_prompts(*pair, args.price) for pair in pairs]
    rules = [_paper_rule(*pair) for pair in pairs]
    whole = [run for runs in recipes.values() for run in runs]
    by_name = [(name_among(found, data), text) for data, fit in whole for text in fit.warnings]
    warnings = [*filter(None, [result.doubt]), *far]
    warnings += [text if text.startswith(name) else f"{name}: {text}" for name, text in by_name]
    if args.json:
        answer = result.to_json()
        answer["sources"] = {name: [data.path for data, _ in runs] for name, runs in recipes.items()}
        answer["unread"] = [one.to_json() for one in unread]
        answer["warnings"] = list(dict.fromkeys(warnings))
        for pair, common, (rule, _) in zip(answer["pairs"], prompts, rules, strict=True):
            pair["paired_prompts"] = common and common.to_json()
            pair["paper"] = rule
        print_json(answer)
        return
    print_warnings([*unread, *warnings])
    if args.paired:
        print_warnings(
            f"{pair.recipe} and {pair.base} have no two seeds of one base model in common: not paired"
            for pair in result.pairs
            if pair.common_seeds is None
        )
    of_one = any(is_of_one_device(data.record, data.points.axis) for data, _ in whole)
    hours = [("GPU-hours", f"{OF_ONE_DEVICE}; compared as if all had run on as many")] if of_one else []
    for pair, common, (_, rule) in zip(result.pairs, prompts, rules, strict=True):
        same = [("same prompts", str(common))] if common else []
        same += [(f"task {name}", str(one)) for name, one in common.tasks.items()] if common else []
        print_table([*result.rows(pair), *hours, *same, ("the paper's rule would say", rule)])
        print()
    print(result.priors(same_prompts=any(prompts)))


def _fitted(read: Sequence[Data], args: argparse.Namespace) -> tuple[list[Run], list[Unread]]:
    """Fit all runs; one with too few evaluations is returned as `Unread`."""
    from scalerl.ingest.formats.format import Unread
    from scalerl.view.facts.shown import ShownRun

    found: list[Run] = []
    unread: list[Unread] = []
    for data in read:
        name = data.record.name if data.record is not None and data.foreign else ""
        run = ShownRun(name, data.points, data.record).fitted_with(**fit_options(args), level=args.level)
        if run.fit is not None and not run.not_compared:
            found.append((data, run.fit))
        else:
            unread.append(Unread(data.path, name, run.not_compared))
    if unread and len(found) < 2:
        raise CannotAnswerError(f"{unread[0].path}: {unread[0].reason}")
    return found, unread


def _paired_prompts(base: list[Run], recipe: list[Run], price: float | None) -> PairedPrompts | None:
    """Compare two recipes prompt by prompt, if each of their runs has a record."""
    from scalerl.forecast.paired import paired_prompts

    sides = [[data.record for data, _ in runs if data.record is not None] for runs in (base, recipe)]
    if len(sides[0]) < len(base) or len(sides[1]) < len(recipe):
        return None
    return paired_prompts(sides[0], sides[1], base[0][1].axis, price)


def _paper_rule(base: list[Run], recipe: list[Run]) -> tuple[dict[str, Any] | None, str]:
    """Compare the first runs of two recipes by the paper's rule, as JSON and in words; or say why not."""
    from scalerl.forecast.paper import paper_compare, paper_fit_of

    for data, fit in (*base, *recipe):
        if fit.misfit:  # the rule's ceilings are as meaningless as ours, which is withheld
            return None, f"nothing: no saturating curve describes {data.path}"
    try:
        rule = paper_compare(paper_fit_of(base[0][1]), paper_fit_of(recipe[0][1]))
    except (InputError, CannotAnswerError) as error:
        return None, f"nothing: {error}"
    # The last warning is about the rule itself; those about the two fits are in the JSON.
    *of_fits, of_rule = rule.warnings
    more = f"; its fits have {counted(len(of_fits), 'warning')}: fit --paper" if of_fits else ""
    return rule.to_json(), f"{str(rule).partition(chr(10))[0]} ({of_rule}{more})"
