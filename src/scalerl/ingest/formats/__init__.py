"""The formats that trainers and trackers write, one or a few in a file, and what their readers share.

    recognise.py  all formats, and which one a file has; format.py what a reader provides (`Format`)
    importer.py   `Importer`, a custom reader: `--format file.py:Class`
    table.py      tables of compute and pass rates, which are no logs
    lines.py, rows.py, protobuf.py     files line by line, rows of metrics, protocol buffers

It may import `scalerl.ingest.logs`. Imported by `cli`, `ingest`, `ingest.trackers`, `integrations`, `view`.
"""
