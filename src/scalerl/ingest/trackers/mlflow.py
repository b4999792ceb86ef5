"""Runs on a server of MLflow, read by MLflow's client with its own addresses, credentials and retries."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from scalerl import limits
from scalerl.errors import InputError, listed
from scalerl.ingest.formats.format import Unread, Wanted
from scalerl.ingest.formats.mlflow import as_logged, parameter
from scalerl.ingest.formats.rows import unix_seconds
from scalerl.ingest.logs.log import Log, LogBuilder
from scalerl.ingest.trackers.runs import Answered, each_run

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_EXPECTED = "expected mlflow:RUN_ID, mlflow:EXPERIMENT/RUN or mlflow:http://HOST:PORT/EXPERIMENT/RUN"
_RUN_ID = re.compile(r"[0-9a-f]{32}")
_ADDRESS = re.compile(r"(https?://[^/?#]+)([^#]*)(#.*)?")
_PAGE = re.compile(r"#/experiments/(\d+)(?:/runs/([0-9a-f]{32}))?(?:[/?].*)?")
"""What follows the server's address on MLflow's pages."""
_AT_ONCE, _SHOWN = 1000, 12
_RETRIES = ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
"""Fewer retries than the default of MLflow's client, which take four minutes."""


def read(name: str, wanted: Wanted, answered: Answered) -> list[Log | Unread]:
    """Read the runs of this name, without deleted ones.

    Raises:
        InputError: MLflow is not installed, no server is given, it cannot be reached, or it has no such run.
        MlflowException: the server answers with another error.
    """
    uri, within, experiment = _parsed(name)
    try:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import is_tracking_uri_set
    except ImportError as error:
        raise InputError(f"{name}: needs MLflow's client: pip install 'scalerl[mlflow]'") from error
    if uri is None and not is_tracking_uri_set():  # MLflow would create a database here
        raise InputError(f"{name}: no server is given; set MLFLOW_TRACKING_URI, or {_EXPECTED}")
    try:
        with _few_retries():
            client = MlflowClient(tracking_uri=uri)
            runs = _found(client, name, within, experiment)
            answered()
            limits.RUNS.check(len(runs), name)
            named = [(run.info.run_name, run.info.run_id, run) for run in runs]
            return each_run(name, "mlflow", named, wanted, partial(_read_run, client, wanted, answered))
    except MlflowException as error:
        if (why := _unreached(error)) is not None:
            raise InputError(f"{name}: cannot reach the server: {why}") from error
        raise


def _unreached(error: BaseException) -> str | None:
    """Return why a server could not be reached, from below the errors that clients made of it; else None."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        if many := re.fullmatch(r"too many (\d{3}) error responses", str(cause)):  # urllib3's
            return f"it answers with status {many[1]}"
        cause = cause.__cause__ or cause.__context__
    return None


def _parsed(name: str) -> tuple[str | None, str, str]:
    """Return the server (None: MLflow's own setting), what to look for on it, and the ID of an experiment."""
    rest = name.removeprefix("mlflow:")
    address = _ADDRESS.fullmatch(rest)
    if address is None:
        if not rest.strip("/") or rest.startswith(("http:", "https:")):
            raise InputError(f"{name}: names no run; {_EXPECTED}")
        return None, rest, ""
    server, path, page = address.groups()
    if "@" in server:
        raise InputError(
            "mlflow: leave the password out of the address, which is kept with the run: set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )
    if page is not None:
        place = _PAGE.fullmatch(page)
        if place is None:
            raise InputError(f"{name}: not the page of a run or an experiment; {_EXPECTED}")
        return server + path.rstrip("/"), place[2] or "", place[1]
    if not path.strip("/"):
        raise InputError(f"{name}: names no run; {_EXPECTED}")
    return server, path.strip("/"), ""


def _found(client: MlflowClient, name: str, within: str, experiment: str) -> Sequence[Run]:
    """Return the runs that are asked for, at least one."""
    from mlflow.exceptions import MlflowException

    if _RUN_ID.fullmatch(within):
        try:
            return [client.get_run(within)]
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            raise InputError(f"{name}: the server has no run of this ID") from error
    run = ""
    if not experiment:
        # Either name may contain slashes: the longest name of an experiment that exists counts.
        ends = [len(within), *(at.start() for at in re.finditer("/", within))]
        for end in sorted(ends, reverse=True):
            at = client.get_experiment_by_name(within[:end]) if end else None
            if at is not None and at.lifecycle_stage == "active":
                experiment, run = at.experiment_id, within[end + 1 :]
                break
        else:
            names = [one.name for one in client.search_experiments(max_results=_SHOWN)]
            raise InputError(f"{name}: the server has no such experiment; there are {listed(names)}")
    if _RUN_ID.fullmatch(run):  # as pages of MLflow name a run, also within its experiment
        return _found(client, name, run, "")
    found = list(_searched(client, experiment, run))
    if run and not found:
        names = [_name(one) for one in client.search_runs([experiment], max_results=_SHOWN)]
        raise InputError(f"{name}: no run {run!r} in the experiment; there are {listed(names) or 'none'}")
    if not found:
        raise InputError(f"{name}: the experiment has no runs")
    if run and len(found) > 1:
        ids = listed([f"mlflow:{one.info.run_id}" for one in found])
        raise InputError(f"{name}: {len(found)} runs have this name; choose one by its ID: {ids}")
    return found


def _searched(client: MlflowClient, experiment: str, run: str) -> Iterator[Run]:
    """Yield the runs of an experiment that were not deleted, with this name if one is given."""
    quote = '"' if "'" in run else "'"
    # A name with both quotes cannot be written in a filter; then all runs are searched.
    filter = f"attributes.run_name = {quote}{run}{quote}" if run and quote not in run else ""
    token = None
    while True:
        page = client.search_runs(
            [experiment], filter, max_results=_AT_ONCE, order_by=["start_time ASC"], page_token=token
        )
        yield from (one for one in page if not run or _name(one) == run)
        token = page.token
        if not token:
            return


def _name(run: Run) -> str:
    return run.info.run_name or run.info.run_id


def _read_run(client: MlflowClient, wanted: Wanted, answered: Answered, run: Run, builder: LogBuilder) -> Log:
    for key, value in run.data.params.items():
        builder.config[key.replace("/", ".")] = parameter(value)
    for key in run.data.metrics:
        if not wanted(key):
            builder.add(0.0, math.nan, {key: 0.0})  # only keeps the name
            continue
        history = client.get_metric_history(run.info.run_id, key)
        answered()
        builder.begin_file()
        # Servers answer in any order; by time, what a resumed run logs again follows what it replaces.
        for one in sorted(history, key=lambda one: (one.timestamp, one.step)):
            builder.add(float(one.step), unix_seconds(one.timestamp), {key: as_logged(one.value)})
    return builder.build()


@contextmanager
def _few_retries() -> Iterator[None]:
    """Make MLflow's client give up sooner, unless the user has set its number of retries."""
    # The client has no argument for it: it reads the environment at every request.
    key, value = _RETRIES
    if key in os.environ:
        yield
        return
    os.environ[key] = value
    try:
        yield
    finally:
        os.environ.pop(key, None)
