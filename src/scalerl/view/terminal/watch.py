"""The status of a run for a person: the view of a terminal, the line of one evaluation, the closing table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from scalerl.errors import printable
from scalerl.numbers import duration, percent, plain, rate, rate_interval, unit_for
from scalerl.record.devices import is_of_one_device
from scalerl.record.reader import RunRecord
from scalerl.record.saved_weights import final_folder
from scalerl.view.facts.facts import axis_for, known_ceiling
from scalerl.view.facts.frozen import judge, leading_forecast, sentence
from scalerl.view.facts.notices import NOT_CHECKED, alarm_text, ceiling_text, to_tell_text
from scalerl.view.facts.standing import Standing
from scalerl.view.terminal.activity import token_speed
from scalerl.view.terminal.rows import print_table, rich_table

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_LABELS = 14
"""Characters of the labels and of the gap to the values."""
_LEAST_ROWS, _MOST_ROWS = 7, 18
"""Least and most rows of the plot."""
_SAMPLE_LINES = {"prompt": 2, "completion": 4}
"""The most lines of a prompt and of a completion."""
_SPARE = (
    *("completion", "prompt", "sample", "", "speed"),
    *("frozen", "identified", "why withheld", "last line", "metric"),
)
"""Rows that are left out, in this order, if the console is too small for all."""


def view(
    run: Standing,
    now: float,
    console: Console,
    note: str = "",
    is_whole: bool = False,
    activity: str = "",
) -> RenderableType:
    """Return the view in the size of the console, with a `note` on the last read and the current `activity`.

    Unless `is_whole`, rows of `_SPARE` are dropped one by one until the others fit. The legend, and then the
    plot, is left out if there is no room for it.
    """
    from rich.console import Group
    from rich.text import Text

    from scalerl.view.terminal.plot import ASCII, UNICODE, key, plot

    signs = ASCII if console.options.ascii_only else UNICODE

    def room(*parts: RenderableType) -> int:
        return console.height - 2 - sum(len(console.render_lines(part, pad=False)) for part in parts)

    extra = (("now", activity), ("note", note))
    texts = sample_rows(run.sample, max(console.width - _LABELS, 20))
    rows = [*view_rows(run, now), *((label, text) for label, text in extra if text), *texts]
    head, table = Text(title(run), style="bold"), rich_table(rows)
    for label in () if is_whole else _SPARE:
        if room(head, table) >= 0:
            break
        rows = [row for row in rows if row[0] != label]
        table = rich_table(rows)
    legend = key(run, console.width - 1, signs)
    if room(head, table, *legend) < _LEAST_ROWS:
        legend = []
    height = min(room(head, table, *legend), _MOST_ROWS)
    if not len(run.points) or height < _LEAST_ROWS:
        return Group(head, table)
    return Group(head, *plot(run, min(console.width - 1, 110), height, signs), *legend, table)


def title(run: Standing) -> str:
    """Return the name of the run and its progress."""
    parts = [run.name, "ended" if run.ended else ""]
    if run.last_step is not None:
        parts.append(f"step {run.last_step:,}")
    if math.isfinite(run.share):
        parts.append(f"{percent(run.share)} of the budget")
    return "  ".join(part for part in parts if part)


def view_rows(run: Standing, now: float) -> list[tuple[str, str]]:
    """Return the rows (label, value) below the plot."""
    count = len(run.points)
    measured = f"{rate(run.pass_rate)}  evaluation {count}, at {run.unit.show(run.compute)}"
    rows = [
        ("metric", str(run.points.metric)),
        ("pass rate", measured if count else "no evaluation yet"),
        *_forecast_rows(run),
    ]
    if run.chance is not None:
        asked = f"{run.asked.target:g} at {run.unit.show(run.end)}"
        rows.append(("verdict", f"{run.chance.answer}: {asked}"))
    rows += zip(("health", ""), _health(run), strict=False)
    speeds = [f"{run.unit.show(3600 * run.speed)} per hour"] if run.speed > 0 else []
    if run.tokens_per_second > 0:
        speeds.append(token_speed(run.tokens_per_second))
    if speeds:
        rows.append(("speed", "  ".join(speeds)))
    rows.append(("last line", _last(run, now)))
    return rows


def sample_rows(sample: Mapping[str, Any], width: int) -> list[tuple[str, str]]:
    """Return the rows of a kept completion, a line of samples.jsonl; none if it is empty.

    Its texts are cut to a few lines of `width` characters; a marker says how much is left out.
    """
    if not sample:
        return []
    source, finish, length = (sample.get(key) for key in ("source", "finish", "length"))
    rate = plain(sample.get("reward"))
    about = f"{source} at step {sample.get('step')}  reward {rate}  {finish} after {length} tokens"
    rows = [("sample", printable(about))]
    for label, key in (("prompt", "prompt_text"), ("completion", "completion")):
        # A character that moves the cursor, or a line break, would destroy the view.
        text = printable(" ".join(str(sample.get(key) or "").split()))
        most = _SAMPLE_LINES[label] * width
        if len(text) > most:
            end = f" [... {len(text) - most:,} more characters]"
            text = text[: most - len(end)] + end
        rows.append((label, text))
    return rows


def _forecast_rows(run: Standing) -> list[tuple[str, str]]:
    fit, forecast = run.fit, run.forecast
    if fit is None or forecast is None:
        return [("forecast", run.reason)] if len(run.points) else []
    at = f"{run.where} ({run.unit.show(run.end)})"
    fit_json = fit.to_json()
    rows = [
        ("forecast", f"{rate(forecast.median)} {rate_interval(forecast.prediction)}  {at}"),
        ("ceiling A", ceiling_text(fit_json, known_ceiling(run.record))),
    ]
    if fit.misfit:
        rows.append(("why withheld", fit.why))
    elif not fit.identified:
        rows.append(("identified", to_tell_text(fit_json, run.unit, run.compute)))
    if run.frozen:
        rows.append(("frozen", sentence(run.frozen, run.outcome(run.frozen))))
    return rows


def _health(run: Standing) -> list[str]:
    still = [alarm for alarm in run.alarms if alarm.last is None]
    over = len(run.alarms) - len(still)
    figures = {"truncated": percent, "entropy": plain, "mean_length": plain}
    shown = [
        f"{name.replace('_', ' ')} {show(run.health(name))}"
        for name, show in figures.items()
        if math.isfinite(run.health(name))
    ]
    found = [f"open: {alarm_text(still)}"] if still else []
    found += [f"{over} over"] if over else []
    if not run.health_is_watched:
        found = [NOT_CHECKED]
    elif not run.alarms and shown:
        found = ["no alarms"]
    return [text for text in ("; ".join(found), "  ".join(shown)) if text]


def _last(run: Standing, now: float) -> str:
    parts = []
    if math.isfinite(run.time):
        parts.append(f"evaluation {ago(now - run.time)}")
    elif math.isfinite(run.written):
        parts.append(_written(run, now))
    if run.last_line > run.time:
        parts.append(f"step {ago(now - run.last_line)}")
    if run.ended:
        parts.append("the run has ended")
    elif math.isfinite(eta := run.eta(now)):
        parts.append(f"budget spent in {duration(eta)}" if eta > 0 else "beyond the time expected")
    return "  ".join(parts) or "times are not logged"


def ago(seconds: float) -> str:
    """Return how long ago something was; if clocks differ and it is in the future, `now`."""
    return "now" if seconds < 1 else f"{duration(seconds)} ago"


def line(run: Standing, now: float = math.nan) -> str:
    """Return one evaluation and its forecast in one line, without the name of the run.

    If `now` is given, as the evaluation may be old, the line also has its age.
    """
    from scalerl.forecast.online import forecast_line

    parts = [f"evaluation {len(run.points)}" if run.step is None else f"step {run.step}"]
    if math.isfinite(run.share):
        parts.append(f"{percent(run.share)} of the budget")
    where = "of the end" if math.isfinite(run.budget) else run.where
    parts.append(f"pass rate {run.pass_rate:.3f}")
    if run.tokens_per_second > 0:
        parts.append(token_speed(run.tokens_per_second))
    parts.append(forecast_line(run.points, run.fit, run.reason, run.end, where))
    if is_of_one_device(run.record, run.points.axis):
        parts.append("GPU-hours of one device")
    if run.chance is not None:
        parts.append(run.chance.answer)
    if still := [alarm for alarm in run.alarms if alarm.last is None]:
        parts.append(alarm_text(still))
    if math.isfinite(now) and math.isfinite(run.last_line):
        logged = math.isfinite(run.time)
        parts.append(f"last evaluation {ago(now - run.time)}" if logged else _written(run, now))
    return "  ".join(parts)


def _written(run: Standing, now: float) -> str:
    """Return the age of the last write to its files, which need not have been an evaluation."""
    return f"log written {ago(now - run.written)}"


def closing_rows(run: RunRecord, report: Path | None = None) -> list[tuple[str, str]]:
    """Return the rows (label, value) of the closing table; `report` is the page."""
    frozen = leading_forecast(run)
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
    """Return the paths of a run's weights (final, else of its newest checkpoint) and kept completions."""
    folders = (run / "checkpoints").glob("step-*")
    newest = max(folders, key=lambda path: path.stat().st_mtime, default=None)
    weights = final_folder(run) if final_folder(run).is_dir() else newest
    found = {"checkpoint": weights, "samples": run / "samples.jsonl"}
    return {name: path for name, path in found.items() if path is not None and path.exists()}


def print_closing(run: RunRecord, report: Path | None = None, file: TextIO | None = None) -> None:
    """Print the closing table to `file` (default: standard output), by rich on a terminal, else plain."""
    print_table(closing_rows(run, report), title=run.name, file=file)
