"""Consoles of trainers: rows of metrics among whatever else is printed.

    lines.py     a console line by line, as a person reads it; what a row is, and a form of rows
    verl.py      step:1 - actor/entropy:0.3 - val-core/...:0.4
    dicts.py     dict literals: OpenRLHF, slime, SkyRL (over several lines), the Hugging Face Trainer (TRL)
    blocks.py    lines and panels of NeMo RL, prime-rl and open-instruct
    bars.py      the steps of the Hugging Face Trainer, which are those of its progress bar
    reader.py    all of them together: the format

Every form names the source that it is from. Lines of other processes may stand between those of a row.

Imported by `ingest`, `view`.
"""

from scalerl.ingest.formats.console.reader import FORMAT

__all__ = ["FORMAT"]
