"""Runs on a server of W&B, read by `wandb.Api` with the address and credentials of W&B's own settings.

The client reads history in its own process: from Parquet files where the server has exported the rows, by
GraphQL where it has not yet. Of rows that are not exported it returns only those with all requested metrics
(`Run.scan_history`, wandb 0.31). So metrics are requested together only if they have equally many rows, and
again one by one if fewer arrive than the server counts.
"""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from scalerl import limits
from scalerl.errors import InputError, brief_error, listed
from scalerl.ingest.formats.format import Unread, Wanted
from scalerl.ingest.formats.wandb_offline import Segment, build_log, is_own_step
from scalerl.ingest.logs.log import Log, LogBuilder, finite
from scalerl.ingest.trackers.runs import Answered, each_run
from scalerl.jsonl import flat

if TYPE_CHECKING:
    from wandb import Api
    from wandb.apis.public import Run

_TIME = "_timestamp"
_PAGE = 1000
"""Steps, or rows where the steps are wider, that are requested at once: the client's own default."""
_TOGETHER = 100
"""Metrics that are requested at once."""
_SHOWN = 12
_SECONDS = 20
"""The longest wait for a request, while W&B's process tries again."""
_LATE = "did not respond in time"


def read(name: str, wanted: Wanted, answered: Answered) -> list[Log | Unread]:
    """Read the runs of a name.

    Raises:
        InputError: wandb is not installed, there is no key, or no such run; or the server cannot be reached,
            or refuses.
    """
    place, within, group = _parsed(name)
    try:
        import wandb
    except ImportError as error:
        raise InputError(f"{name}: needs W&B's client: pip install 'scalerl[wandb]'") from error
    host = _host(name)
    try:
        api = wandb.Api(timeout=_SECONDS)
        answered()
        runs = _found(api, name, place, within, group)
        answered()
        named = [(run.name, run.id, run) for run in runs]
        keeps = lambda one: wanted(one) or is_own_step(one)  # noqa: E731
        return each_run(name, "wandb", named, keeps, partial(_read_run, name, wanted, answered))
    except InputError:
        raise
    except Exception as error:  # of many kinds, whatever the client makes of what a server sends
        if _LATE in str(error):  # it says so of a server that is down, and of one that answers with 5xx
            raise InputError(f"{name}: {host} gave no answer within {_SECONDS} s, or errors") from error
        key = os.environ.get("WANDB_API_KEY")
        text = brief_error(error)
        raise InputError(f"{name}: {text.replace(key, '...') if key else text}") from error


def _parsed(name: str) -> tuple[str, str, str]:
    """Return ENTITY/PROJECT, run and group; the last two are empty where they are not given."""
    place, mark, query = name.removeprefix("wandb:").partition("?")
    entity, _, rest = place.partition("/")
    project, _, run = rest.partition("/")
    key, _, group = query.partition("=")
    if not (entity and project) or (mark and (run or key != "group" or not group)):
        forms = "wandb:ENTITY/PROJECT/RUN or wandb:ENTITY/PROJECT?group=NAME"
        raise InputError(f"{name}: names no run of W&B; expected {forms}")
    return f"{entity}/{project}", run.removeprefix("runs/"), group  # as in the address of its page


def _host(name: str) -> str:
    """Return the address of the server, after checking that there is a key for it."""
    from wandb.errors import Error
    from wandb.sdk import wandb_setup
    from wandb.sdk.lib import wbauth

    host = os.environ.get("WANDB_BASE_URL") or wandb_setup.singleton().settings.base_url
    try:
        # `Api` would ask for a key in the terminal.
        auth = wbauth.authenticate_session(host=host, source="scalerl", prompt=False, update_session=False)
    except Error as error:  # for a malformed key
        raise InputError(f"{name}: {brief_error(error)}") from error
    if auth is None:
        raise InputError(f"{name}: no key for {host}; set WANDB_API_KEY, or run: wandb login")
    return host


def _found(api: Api, name: str, place: str, within: str, group: str) -> list[Run]:
    """Return the runs that are asked for, at least one."""
    filters: dict[str, Any] = {"group": group} if group else {}
    if within:
        filters = {"$or": [{"name": within}, {"displayName": within}]}  # the API's name of a run is its ID
    found = list(islice(api.runs(place, filters=filters), limits.RUNS.most + 1))
    limits.RUNS.check(len(found), name)
    if within:
        found = [run for run in found if run.id == within] or found
    if within and len(found) > 1:
        ids = listed([f"wandb:{place}/{run.id}" for run in found])
        raise InputError(f"{name}: {len(found)} runs have this name; choose one by its ID: {ids}")
    if not found:
        names = listed([str(run.name or run.id) for run in islice(api.runs(place, per_page=_SHOWN), _SHOWN)])
        what = f"run {within!r}" if within else f"run in the group {group!r}" if group else "run"
        raise InputError(f"{name}: no {what} in the project; there are {names or 'none'}")
    return found


def _read_run(name: str, wanted: Wanted, answered: Answered, run: Run, builder: LogBuilder) -> Log:
    run.load_full_data()
    answered()
    builder.config = flat(
        {key: value for key, value in run.config.items() if not key.startswith("_wandb")}, where=name
    )
    counts = _counts(run)
    kept: dict[str, int] = {}
    for key, n in counts.items():
        if len(key) <= limits.NAME.most and (wanted(key) or is_own_step(key)):
            kept[key] = n
        elif not key.startswith("_"):
            builder.add(0.0, math.nan, {key: 0.0})  # only keeps the name
    history = _History(run, name, answered)
    history.fetch(kept, builder)
    rows = history.rows
    if not rows:
        summary = flat(run.summary_metrics, where=name)
        step, time = finite(summary.get("_step")), finite(summary.get(_TIME))
        rows[0.0 if math.isnan(step) else step] = {_TIME: time} | {key: summary.get(key) for key in kept}
        builder.notes.append("the run has no history, only a summary: one value of each metric")
    for step in sorted(rows):
        row = rows[step]
        builder.add(step, finite(row.pop(_TIME, None)), row)
    return build_log(builder, [Segment(0, builder.n_rows, has_own_steps=True)], wanted)


def _counts(run: Run) -> dict[str, int]:
    """Return the metrics of a run, with the number of values that the server counts (0: it does not say)."""
    keys = _mapping(_mapping(run.history_keys).get("keys"))
    if not keys:
        return dict.fromkeys(flat(run.summary_metrics, where=str(run.id)), 0)
    counts = {}
    for key, about in keys.items():
        kinds = [_mapping(one) for one in _mapping(about).get("typeCounts") or ()]
        # NaN and infinities are logged as text.
        numbers = [finite(one.get("count")) for one in kinds if one.get("type") in ("number", "string")]
        if numbers or not kinds:
            counts[key] = int(sum(n for n in numbers if n > 0))
    return counts


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


class _History:
    """The rows of a run as they are fetched, by W&B's step."""

    def __init__(self, run: Run, name: str, answered: Answered) -> None:
        self._run, self._name, self._answered = run, name, answered
        self.rows: dict[float, dict[str, Any]] = defaultdict(dict)
        self._found: Counter[str] = Counter()
        last, lines = finite(_mapping(run.history_keys).get("lastStep")), finite(run.history_line_count)
        # Steps may be far apart, as where samples are counted.
        self._page = max(_PAGE, int(_PAGE * (last + 1) / lines)) if lines > 0 and last > 0 else _PAGE

    def fetch(self, counts: Mapping[str, int], builder: LogBuilder) -> None:
        """Add the rows of these metrics; `counts` has the number of values that the server counts of each."""
        groups: dict[int, list[str]] = defaultdict(list)
        for key, n in counts.items():
            groups[n].append(key)
        alone = groups.pop(0, [])
        for n, keys in groups.items():
            for first in range(0, len(keys), _TOGETHER):
                part = keys[first : first + _TOGETHER]
                self._scan(part)
                if len(part) > 1:
                    alone += [key for key in part if self._found[key] < n]
        for key in alone:
            self._scan([key])
        for key, n in counts.items():
            if self._found[key] < n:
                builder.notes.append(f"W&B counts {n} values of {key!r}, and sent {self._found[key]}")

    def _scan(self, keys: Sequence[str]) -> None:
        """Add the rows that have all of some metrics, or some of them, and count the values of each."""
        for key in keys:
            self._found[key] = 0
        # With its cache the client would keep exported files, and read stale ones of a run that has gone on.
        scan = self._run.scan_history(keys=[*keys, _TIME], page_size=self._page, use_cache=False)
        for n, row in enumerate(scan):
            if n % _PAGE == 0:
                self._answered()
            step = finite(row.get("_step"))
            cells = {key: row[key] for key in keys if row.get(key) is not None}
            if not cells or math.isnan(step):
                continue
            self._found.update(cells.keys())
            limits.VALUES.check(sum(self._found.values()), self._name)
            self.rows[step].update(cells)
            if row.get(_TIME) is not None:
                self.rows[step][_TIME] = row[_TIME]
        self._answered()
