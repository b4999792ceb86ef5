"""Which runs there are in a folder and below it: run folders, and logs that are told by a name alone."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_DEEPEST = 12
_MOST_FOLDERS = 50_000
"""A folder that holds more (a home, by mistake) is listed as far as that, and an entry says so."""
_CHECKPOINT = re.compile(r"checkpoint-\d+")
_WANDB_RUN = re.compile(r"(offline-)?run-.+")
_WANDB_LOG = re.compile(r"debug(-\w+)?\.log")


@dataclass(frozen=True)
class Entry:
    """A folder that holds a run, or the runs of one log. `path` is real, and within the folder listed."""

    id: str
    """What a browser calls it by: it is looked up, and never made into a path."""
    path: Path
    shown: str
    """The path from the folder listed on."""
    format: str
    """`run` of a run folder, else the name of a format of `scalerl.ingest`; empty of a folder not read."""
    refused: str = ""
    """Why it is not read; empty where it is."""


def scan(root: Path) -> dict[str, Entry]:
    """The entries of the real folder `root` by their ids, in the order of their paths.

    Links to folders are not followed; a run with a file that is a link out of `root` is refused. A folder
    that cannot be looked into is an entry that says so, as there may be runs in it; and so is `root` where it
    holds too many.
    """
    entries = (_entry(root, *found) for found in _found(root))
    return {entry.id: entry for entry in sorted(entries, key=lambda entry: entry.shown)}


def _entry(root: Path, folder: Path, format: str, unread: str) -> Entry:
    shown = folder.relative_to(root).as_posix()
    name = hashlib.blake2b(os.fsencode(shown), digest_size=8).hexdigest()
    # No `resolve`, which a link to itself makes raise.
    links = [] if unread else _links(folder)
    link = next((link for link in links if not _real(link).is_relative_to(root)), None)
    refused = f"{link.name} is a link that leads out of the folder" if link else unread
    return Entry(name, folder, os.fsencode(shown).decode(errors="replace"), format, refused)


def _real(link: Path) -> Path:
    return Path(os.path.realpath(link))


def _links(folder: Path, below: int = 3) -> Iterator[Path]:
    """The links in a folder, and so deep below it as a reader of links looks (wandb/wandb/run-*/*.wandb).

    W&B puts a link to its own log, `debug-core.log` in the user's cache, into every run: nobody reads that.
    """
    try:
        found = list(os.scandir(folder))
    except OSError:
        return
    for one in found:
        if one.is_symlink():
            # Not `Path.is_dir`, which raises where it may not look.
            if not _WANDB_LOG.fullmatch(one.name) or os.path.isdir(one.path):  # noqa: PTH112
                yield Path(one.path)
        elif below and one.is_dir(follow_symlinks=False) and one.name != "checkpoints":
            yield from _links(Path(one.path), below - 1)


def _found(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Folders with runs, of what format, or why one cannot be read; nothing is looked for below a run."""
    waiting, count = [(root, 0)], 0
    while waiting and count < _MOST_FOLDERS:
        folder, depth = waiting.pop()
        count += 1
        try:
            with os.scandir(folder) as listed:
                found = list(listed)
        except OSError as error:
            if folder == root or not isinstance(error, FileNotFoundError):  # another one may be gone again
                yield folder, "", f"the folder cannot be read: {error.strerror or error}"
            continue
        names = {one.name for one in found}
        below = [one.name for one in found if one.is_dir(follow_symlinks=False)]
        if format := _format(folder, names, below):
            yield folder, format, ""
        elif depth < _DEEPEST:
            waiting += [(folder / name, depth + 1) for name in below if not name.startswith(".")]
    if waiting:
        yield root, "", f"only {_MOST_FOLDERS:,} folders were looked into: runs in the others are not listed"


def _format(folder: Path, names: set[str], below: list[str]) -> str:
    """What a folder is, by names alone; empty where it is none."""
    if "evals.jsonl" in names:
        return "run"
    states = [folder / name for name in below if _CHECKPOINT.fullmatch(name)]
    if "trainer_state.json" in names or any((one / "trainer_state.json").is_file() for one in states):
        return "trainer-state"
    if any("tfevents" in name for name in names):
        return "tensorboard"
    if any(name.endswith(".wandb") for name in names) or (
        folder.name == "wandb" and any(map(_WANDB_RUN.fullmatch, below))
    ):
        return "wandb"
    return ""
