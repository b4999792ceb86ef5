"""Foreign logs in, one file per format."""

from scalerl.ingest.table import parse_table, read_table

__all__ = ["parse_table", "read_table"]
