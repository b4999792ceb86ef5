"""What a trainer has logged, whatever the file: numbers by metric and step.

    log.py        the log of one run, built row by row within bounds
    order.py      the order of its rows: where the run was restarted, and which value of a step counts

Imported by `ingest`, `ingest.formats`, `ingest.formats.console`, `ingest.trackers`, `integrations`.
"""
