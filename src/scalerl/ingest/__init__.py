"""Foreign logs in, one file per format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalerl._lazy import lazy

if TYPE_CHECKING:
    from scalerl.ingest.formats.importer import Importer
    from scalerl.ingest.formats.table import parse_table, read_table
    from scalerl.ingest.load import load_run

__all__ = ["Importer", "load_run", "parse_table", "read_table"]

lazy(
    __name__,
    {"load": "load_run", "formats.table": "parse_table read_table", "formats.importer": "Importer"},
)
