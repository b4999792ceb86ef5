"""The trackers that a recipe can name: W&B, TensorBoard, MLflow and trackio.

Each imports its package when it is opened, in the process of the trackers.
"""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast
from uuid import uuid4

from scalerl.errors import InputError, first_line
from scalerl.jsonl import dumps, flat
from scalerl.rl.config.settings import Tracking
from scalerl.rl.tracking.tracker import Status, TrackedRun, Tracker

_TF_STRING = 7
"""TensorFlow's DataType of a tensor of strings."""
_MLFLOW_PARAMS = 100
"""The most parameters that MLflow takes at once; it takes 1,000 metrics, more than any row has."""
_MLFLOW_PARAM_LENGTH = 6000
COLUMNS = (
    *("step", "prompt", "epoch", "sample", "prompt_text", "completion", "reward", "correct"),
    *("finish", "versions", "length"),
)
"""Columns of the tables of completions: fields of samples.jsonl."""


class WandbTracker:
    """Logs to W&B, online or offline by its own settings; its files are in WANDB_DIR, else the run folder.

    It goes offline if no user is logged in, or if the server cannot be reached at the start.
    """

    name = "wandb"

    def open(self, run: TrackedRun) -> Mapping[str, str]:
        """Start the run, or resume the one with the same id."""
        import wandb

        run_id = run.kept.get("id") or uuid4().hex[:8]

        def init(**more: Any) -> Any:
            return wandb.init(
                id=run_id,
                resume="allow",
                name=run.name,
                project=run.project,
                group=run.group or None,
                config=dict(run.config),
                dir=os.environ.get("WANDB_DIR") or str(run.folder),
                reinit="create_new",
                settings=wandb.Settings(console="off", silent=True),
                **more,
            )

        why = ""
        try:
            self._run = init()
        except Exception as error:
            with suppress(Exception):
                wandb.teardown()
            self._run, why = init(mode="offline"), f" ({first_line(error)})"
        # W&B's own step counts rows and must not go back, but evaluations end after later steps.
        self._run.define_metric("*", step_metric="step")
        if self._run.offline:
            where = f"offline, wandb sync {self._run.settings.sync_dir} uploads it{why}"
        else:
            where = self._run.url or "disabled"
        return {"id": run_id, "where": where}

    def log(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        """Log a row of the history."""
        self._run.log({"step": step, **metrics})

    def log_samples(self, step: int, time: float, samples: Sequence[Mapping[str, Any]]) -> None:
        """Log a `wandb.Table`: `samples/evaluation` or `samples/training`."""
        import wandb

        table = wandb.Table(columns=list(COLUMNS), data=[_cells(row) for row in samples])
        self._run.log({"step": step, f"samples/{samples[0]['source']}": table})

    def close(self, status: Status) -> None:
        """Upload the rest, and end W&B's own process."""
        import wandb

        self._run.finish(exit_code=0 if status == "finished" else 1)
        wandb.teardown()


class TensorboardTracker:
    """Writes an event file in RUN/tensorboard for every start of the run, flushed row by row.

    It uses TensorBoard's `RecordWriter`, as the thread of `EventFileWriter` silently loses failed writes.
    """

    name = "tensorboard"

    def open(self, run: TrackedRun) -> Mapping[str, str]:
        """Start a file; TensorBoard then hides events of earlier files from `run.first_step` on."""
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        # Protobuf creates their classes during the import, where pyright does not see them.
        event, summary, tensor = cast(Any, event_pb2), cast(Any, summary_pb2), cast(Any, tensor_pb2)
        self._event, self._summary, self._tensor = event.Event, summary.Summary, tensor.TensorProto
        self._shape = cast(Any, tensor_shape_pb2).TensorShapeProto
        self._metadata = summary.SummaryMetadata
        folder = run.folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._writer = RecordWriter((folder / name).open("xb"))
        self._write(wall_time=time.time(), file_version="brain.Event:2")
        if run.kept:
            start = event.SessionLog(status=event.SessionLog.START)
            self._write(wall_time=time.time(), step=run.first_step, session_log=start)
        config = tensor.TensorProto(dtype=_TF_STRING, string_val=[dumps(run.config).encode()])
        self._write_text(time.time(), 0, "args/text_summary", config)
        return {"where": str(folder)}

    def log(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        """Write one event with all scalars of a row."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(wall_time=time, step=step, summary=self._summary(value=values))

    def log_samples(self, step: int, time: float, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write a table of the text plugin: `samples/evaluation` or `samples/training`.

        The plugin draws a tensor of two dimensions as a table, whose cells are Markdown.
        """
        texts = [list(COLUMNS), *([_as_code(cell) for cell in _cells(row)] for row in samples)]
        shape = self._shape(dim=[self._shape.Dim(size=n) for n in (len(texts), len(COLUMNS))])
        cells = [cell.encode() for row in texts for cell in row]
        table = self._tensor(dtype=_TF_STRING, tensor_shape=shape, string_val=cells)
        self._write_text(time, step, f"samples/{samples[0]['source']}", table)

    def close(self, status: Status) -> None:
        """Close the file."""
        self._writer.close()

    def _write_text(self, time: float, step: int, tag: str, tensor: Any) -> None:
        shown = self._metadata(plugin_data={"plugin_name": "text"})
        value = self._summary.Value(tag=tag, tensor=tensor, metadata=shown)
        self._write(wall_time=time, step=step, summary=self._summary(value=[value]))

    def _write(self, **event: Any) -> None:
        self._writer.write(self._event(**event).SerializeToString())
        self._writer.flush()


class MlflowTracker:
    """Logs to MLflow, at MLFLOW_TRACKING_URI or its default; the recipe becomes the run's parameters."""

    name = "mlflow"

    def open(self, run: TrackedRun) -> Mapping[str, str]:
        """Start the run in the experiment of the project, or resume it."""
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 refuses a folder without it
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # it would spoil the run's bar
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric, self._client = Metric, MlflowClient()
        if "id" in run.kept:
            self._id = run.kept["id"]
            self._client.update_run(self._id, status="RUNNING")
        else:
            experiment = self._experiment(run.project)
            self._id = self._client.create_run(experiment, run_name=run.name).info.run_id
            if run.group:
                self._client.set_tag(self._id, "group", run.group)
            params = [Param(k, str(value)[:_MLFLOW_PARAM_LENGTH]) for k, value in flat(run.config).items()]
            for n in range(0, len(params), _MLFLOW_PARAMS):
                self._client.log_batch(self._id, params=params[n : n + _MLFLOW_PARAMS], synchronous=True)
        return {"id": self._id, "where": f"{self._client.tracking_uri}, run {self._id}"}

    def log(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        """Log all metrics of a row."""
        # Synchronous whatever MLFLOW_ENABLE_ASYNC_LOGGING says, so that failing rows raise here and count.
        row = [self._metric(name, value, int(time * 1000), step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=row, synchronous=True)

    def log_samples(self, step: int, time: float, samples: Sequence[Mapping[str, Any]]) -> None:
        """Append to the artifact samples_evaluation.json or samples_training.json, a table; needs pandas."""
        columns = zip(*(_cells(row) for row in samples), strict=True)
        data = dict(zip(COLUMNS, map(list, columns), strict=True))
        self._client.log_table(self._id, data, f"samples_{samples[0]['source']}.json")

    def close(self, status: Status) -> None:
        """Set the status of the run."""
        ends = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
        self._client.set_terminated(self._id, ends[status])

    def _experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        try:
            return self._client.create_experiment(name)
        except MlflowException:  # it exists already, perhaps only just
            found = self._client.get_experiment_by_name(name)
            if found is None:
                raise
            return found.experiment_id


class TrackioTracker:
    """Logs to trackio: its local database, or the Space or server that its own settings name."""

    name = "trackio"

    def open(self, run: TrackedRun) -> Mapping[str, str]:
        """Start the run, or resume it by its name, to which a suffix is added as names may repeat."""
        trackio = import_module("trackio")  # the tests do not install it, so pyright does not find it
        name = run.kept.get("name") or f"{run.name}-{uuid4().hex[:6]}"
        self._run = trackio.init(
            run.project,
            name,
            group=run.group or None,
            config=dict(run.config),
            # A new run must not continue one that has the same name by chance.
            resume="allow" if run.kept else "never",
            embed=False,
        )
        return {"name": name, "where": f"project {run.project}, run {name}"}

    def log(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        """Log a row."""
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, time: float, samples: Sequence[Mapping[str, Any]]) -> None:
        """Log a `trackio.Table`: `samples/evaluation` or `samples/training`."""
        trackio, pandas = import_module("trackio"), import_module("pandas")
        frame = pandas.DataFrame([_cells(row) for row in samples], columns=list(COLUMNS))
        self._run.log({f"samples/{samples[0]['source']}": trackio.Table(dataframe=frame)}, step=step)

    def close(self, status: Status) -> None:
        """Write the rest."""
        self._run.finish()


def _cells(row: Mapping[str, Any]) -> list[Any]:
    """Return a line of samples.jsonl by `COLUMNS`; versions become `3-5`, as tables cannot hold lists."""
    return ["-".join(map(str, row[name])) if name == "versions" else row[name] for name in COLUMNS]


def _as_code(cell: Any) -> str:
    """Return a value as an indented block of code, which no text in a completion can end."""
    return "\n".join(f"    {line}" for line in str(cell).splitlines())


def trackers_of(settings: Tracking) -> list[Tracker]:
    """Return the trackers that `settings.to` names, not opened yet.

    Raises:
        InputError: the package of one is not installed.
    """
    built_in = (WandbTracker, TensorboardTracker, MlflowTracker, TrackioTracker)
    chosen = [kind for kind in built_in if kind.name in settings.to]
    for kind in chosen:
        if find_spec(kind.name) is None:  # the packages have the names of the trackers
            raise InputError(f"tracking.to: {kind.name} is not installed: pip install {kind.name}")
    return [kind() for kind in chosen]
