"""`scalerl compare`: which recipe has the higher ceiling, which gets to its own sooner, and what is seed."""

from __future__ import annotations

import argparse
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scalerl.cli._arguments import add_shared, positive
from scalerl.cli._data import add_data_arguments, check_one_axis, fit_options, paths_of, read_each, recipes_of
from scalerl.cli._parser import examples
from scalerl.cli._text import print_json, print_rows, print_warnings
from scalerl.errors import CannotAnswerError, InputError, counted
from scalerl.ingest.load import Data

if TYPE_CHECKING:
    from scalerl.curve import Fit
    from scalerl.forecast.paired import PairedPrompts
    from scalerl.forecast.paper import PaperComparison, PaperFit
    from scalerl.ingest.formats.format import Unread
    from scalerl.record.reader import RunRecord


def add(commands: argparse._SubParsersAction) -> None:
    """The arguments of `scalerl compare`."""
    compare = commands.add_parser(
        "compare",
        help="compare recipes by their runs, seeds counted",
        description="Which recipe has the higher ceiling, which gets to its own sooner, and what is seed.",
        epilog=examples("""
  scalerl compare runs/a-seed0 runs/b-seed0 --budget 16000      # runs of one recipe are its seeds
  scalerl compare old.csv new.csv --target 0.55 --json          # a file is a recipe
  scalerl compare --group old=runs/a-seed0,runs/a-seed1 --group new=runs/b-seed0,runs/b-seed1 --paired
"""),
    )
    compare.add_argument(
        "runs",
        metavar="RUN|FILE",
        nargs="*",
        help="run folders (runs of one recipe are its seeds), or CSV, JSONL or logs of other trainers (a "
        "recipe each)",
    )
    add_shared(compare, "--group", "these runs are the seeds of one recipe")
    add_shared(compare, "--base", "compare with this recipe (the first; groups go first)")
    compare.add_argument(
        "--paired",
        action="store_true",
        help="compare seed by seed: runs of one seed have their base model, prompts and order in common",
    )
    add_data_arguments(compare)
    add_shared(compare, "--budget", "compare the pass rates at this compute", type=positive)
    add_shared(compare, "--target", "compare the compute to this pass rate")
    compare.set_defaults(run=run)


@dataclass(frozen=True)
class _ComparedRun:
    """One argument, read and fitted."""

    path: str
    fit: Fit
    data: Data

    @property
    def record(self) -> RunRecord | None:
        """None of a file."""
        return self.data.record


@dataclass(frozen=True)
class _Beside:
    """What stands beside a pair's curves: common prompts, and the paper's rule or why it says nothing."""

    prompts: PairedPrompts | None
    paper: PaperComparison | str

    def rows(self) -> list[tuple[str, str]]:
        """The last rows of the pair's table."""
        prompts = [("same prompts", str(self.prompts))] if self.prompts else []
        answer = str(self.paper).partition("\n")[0]
        # The last warning is of the rule itself; those of the two fits are in the JSON.
        if isinstance(self.paper, str):
            return [*prompts, ("the paper's rule would say", answer)]
        *of_fits, of_rule = self.paper.warnings
        more = f"; its fits have {counted(len(of_fits), 'warning')}: fit --paper" if of_fits else ""
        return [*prompts, ("the paper's rule would say", f"{answer} ({of_rule}{more})")]

    def to_json(self) -> dict[str, Any]:
        """None where there is no answer."""
        paper = None if isinstance(self.paper, str) else self.paper.to_json()
        return {"paired_prompts": self.prompts and self.prompts.to_json(), "paper": paper}


def run(args: argparse.Namespace) -> None:
    """Fit every run, compare the recipes, and print the table or the JSON."""
    from scalerl.forecast import compare

    read, unread = read_each(paths_of(args), args, least=2)
    found = [data for of_path in read.values() for data in of_path]
    check_one_axis(found)
    fitted, unfitted = _fitted(read, args)
    unread += unfitted
    recipes = recipes_of(args, fitted, lambda run: run.record, lambda run: run.path)
    fits = {name: [run.fit for run in runs] for name, runs in recipes.items()}
    result = compare(
        fits,
        base=args.base,
        budget=args.budget,
        target=args.target,
        level=args.level,
        blocks=_blocks(recipes) if args.paired else None,
    )
    paper = {name: _paper(runs) for name, runs in recipes.items()}
    beside = [
        _beside(recipes[p.base], recipes[p.recipe], (paper[p.base], paper[p.recipe]), args.price)
        for p in result.pairs
    ]
    if args.json:
        data = result.to_json()
        data["sources"] = {name: [run.path for run in runs] for name, runs in recipes.items()}
        data["unread"] = [one.to_json() for one in unread]
        data["pairs"] = [{**pair, **more.to_json()} for pair, more in zip(data["pairs"], beside, strict=True)]
        print_json(data)
        return
    print_warnings(map(str, unread))
    whole = [one for runs in recipes.values() for one in runs]
    print_warnings(f"{one.path}: {warning}" for one in whole for warning in one.fit.warnings)
    if args.paired:
        print_warnings(
            f"{p.recipe} and {p.base} have no two seeds of one base model in common: not paired"
            for p in result.pairs
            if p.common_seeds is None
        )
    for pair, more in zip(result.pairs, beside, strict=True):
        print_rows([*result.rows(pair), *more.rows()])
        print()
    print(result.priors())


def _blocks(recipes: dict[str, list[_ComparedRun]]) -> dict[str, list[Hashable]]:
    """The seed of every run, as its config.json has it, and its base model where there are several.

    Raises:
        InputError: a run does not say its seed, or two runs of a recipe have the same.
    """
    from scalerl.view.numbers import as_mapping

    configs = {run.path: run.record.config if run.record else {} for runs in recipes.values() for run in runs}
    models = {path: as_mapping(config.get("model")).get("path") for path, config in configs.items()}
    grouped = len(set(models.values())) > 1
    blocks: dict[str, list[Hashable]] = {}
    for name, runs in recipes.items():
        of_recipe = blocks.setdefault(name, [])
        for run in runs:
            seed = configs[run.path].get("seed")
            if isinstance(seed, bool) or not isinstance(seed, int):
                raise InputError(f"{run.path}: has no seed in a config.json, so --paired finds it no partner")
            block = (models[run.path], seed) if grouped else seed
            if block in of_recipe:
                raise InputError(
                    f"{run.path}: is the second run of {name} with seed {seed}; --paired needs one"
                )
            of_recipe.append(block)
    return blocks


def _fitted(
    read: dict[str, list[Data]], args: argparse.Namespace
) -> tuple[dict[str, list[_ComparedRun]], list[Unread]]:
    """The fits of all runs, by the path that was given, and the runs that have too few evaluations for one.

    Raises:
        CannotAnswerError: fewer than two can be fitted; it is that of the first that cannot.
    """
    from scalerl.curve import fit
    from scalerl.ingest.formats.format import Unread

    found: dict[str, list[_ComparedRun]] = {path: [] for path in read}
    errors: list[CannotAnswerError] = []
    unread: list[Unread] = []
    for path, of_path in read.items():
        for data in of_path:
            try:
                found[path].append(
                    _ComparedRun(data.path, fit(data.points, **fit_options(args), level=args.level), data)
                )
            except CannotAnswerError as error:
                errors.append(error)
                name = data.record.name if data.record is not None and data.foreign else ""
                unread.append(Unread(data.path, name, str(error)))
    if errors and sum(map(len, found.values())) < 2:
        raise errors[0]
    return found, unread


def _paper(runs: list[_ComparedRun]) -> PaperFit | str:
    """The paper's fit of the first run of a recipe, or why it has none."""
    from scalerl.forecast.paper import paper_fit_of

    unfit = [run.path for run in runs if run.fit.misfit]
    if unfit:  # its ceilings are as little worth as those withheld
        return f"no saturating curve describes {unfit[0]}"
    try:
        return paper_fit_of(runs[0].fit)
    except (InputError, CannotAnswerError) as error:
        return str(error)


def _beside(
    base: list[_ComparedRun], recipe: list[_ComparedRun], paper: Sequence[PaperFit | str], price: float | None
) -> _Beside:
    """Common prompts, where all runs of both recipes are folders; the paper's rule, on the first of each."""
    from scalerl.forecast.paired import paired_prompts

    sides = [[run.record for run in runs if run.record is not None] for runs in (base, recipe)]
    whole = len(sides[0]) == len(base) and len(sides[1]) == len(recipe)
    prompts = paired_prompts(sides[0], sides[1], base[0].fit.axis, price) if whole else None
    return _Beside(prompts, _rule(*paper))


def _rule(base: PaperFit | str, recipe: PaperFit | str) -> PaperComparison | str:
    from scalerl.forecast.paper import paper_compare

    if isinstance(base, str) or isinstance(recipe, str):
        return f"nothing: {base if isinstance(base, str) else recipe}"
    try:
        return paper_compare(base, recipe)
    except (InputError, CannotAnswerError) as error:
        return f"nothing: {error}"
