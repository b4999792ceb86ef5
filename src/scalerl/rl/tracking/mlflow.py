"""MLflow, at MLFLOW_TRACKING_URI or where it is by default."""

from __future__ import annotations

import os
from collections.abc import Mapping

from scalerl.jsonl import flat
from scalerl.rl.tracking.tracker import Status, TrackedRun

_MOST_PARAMS = 100
"""That it takes at once; of metrics a thousand, which no row has."""
_LONGEST_PARAM = 6000
_ENDS: dict[Status, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowTracker:
    """A run of an experiment; the recipe is its parameters."""

    name = "mlflow"

    def open(self, run: TrackedRun) -> Mapping[str, str]:
        """Begin the run, or go on with it."""
        # A folder of files has to be asked for twice since MLflow 3.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client = MlflowClient()
        where = self._client.tracking_uri
        if run_id := run.kept.get("id"):
            self._id = run_id
            self._client.update_run(run_id, status="RUNNING")
        else:
            made = self._client.create_run(self._experiment(run.project), run_name=run.name)
            self._id = made.info.run_id
            if run.group:
                self._client.set_tag(self._id, "group", run.group)
            params = [Param(key, str(value)[:_LONGEST_PARAM]) for key, value in flat(run.config).items()]
            for n in range(0, len(params), _MOST_PARAMS):
                self._client.log_batch(self._id, params=params[n : n + _MOST_PARAMS], synchronous=True)
        return {"id": self._id, "where": f"{where}, run {self._id}"}

    def log(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        """All metrics of a row."""
        row = [self._metric(name, value, int(time * 1000), step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=row, synchronous=True)

    def close(self, status: Status) -> None:
        """Say how it ended."""
        self._client.set_terminated(self._id, _ENDS[status])

    def _experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        try:
            return self._client.create_experiment(name)
        except MlflowException:  # it is there, perhaps since a moment ago
            found = self._client.get_experiment_by_name(name)
            if found is None:
                raise
            return found.experiment_id
