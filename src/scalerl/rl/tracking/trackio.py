"""trackio: a local database, or the Space or server that its own settings name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from uuid import uuid4

from scalerl.rl.tracking.tracker import Status, TrackedRun


class TrackioTracker:
    """A run of trackio. It goes on by its name, which has a few letters more than the run's for that."""

    name = "trackio"

    def open(self, run: TrackedRun) -> Mapping[str, str]:
        """Begin the run, or go on with the one of the same name."""
        trackio = import_module("trackio")  # which is not among what tests install

        name = run.kept.get("name") or f"{run.name}-{uuid4().hex[:6]}"
        self._run = trackio.init(
            run.project,
            name,
            group=run.group or None,
            config=dict(run.config),
            resume="allow" if run.kept else "never",
            embed=False,
        )
        return {"name": name, "where": f"project {run.project}, run {name}"}

    def log(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        """One row."""
        self._run.log(dict(metrics), step=step)

    def close(self, status: Status) -> None:
        """Write what is left."""
        self._run.finish()
