"""Runs on the servers of trackers, by name: W&B's and MLflow's, each through its own client.

May import: the formats and logs of `scalerl.ingest`. A client is loaded when a run of its tracker is read.
Imported by `cli`, `ingest`.
"""
