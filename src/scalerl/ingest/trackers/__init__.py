"""Runs on the servers of trackers, by name: W&B's and MLflow's, each read through its own client.

May import: the formats and logs of `scalerl.ingest`. A client is loaded only to read a run of its tracker.
Imported by `cli`, `ingest`.
"""
