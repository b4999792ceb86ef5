"""Logs of other trainers, read as runs.

    load.py       the runs at a path: recognised, read, each with its points (`load_run`, `read_all`)
    formats/      formats of trainers and trackers; importer.py reads custom formats (docs/extend/importer.md)
    logs/         numbers by metric and step; restarts and the order of rows
    vocabularies  what the metrics of a trainer are called: a table for each in vocabularies.toml
    imported.py   a log as a run, with the metric that is its pass rate; counters.py, flops.py its compute

It may import `scalerl.curve` and `scalerl.record`. Imported by `cli`, `integrations`, `view`.
"""

from typing import TYPE_CHECKING

from scalerl._lazy import lazy

if TYPE_CHECKING:
    from scalerl.ingest.formats.importer import Importer as Importer
    from scalerl.ingest.formats.table import parse_table as parse_table, read_table as read_table
    from scalerl.ingest.load import load_run as load_run


lazy(__name__)
