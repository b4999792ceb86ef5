"""The formats that trainers and trackers write, one file each, and what their readers share.

    format.py     what a reader provides (`Format`), and the list of all formats
    lines.py, rows.py, protobuf.py     files line by line, rows of metrics, protocol buffers

It may import `scalerl.ingest.logs`; `scalerl.ingest` and `scalerl.integrations` import it.
"""
