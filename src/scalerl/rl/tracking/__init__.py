"""Trackers of training runs: W&B, TensorBoard, MLflow, trackio, and custom ones.

    tracker.py    the protocol of a tracker
    trackers.py   the trackers that a recipe can name
    metrics.py    the names under which a run is logged
    sender.py     the side of the training loop: it sends, and never waits
    process.py    the process that logs: a queue and a thread for every tracker

A run does not depend on its trackers: their process is killed if it does not end in time. The recipe's table
`tracking` is in `scalerl.rl.config.settings`.

Imported by `rl`, `study`.
"""
