"""Trackers of training runs: W&B, TensorBoard, MLflow, trackio, and those of others.

    tracker.py    what a tracker is
    metrics.py    the names under which a run is logged
    built_in.py   those that a recipe can name
    follow.py     what the training loop sees: it sends, and never waits
    process.py    the process that does the logging: a queue and a thread for every tracker
    wandb.py, tensorboard.py, mlflow.py, trackio.py

Nothing of a run depends on them: they have a process of their own, which is ended if it does not end. The
recipe's table `tracking` is in `scalerl.rl.config.settings`.
"""

from scalerl.rl.tracking.tracker import Status, TrackedRun, Tracker

__all__ = ["Status", "TrackedRun", "Tracker"]
