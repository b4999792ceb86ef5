"""Foreign logs in, one file per format."""

from scalerl.ingest.table import read_table

__all__ = ["read_table"]
