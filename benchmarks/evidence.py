"""Our own studies: what each of them says, and how all of their forecasts held.

    python benchmarks/evidence.py [NAME ...]           the studies kept in benchmarks/studies, from their data
    python benchmarks/evidence.py calculator           the run of examples/calculator.toml, in benchmarks/runs
    python benchmarks/evidence.py --keep FOLDER ...     keep the data of studies, or of runs with tools

A study is run by `scalerl study benchmarks/studies/NAME.toml -o FOLDER`. What is kept of it is all that the
verdict reads, as NAME.tar.xz beside the study file: plan, attempts, decisions, forecasts without their bands,
and of every run its config, evaluations, alarms, and of its steps the importance ratios. Those forecasts were
frozen when their point was the posterior mean; their medians were computed since, by the code of then.

Pooled over all studies, of every forecast frozen at a quarter and half of a run: coverage and width of the
95 % interval, the interval score, and the rms error beside five rivals'. `siblings` is the same fit with a
prior of B and A learnt from finished runs of the other arms and other seeds of its study.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scalerl.curve import Fit, fit
from scalerl.curve.campaign import MIN_SIBLINGS
from scalerl.errors import CannotAnswerError
from scalerl.forecast.scores import interval_score
from scalerl.record.folder import holds_run
from scalerl.record.reader import RunRecord
from scalerl.rl.tasks.environment import calls_in
from scalerl.study.page.tables import scores_table, study_tables
from scalerl.study.record import ATTEMPTS, DECISIONS, FORECASTS, PLAN, StudyRecord
from scalerl.study.verdict.forecast_scores import JudgedForecast, score_forecasts
from scalerl.study.verdict.verdict import StudyVerdict, judge_study
from scalerl.view import formats

HERE = Path(__file__).parent / "studies"
RUNS = Path(__file__).parent / "runs"
OF_RUN = ("config.json", "evals.jsonl", "alarms.jsonl")
OF_STEP = (
    *("step", "skipped", "ratio_max", "ratio_clipped", "ess", "entropy", "truncated", "zero_variance"),
    "pool",
)
AXES = {"staleness_time": "gpu_hours", "size": "flops"}
"""Additional axis of studies that are judged on another axis besides that of their budgets."""


def keep(folder: Path) -> Path:
    """Write the archive of a study, or of a run: its evaluations, completions and steps."""
    if holds_run(folder):
        out = RUNS / f"{RunRecord.read(folder).name}.tar.xz"
        with tarfile.open(out, "w:xz", preset=9) as archive:
            for name in (*OF_RUN, "samples.jsonl", "steps.jsonl"):
                _add(archive, folder / name, f"run/{name}")
        return out
    study = StudyRecord.read(folder)
    out = HERE / f"{study.plan['name']}.tar.xz"
    with tarfile.open(out, "w:xz", preset=9) as archive:
        for name in (PLAN, ATTEMPTS, DECISIONS):
            _add(archive, folder / name, name)
        _add_rows(archive, FORECASTS, [_bare(row) for row in study.forecasts])
        for run in study.runs:
            place = folder / run.plan.folder
            for name in OF_RUN:
                _add(archive, place / name, f"{run.plan.folder}/{name}")
            if run.record is None:
                continue
            steps = [{key: row[key] for key in OF_STEP if key in row} for row in run.record.steps()]
            _add_rows(archive, f"{run.plan.folder}/steps.jsonl", steps)
            _add_rows(archive, f"{run.plan.folder}/{FORECASTS}", [_bare(row) for row in run.record.forecasts])
            if run.outcome == "finished":
                _add_text(archive, f"{run.plan.folder}/checkpoints/final/README", "No weights are kept.\n")
    return out


def _add(archive: tarfile.TarFile, path: Path, name: str) -> None:
    if path.is_file():
        _add_text(archive, name, path.read_text())


def _bare(forecast: dict) -> dict:
    """Return a forecast without its band, which is used only for drawing."""
    return {key: value for key, value in forecast.items() if key != "curve"}


def _add_rows(archive: tarfile.TarFile, name: str, rows: Sequence[dict]) -> None:
    _add_text(archive, name, "".join(json.dumps(row) + "\n" for row in rows))


def _add_text(archive: tarfile.TarFile, name: str, text: str) -> None:
    data = text.encode()
    info = tarfile.TarInfo(name)  # no owner and no time: a study always gives the same archive
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


def kept(names: Sequence[str]) -> Iterator[StudyRecord]:
    """Yield the studies of these names, or all; each is unpacked only until the next."""
    for name in names or sorted(path.name.removesuffix(".tar.xz") for path in HERE.glob("*.tar.xz")):
        with tempfile.TemporaryDirectory() as folder, tarfile.open(HERE / f"{name}.tar.xz") as archive:
            archive.extractall(folder, filter="data")
            yield StudyRecord.read(folder)


def print_run(name: str) -> None:
    """Print, for every evaluation of a kept run with tools, the pass rate and the shares that call a tool."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(RUNS / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
        run = RunRecord.read(Path(folder) / "run")
        by_step: dict[int, list[dict]] = {}
        for row in run.samples():
            if row["source"] == "evaluation":
                by_step.setdefault(row["step"], []).append(row)
    print(f"\n# {name}\n\n| step | completions | pass rate | call a tool | call it soundly | truncated |")
    print("|---" * 6 + "|")
    for step, rows in by_step.items():
        calls = [calls_in(row["completion"]) for row in rows]
        shares = (
            [row["correct"] for row in rows],
            calls,
            [bool(of_row) and all(map(_is_sound, of_row)) for of_row in calls],
            [row["finish"] == "truncated" for row in rows],
        )
        print(
            f"| {step} | {len(rows)} | {' | '.join(f'{sum(map(bool, s)) / len(rows):.2f}' for s in shares)} |"
        )


def _is_sound(call: str) -> bool:
    """Return whether a call is JSON with arguments that a tool can take."""
    try:
        return isinstance(json.loads(call).get("arguments"), dict)
    except (ValueError, AttributeError):
        return False


@dataclass(frozen=True)
class WithSiblings:
    """A forecast of a run's end from its first part: alone, and with a prior from its siblings."""

    share: float
    measured: float
    alone: tuple[float, tuple[float, float]]
    helped: tuple[float, tuple[float, float]]


def with_siblings(verdict: StudyVerdict, share: float) -> Iterator[WithSiblings]:
    """Yield the forecasts of every finished run that has enough siblings."""
    fits = [(run.run.plan, run.fit) for arm in verdict.arms for run in arm.runs if run.fit]
    for plan, whole in fits:
        siblings: list[Fit] = [f for other, f in fits if other.arm != plan.arm and other.seed != plan.seed]
        if len(siblings) < MIN_SIBLINGS:
            continue
        points, end = whole.points, float(whole.points.compute_N.max())
        early = points.select(points.compute_N <= share * end * (1 + 1e-9))
        try:
            own = fit(early, prior_from=siblings)
        except CannotAnswerError:
            continue
        if own.campaign is None:
            continue
        alone, helped = (one.forecast(end) for one in (own, own.campaign))
        measured = float(points.pass_rate_N[-1])
        yield WithSiblings(
            share, measured, (alone.median, alone.prediction), (helped.median, helped.prediction)
        )


def print_siblings(found: Sequence[WithSiblings]) -> None:
    """Print the table, by share, alone and with siblings."""
    print("\n| made at | forecasts | | inside | width | interval score | rms error |")
    print("|---|---|---|---|---|---|---|")
    for share in sorted({one.share for one in found}):
        chosen = [one for one in found if one.share == share]
        y = np.array([one.measured for one in chosen])
        for label in ("alone", "helped"):
            answers = [getattr(one, label) for one in chosen]
            mean = np.array([mean for mean, _ in answers])
            low, high = np.array([ends for _, ends in answers]).T
            score = interval_score(low, high, y, 0.95).mean()
            print(
                f"| {share:g} | {len(chosen)} | {'with siblings' if label == 'helped' else label} | "
                f"{np.mean((low <= y) & (y <= high)):.3f} | {np.mean(high - low):.3f} | {score:.3f} | "
                f"{math.sqrt(np.mean((mean - y) ** 2)):.4f} |"
            )


def print_study(verdict: StudyVerdict) -> None:
    """Print a study's tables and cautions, and every arm's prompts left and time per update."""
    tables = {table.name: table for table in study_tables(verdict)}
    print(f"\n# {verdict.study.plan['name']}, by {verdict.axis}\n")
    for name in ("verdict", "measured", "forecast_scores", "stability"):
        if name in tables:
            print(f"## {tables[name].title}\n\n{formats.markdown(tables[name])}\n")
    for caution in verdict.cautions:
        print(f"- {caution}")
    for arm in verdict.study.arms:
        runs = [run.record for run in verdict.study.of_arm(arm.name) if run.record]
        pools = [row["pool"] for run in runs for row in run.steps()[-1:] if "pool" in row]
        hours = [run.compute("gpu_hours")[-1] / run.evals[-1].step for run in runs if run.evals[-1].step]
        if pools and hours:
            seconds = 3600 * float(np.mean(hours))
            print(f"- {arm.name}: {np.mean(pools):.0f} prompts left, {seconds:.3f} device seconds per update")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "studies", nargs="*", metavar="NAME", help="of benchmarks/studies (all that are kept)"
    )
    parser.add_argument("--keep", type=Path, nargs="+", metavar="FOLDER", help="keep the data of these")
    args = parser.parse_args()
    for folder in args.keep or ():
        print(keep(folder))
    if args.keep:
        return
    judged: list[JudgedForecast] = []
    helped: list[WithSiblings] = []
    runs = {path.name.removesuffix(".tar.xz") for path in RUNS.glob("*.tar.xz")}
    for name in sorted(runs & set(args.studies) if args.studies else runs):
        print_run(name)
    if args.studies and not set(args.studies) - runs:
        return
    for study in kept([name for name in args.studies if name not in runs]):
        verdict = judge_study(study)
        print_study(verdict)
        if axis := AXES.get(study.plan["name"]):
            print_study(judge_study(study, axis=axis))
        judged += verdict.forecasts
        for share in (0.25, 0.5) if verdict.forecasts else ():
            helped += with_siblings(verdict, share)
    print("\n# All forecasts\n")
    print(formats.markdown(scores_table(score_forecasts(judged))))
    print_siblings(helped)


if __name__ == "__main__":
    main()
