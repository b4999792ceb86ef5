"""What a trainer has logged, whatever the file: numbers by metric and step.

    log.py        the log of one run, built row by row within bounds
    order.py      the order of its rows: where the run was restarted, and which value of a step counts

It may import `scalerl.ingest.vocabularies`; the formats and `scalerl.ingest` import it.
"""
