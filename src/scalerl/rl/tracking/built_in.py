"""The trackers that a recipe can name."""

from __future__ import annotations

from importlib.util import find_spec

from scalerl.errors import InputError
from scalerl.rl.config.settings import Tracking
from scalerl.rl.tracking.mlflow import MlflowTracker
from scalerl.rl.tracking.tensorboard import TensorboardTracker
from scalerl.rl.tracking.tracker import Tracker
from scalerl.rl.tracking.trackio import TrackioTracker
from scalerl.rl.tracking.wandb import WandbTracker

_BUILT_IN = (WandbTracker, TensorboardTracker, MlflowTracker, TrackioTracker)


def trackers_of(settings: Tracking) -> list[Tracker]:
    """Return the trackers that `settings.to` names, not open yet.

    Raises:
        InputError: the package of one is not installed.
    """
    chosen = [kind for kind in _BUILT_IN if kind.name in settings.to]
    for kind in chosen:
        if find_spec(kind.name) is None:  # the packages have the names of the trackers
            raise InputError(f"tracking.to: {kind.name} is not installed: pip install {kind.name}")
    return [kind() for kind in chosen]
