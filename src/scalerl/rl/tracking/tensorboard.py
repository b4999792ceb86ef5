"""TensorBoard: an event file in the run folder for every start of the run."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from typing import Any, cast

from scalerl.jsonl import dumps
from scalerl.rl.tracking.tracker import Status, TrackedRun

_STRING = 7
"""Among the types of tensors."""


class TensorboardTracker:
    """Event files in RUN/tensorboard, flushed row by row.

    Its `RecordWriter` is used, and not its `EventFileWriter`, whose thread loses what the disk refuses.
    """

    name = "tensorboard"

    def open(self, run: TrackedRun) -> Mapping[str, str]:
        """Begin a file; what files before it hold from the first step on is not shown any more."""
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        # Their classes are made as they are imported.
        event, summary, tensor = cast(Any, event_pb2), cast(Any, summary_pb2), cast(Any, tensor_pb2)
        self._event, self._summary = event.Event, summary.Summary
        folder = run.folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._writer = RecordWriter((folder / name).open("xb"))
        self._write(self._event(wall_time=time.time(), file_version="brain.Event:2"))
        if run.kept:
            start = event.SessionLog(status=event.SessionLog.START)
            self._write(self._event(wall_time=time.time(), step=run.first_step, session_log=start))
        text = tensor.TensorProto(dtype=_STRING, string_val=[dumps(run.config).encode()])
        shown = summary.SummaryMetadata(plugin_data={"plugin_name": "text"})
        config = self._summary.Value(tag="args/text_summary", tensor=text, metadata=shown)
        self._write(self._event(wall_time=time.time(), summary=self._summary(value=[config])))
        return {"where": str(folder)}

    def log(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        """One event with all scalars of a row."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(self._event(wall_time=time, step=step, summary=self._summary(value=values)))

    def close(self, status: Status) -> None:
        """Close the file."""
        self._writer.close()

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()
