"""Weights & Biases, online or offline as its own settings say."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from uuid import uuid4

from scalerl.errors import first_line
from scalerl.rl.tracking.tracker import Status, TrackedRun

STEP = "step"
"""The step that all is drawn over: W&B's own may not go back, and counts rows."""


class WandbTracker:
    """A run of W&B; its files are in the run folder, unless WANDB_DIR says where.

    Where nobody is logged in, or the server cannot be reached as the run begins, it is offline.
    """

    name = "wandb"

    def open(self, run: TrackedRun) -> Mapping[str, str]:
        """Begin the run, or go on with that of the same id."""
        run_id = run.kept.get("id") or uuid4().hex[:8]
        self._run, offline = _init(run, run_id)
        self._run.define_metric("*", step_metric=STEP)
        if offline or self._run.offline:
            where = f"offline, wandb sync {self._run.settings.sync_dir} uploads it{offline}"
        else:
            where = self._run.url or "disabled"
        return {"id": run_id, "where": where}

    def log(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        """One row of the history."""
        self._run.log({STEP: step, **metrics})

    def close(self, status: Status) -> None:
        """Upload what is left, and end W&B's own process."""
        import wandb

        self._run.finish(exit_code=0 if status == "finished" else 1)
        wandb.teardown()


def _init(run: TrackedRun, run_id: str) -> tuple[Any, str]:
    """The run, and why it is offline where W&B was not told to be."""
    import wandb

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

    try:
        return init(), ""
    except Exception as error:
        with suppress(Exception):
            wandb.teardown()
        return init(mode="offline"), f" ({first_line(error)})"
