"""Trackers of training runs: W&B, TensorBoard, MLflow, trackio, and those of others.

    settings.py   the recipe's table `tracking`
    tracker.py    what a tracker is
    metrics.py    the names under which a run is logged
    follow.py     what the training loop sees: it sends, and never waits
    process.py    the process that does the logging: a queue and a thread for every tracker
    wandb.py, tensorboard.py, mlflow.py, trackio.py

Nothing of a run depends on them: they have a process of their own, which is ended if it does not end.
"""

from scalerl.rl.tracking.tracker import Status, TrackedRun, Tracker

__all__ = ["Status", "TrackedRun", "Tracker"]
