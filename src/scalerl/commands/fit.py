"""`scalerl fit`: a curve, its ceiling, forecasts and a verdict, from a run or a table."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scalerl.commands._data import add_data_arguments, asked_of, read_data, read_siblings
from scalerl.commands._text import compute, computes, positive, print_rows, print_warnings, share
from scalerl.errors import InputError

if TYPE_CHECKING:
    from scalerl.curve import Fit, Points


def add(commands: argparse._SubParsersAction) -> None:
    """The arguments of `scalerl fit`."""
    fit = commands.add_parser("fit", help="fit a curve to a run, and forecast it")
    fit.add_argument(
        "run_or_file", metavar="RUN|FILE", help="a run folder, a CSV or JSONL, or - for standard input"
    )
    add_data_arguments(fit)
    fit.add_argument("--max-compute", type=compute, metavar="C", help="leave out compute above C")
    fit.add_argument("--at", type=computes, default=(), metavar="C1,C2", help="forecast at these computes")
    fit.add_argument("--target", type=share, metavar="R", help="pass rate to reach at --budget")
    fit.add_argument("--budget", type=compute, metavar="C", help="compute at which --target is asked")
    fit.add_argument(
        "--worth", type=positive, metavar="G", help="say where a further unit of compute gains less than G"
    )
    fit.add_argument(
        "--prior-from", nargs="+", metavar="RUN", help="five or more sibling runs, for a prior of B and A"
    )
    fit.add_argument("--sensitivity", action="store_true", help="fit again with more of the start left out")
    fit.add_argument("--cross-check", action="store_true", help="bootstrap and profile likelihood of A")
    fit.add_argument("--paper", action="store_true", help="the paper's own procedure, and nothing else")
    fit.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Fit, and print the table or the JSON."""
    if (args.target is None) != (args.budget is None):
        raise InputError("--target and --budget belong together: the pass rate to reach, and at what compute")
    data = read_data(args.run_or_file, args.x, asked_of(args), args.price)
    points = data.points
    if args.paper:
        _paper(args, points)
        return
    from scalerl.curve import fit
    from scalerl.jsonl import dumps

    options: dict[str, Any] = {
        "r0": args.r0,
        "max_compute": math.inf if args.max_compute is None else args.max_compute,
        "level": args.level,
    }
    start = {"r0": args.r0, "min_compute": args.min_compute or 0.0}
    # Their start is cut as the run's, but not their end: where they went on they say more of one curve.
    siblings = read_siblings(args.prior_from or (), data, asked_of(args), args.price, **start)
    result = fit(points, prior_from=siblings, **(options | start))
    more = _more(args, points, result, options)
    if args.json:
        answer = result.to_json(args.at, args.target, args.budget)
        print(dumps(answer | {name: value.to_json() for name, value in more.items()} | _worth(args, result)))
        return
    print_warnings(result.warnings)
    print_rows(_rows(result, args))
    for value in more.values():
        print(f"\n{value}")


def _paper(args: argparse.Namespace, points: Points) -> None:
    """The paper's procedure alone, so that published numbers can be matched."""
    from scalerl.curve.paper import paper_fit
    from scalerl.jsonl import dumps

    others = ("target", "worth", "prior_from", "sensitivity", "cross_check")
    unanswered = [f"--{name.replace('_', '-')}" for name in others if getattr(args, name)]
    if unanswered:
        raise InputError(f"--paper has no answer to {', '.join(unanswered)}: ask without it")
    if args.r0 == "free":
        raise InputError("--paper takes R_0 as given: --r0 R, or an evaluation at compute 0")
    if args.max_compute is not None:
        points = points.select(points.compute_N <= args.max_compute)
    result = paper_fit(points, args.r0, min_compute=args.min_compute)
    at = [{"compute": c, "paper_point": float(result.curve(c))} for c in args.at]
    if args.json:
        lines = zip(result.points.compute_N.tolist(), result.linearised(result.points).tolist(), strict=True)
        more = {"forecast": at, "linearised": [{"compute": c, "F": F} for c, F in lines]}
        print(dumps({"paper": result.to_json() | more}))
        return
    print(result)
    for row in at:
        print(f"at {row['compute']:g}: {row['paper_point']:.3f}")


def _more(args: argparse.Namespace, points: Points, result: Fit, options: dict[str, Any]) -> dict[str, Any]:
    """What was asked for beside the fit: each prints itself, and has a to_json."""
    more: dict[str, Any] = {}
    if args.sensitivity:
        from scalerl.curve.sensitivity import sensitivity

        if args.min_compute:
            points = points.select(points.kept_from(args.min_compute))
        more["sensitivity"] = sensitivity(points, at=args.at[0] if args.at else args.budget, **options)
    if args.cross_check:
        from scalerl.curve.crosscheck import cross_check

        more["cross_check"] = cross_check(result, args.at)
    return more


def _worth(args: argparse.Namespace, result: Fit) -> dict[str, Any]:
    """The JSON of `--worth`: where to stop, and the expected gain per unit now."""
    if args.worth is None:
        return {}
    now = float(result.points.compute_N[-1])
    stop = {"worth": args.worth, "compute": result.stop_at(args.worth), "gain_now": result.gain_per_unit(now)}
    return {"stop": stop}


def _rows(result: Fit, args: argparse.Namespace) -> list[tuple[str, str]]:
    """The rows of the table for people: a label and what stands beside it."""
    from scalerl.curve.result import span
    from scalerl.report.numbers import family_weights

    median, intervals = result.median, result.intervals
    cut = f", {len(result.excluded)} left out" if len(result.excluded) else ", none left out"
    known = "" if math.isnan(result.noise.floor) else f" (sampling alone {result.noise.floor:.4f})"
    rows = [
        ("points", f"{result.n_points} on {result.axis}{cut}"),
        _ceiling(result),
        ("efficiency B", f"{median.B:.3g}   {span(intervals.B, '.3g')}"),
        ("C_mid", f"{median.C_mid:.4g}   {span(intervals.C_mid, '.4g')}"),
        ("least squares (paper)", result.least_squares),
        ("R_0", f"{result.r0_value:.3f}   {result.r0_source}"),
        ("noise sd", f"{result.noise.sd:.4f}{known}, neighbours correlated {result.noise.phi:.2f}"),
        ("families", family_weights(result.families)),
        *_identified(result),
    ]
    if len(result.basins) > 1 and not result.misfit:
        rows.append(("other minima", "; ".join(str(curve) for curve, _ in result.basins[1:])))
    rows += _answers(result, args.at, args.target, args.budget)
    if result.campaign:
        informed = result.campaign
        rows += [("", ""), ("prior", informed.prior), _ceiling(informed), *_identified(informed)]
        rows += _answers(informed, args.at, args.target, args.budget)
    return rows + _worth_rows(result, args.worth)


def _ceiling(result: Fit) -> tuple[str, str]:
    """The ceiling with its interval."""
    from scalerl.curve.result import span

    intervals = result.intervals
    shown = f"{result.median.A:.3f}   {intervals.level:.0%} {span(intervals.A)}"
    return "ceiling A", "withheld" if result.misfit else shown


def _identified(result: Fit) -> list[tuple[str, str]]:
    """Whether the ceiling is identified, and at what compute it is expected to be if it is not."""
    rows = [("ceiling identified", f"{'yes' if result.identified else 'no'}: {result.why}")]
    if not result.identified and not result.misfit:
        tell = result.compute_to_tell
        place = f"{tell:.4g} {result.axis}, expected" if tell else "more than 8 times the compute so far"
        rows.append(("would be told at", place))
    return rows


def _answers(
    result: Fit, at: Sequence[float], target: float | None, budget: float | None
) -> list[tuple[str, str]]:
    """Forecasts and the verdict."""
    from scalerl.curve.result import span

    rows = []
    for amount in at:
        f = result.forecast(amount)
        spans = f"curve {span(f.interval)}   evaluation {span(f.prediction)}   rerun {span(f.rerun)}"
        rows.append((f"at {amount:g}", f"{f.mean:.3f}   {spans}"))
    if target is not None and budget is not None:
        asked, chance = f"{target:g} at {budget:g}", result.chance(target, budget)
        rows.append((asked, f"{chance.verdict.upper()}, probability {chance.probability:.2f}"))
        again = f"{chance.verdict_rerun.upper()}, probability {chance.probability_rerun:.2f}"
        rows += [(f"{asked}, rerun", again), ("because", chance.why)]
    return rows


def _worth_rows(result: Fit, worth: float | None) -> list[tuple[str, str]]:
    """Where to stop, given what a unit of compute has to gain."""
    from scalerl.report.numbers import one_unit

    if worth is None:
        return []
    now = float(result.points.compute_N[-1])
    gain, stop = result.gain_per_unit(now), result.stop_at(worth)
    place = (
        "now"
        if stop <= now
        else (f"at {stop:.4g}" if math.isfinite(stop) else "not within 32 times the compute")
    )
    return [
        (f"gain per {one_unit(result.axis)}", f"{gain:.3g} of pass rate now"),
        ("stop", f"{place}: from there a further unit gains less than {worth:g}"),
    ]
