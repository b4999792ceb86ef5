"""Consoles of trainers: rows of metrics among whatever else is printed.

    lines.py     a console line by line, as a person sees it; what a row is, and a form of rows
    dicts.py     dict literals: OpenRLHF, slime, SkyRL (over several lines), the Hugging Face Trainer (TRL)
    blocks.py    lines and panels of verl, NeMo RL, prime-rl and open-instruct
    reader.py    all of them together, the format; the steps of the Hugging Face Trainer by its progress bar

Every form names its source. Lines of other processes may stand between those of a row.

Imported by `ingest`, `ingest.formats`, `view`.
"""
