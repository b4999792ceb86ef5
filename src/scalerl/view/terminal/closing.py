"""The closing table of a run: what was forecast, what was measured, and the ceiling, on one screen."""

import math
from pathlib import Path
from typing import TextIO

from scalerl.record.reader import RunRecord
from scalerl.record.saved_weights import final_folder
from scalerl.view.facts.facts import axis_for, known_ceiling
from scalerl.view.facts.frozen import frozen_forecasts, judge, main_forecast
from scalerl.view.facts.notices import alarm_text, ceiling_text, to_tell_text
from scalerl.view.numbers import percent, rate, rate_interval, unit_for
from scalerl.view.terminal.rows import print_table


def closing_rows(run: RunRecord, report: Path | None = None) -> list[tuple[str, str]]:
    """Return the rows (label, value) of the closing table; `report` is the page."""
    frozen = main_forecast(frozen_forecasts(run))
    if frozen:
        rows = [
            ("forecast", f"{frozen.text}, at {frozen.share_in_words}"),
            ("measured", judge(run, frozen).text),
            ("width", rate(frozen.width)),
        ]
        if math.isfinite(sum(frozen.rerun)):
            rows.append(("another seed", rate_interval(frozen.rerun)))
    else:
        last = run.evals[-1] if run.evals else None
        measured = f"{rate(last.pass_rate)} at step {last.step}" if last else "no evaluation yet"
        rows = [("forecast", "none was frozen during the run"), ("measured", measured)]
    fit_json = frozen.fit if frozen else {}
    when = f" at {percent(frozen.share)}" if frozen else ""
    rows.append((f"ceiling A{when}", ceiling_text(fit_json, known_ceiling(run))))
    if fit_json.get("lack_of_fit"):
        rows.append(("why withheld", str(fit_json.get("why"))))
    axis = axis_for(run, frozen=frozen)
    if needed := to_tell_text(fit_json, unit_for(axis, float(run.compute(axis).max(initial=0.0)))):
        rows.append(("identified", needed))
    if run.alarms:
        rows.append(("health", alarm_text(run.alarms)))
    rows += [(name, str(path)) for name, path in kept_files(run.path).items()]
    if report is not None:
        rows.append(("report", str(report)))
    return rows


def kept_files(run: Path) -> dict[str, Path]:
    """Return where a run has its weights (the final ones, else its newest checkpoint) and its completions."""
    folders = (run / "checkpoints").glob("step-*")
    newest = max(folders, key=lambda path: path.stat().st_mtime, default=None)
    weights = final_folder(run) if final_folder(run).is_dir() else newest
    found = {"checkpoint": weights, "samples": run / "samples.jsonl"}
    return {name: path for name, path in found.items() if path is not None and path.exists()}


def print_closing(run: RunRecord, report: Path | None = None, file: TextIO | None = None) -> None:
    """Print the closing table to `file` (standard output): by rich on a terminal, plain elsewhere."""
    print_table(closing_rows(run, report), title=run.name, file=file)
