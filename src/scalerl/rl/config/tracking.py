"""The recipe's table `tracking`: where a run is logged besides its folder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from scalerl.errors import InputError
from scalerl.rl.tracking.mlflow import MlflowTracker
from scalerl.rl.tracking.tensorboard import TensorboardTracker
from scalerl.rl.tracking.tracker import Tracker
from scalerl.rl.tracking.trackio import TrackioTracker
from scalerl.rl.tracking.wandb import WandbTracker

_BUILT_IN = (WandbTracker, TensorboardTracker, MlflowTracker, TrackioTracker)


def _listed(value: Any) -> Any:
    """One name is a list of one: `--set tracking.to=wandb`."""
    return (value,) if isinstance(value, str) else value


@dataclass(frozen=True)
class Tracking:
    """Trackers that a run is logged to; nothing that is trained depends on them."""

    to: Annotated[
        tuple[Literal["wandb", "tensorboard", "mlflow", "trackio"], ...], BeforeValidator(_listed)
    ] = ()
    project: str = "scalerl"
    """Of W&B and trackio; MLflow calls it an experiment."""
    name: str = ""
    """Of the run; that of its folder where it is empty."""
    group: str = ""
    """Of runs that belong together; a study's name is that of its runs."""
    close_seconds: float = 30.0
    """The longest that trackers have at the end of a run for what is not logged yet."""

    def __post_init__(self) -> None:
        if not self.project:
            raise ValueError("project must not be empty")
        if not 0 <= self.close_seconds < math.inf:
            raise ValueError("close_seconds must not be negative")

    def trackers(self) -> list[Tracker]:
        """Those of `to`, not open yet.

        Raises:
            InputError: the package of one is not installed.
        """
        chosen = [kind for kind in _BUILT_IN if kind.name in self.to]
        for kind in chosen:
            if find_spec(kind.name) is None:  # the packages have the names of the trackers
                raise InputError(f"tracking.to: {kind.name} is not installed: pip install {kind.name}")
        return [kind() for kind in chosen]
