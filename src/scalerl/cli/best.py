"""`scalerl best`: find the best weights of a run, by a smooth curve through its evaluations."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalerl.cli.shared.arguments import option, print_json, print_warnings
from scalerl.errors import CannotAnswerError, InputError, counted
from scalerl.numbers import chance_text, rate, rate_interval
from scalerl.view.terminal.rows import print_table

if TYPE_CHECKING:
    from scalerl.forecast.best import SmoothedRun
    from scalerl.record.reader import RunRecord

HELP = "find the best checkpoint of a run"
ABOUT = (
    "Find the best weights of a run by a smooth curve through its evaluations (the\n"
    "highest one may be luck), and the probability that they beat the last ones. With\n"
    'evaluation.keep = "best" a run keeps them. The exit status is 3 with fewer than\n'
    "three evaluations, or no weights."
)
EXAMPLES = """
  scalerl best runs/mine                               # its folder, step, pass rate without noise
  scalerl best runs/mine --y pass_rate/aime            # by a downstream suite, or a task of a mixture
  scalerl best runs/mine --json
"""


def add(best: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    option(best, "run_folder RUN", "a run folder", type=Path)
    option(best, "--y NAME", "pass_rate/NAME: a suite, or a task of a mixture (default: all)")
    option(best, "--x", "compute axis to smooth over (default: that of the budget)")
    option(best, "--level")
    option(best, "--json")


def run(args: argparse.Namespace) -> None:
    """Print the best weights of a run, and the facts about them."""
    from scalerl.forecast.best import FEWEST, smoothed
    from scalerl.record.reader import PASS_RATE_OF, RunRecord
    from scalerl.record.saved_weights import saved_weights

    record = RunRecord.read(args.run_folder)
    if args.y is not None:
        from scalerl.record.prompts import of_task

        if not args.y.startswith(PASS_RATE_OF):
            raise InputError(f"--y {args.y}: expected {PASS_RATE_OF}NAME of a suite or a task")
        record = of_task(record, args.y.removeprefix(PASS_RATE_OF))
    if len(record.evals) < FEWEST:
        made = counted(len(record.evals), "evaluation")
        raise CannotAnswerError(
            f"{args.run_folder}: {made}, and {FEWEST} are needed to tell noise from a rise"
        )
    paths = saved_weights(args.run_folder)
    found = smoothed(record, args.x, args.level)
    if not paths.keys() & set(found.step_N.tolist()):
        how = 'evaluation.keep = "best" keeps those of the best ones'
        raise CannotAnswerError(f"{args.run_folder}: there are no weights of an evaluation; {how}")
    answer = _answer(args.run_folder, record, found, paths)
    if args.json:
        print_json(answer)
        return
    print_warnings(record.warnings)
    print_table(_rows(answer))


def _answer(run: Path, record: RunRecord, found: SmoothedRun, paths: dict[int, Path]) -> dict[str, Any]:
    best, last, top = found.best(paths), len(found.step_N) - 1, found.best()
    measured = {point.step: point for point in record.evals}

    def answer_of(place: int) -> dict[str, Any]:
        step = int(found.step_N[place])
        version = measured[step].version
        return {
            "path": str(paths[step]) if step in paths else None,
            "step": step,
            "version": version if version >= 0 else None,
            "pass_rate": float(found.rate_N[place]),
            "interval": found.interval(place),
            "measured": measured[step].pass_rate,
        }

    is_last = best == last
    return {
        "run": str(run),
        "metric": record.metric.name,
        "level": found.level,
        "best": answer_of(best),
        "is_last": is_last,
        "better_than_last": None if is_last else found.probability_better(best, last),
        "last": answer_of(last),
        "best_evaluation": answer_of(top),
        "weights": [answer_of(place) for place, step in enumerate(found.step_N.tolist()) if step in paths],
    }


def _rows(answer: dict[str, Any]) -> list[tuple[str, str]]:
    best, last, top = (answer[name] for name in ("best", "last", "best_evaluation"))
    rows = [
        ("best", f"{best['path']}" + ", the last" * answer["is_last"]),
        (
            "step",
            f"{best['step']}" + (f" (version {best['version']})" if best["version"] is not None else ""),
        ),
        ("pass rate", f"{_rate(best, answer['level'])}, measured {best['measured']:.3f}"),
    ]
    if not answer["is_last"]:
        where = last["path"] or "whose weights are not there"
        rows += [
            ("better than the last", f"with probability {chance_text(answer['better_than_last'])}"),
            ("the last", f"step {last['step']}, {_rate(last, answer['level'])}, {where}"),
        ]
    if top["step"] != best["step"]:
        rows.append(
            (
                "best evaluation",
                f"step {top['step']}, {_rate(top, answer['level'])}: its weights were not kept",
            )
        )
    return rows


def _rate(answer: dict[str, Any], level: float) -> str:
    return f"{rate(answer['pass_rate'])} {rate_interval(answer['interval'])} ({level * 100:g} %)"
