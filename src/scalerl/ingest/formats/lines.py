"""Files line by line, and folders file by file, in bounded memory: what readers of formats share.

All raise OSError where a file or folder cannot be read, or entered.
"""

import codecs
import csv
import io
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from scalerl import limits
from scalerl.errors import InputError
from scalerl.jsonl import check_not_compressed, check_not_utf16, object_of
from scalerl.record.folder import name_of_path

HEAD = 2**20
"""Bytes by which a file is recognised."""
_DEEPEST = 8
_MOST_FILES = 200_000


def first_bytes(path: Path, size: int) -> bytes:
    """Return the first bytes of a file; empty where there is no file."""
    if not path.is_file():  # a pipe, above all: what is read of it once is gone
        return b""
    with path.open("rb") as file:
        return file.read(size)


def head(path: Path, size: int = HEAD) -> bytes:
    """Return the first bytes of a text without its byte order mark; empty if it is not in UTF-8."""
    data = first_bytes(path, size)
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in data:
        return b""
    return data.removeprefix(codecs.BOM_UTF8)


def head_rows(path: Path, most: int = 20) -> list[dict[str, Any]]:
    """Return the first JSON objects of a JSONL file; empty where its first lines are something else."""
    data = head(path)
    if not data.lstrip().startswith(b"{"):
        return []
    first = [line for line in data.split(b"\n") if line.strip()][:most]
    return list(itertools.takewhile(bool, map(object_of, first)))


def lines(path: Path, is_text: bool = True) -> Iterator[tuple[int, bytes, bool]]:
    """Yield the lines of a text without their ends: number, line, and whether it had an end.

    Of a line of more than `ROW` allows only the first bytes are given, one more than that and without an end.
    What is no text, as a console into which a library prints bytes, is not refused.

    Raises:
        InputError: the file is in UTF-16, compressed, or binary.
    """
    with path.open("rb") as file:
        number, inside = 1, False
        while line := file.readline(limits.ROW.most + 1):
            ended = line.endswith(b"\n")
            if inside:  # the rest of a line that is too long
                number, inside = number + ended, not ended
                continue
            if number == 1:
                check_not_utf16(line, str(path))
                check_not_compressed(line, str(path))
                line = line.removeprefix(codecs.BOM_UTF8)
            if is_text and b"\0" in line:
                raise InputError(f"{path}, line {number}: a binary file; expected a text in UTF-8")
            yield number, line.rstrip(b"\r\n"), ended
            number, inside = number + ended, not ended


def text_lines(file: BinaryIO) -> Iterator[str]:
    """Yield the lines of a text in UTF-8, one beyond `ROW` in parts, and close the file."""
    with io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        while line := text.readline(limits.ROW.most + 1):
            yield line


def csv_rows(file: BinaryIO, source: str, **dialect: Any) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a CSV that are not blank, the header first, each with its last line's number.

    Raises:
        InputError: a row is longer than `ROW` allows, has more cells than there are columns, or is no CSV.
        UnicodeDecodeError: the text is not in UTF-8.
    """
    # By default a cell has 131,072 characters at most. The limit is of the process, and stays: another thread
    # may be reading.
    csv.field_size_limit(max(csv.field_size_limit(), limits.ROW.most))
    length = columns = 0

    def bounded() -> Iterator[str]:  # several lines are one row where quotes hold line ends
        nonlocal length
        for line in text_lines(file):
            length += len(line)
            limits.ROW.check(length, source)
            yield line

    reader = csv.reader(bounded(), **dialect)
    try:
        for cells in reader:
            length = 0
            if not "".join(cells).strip():
                continue
            columns = columns or len(cells)
            limits.TABLE_COLUMNS.check(columns, source)
            if len(cells) > columns:
                where = f"{source}, line {reader.line_num}"
                raise InputError(f"{where}: {len(cells)} cells for {columns} columns")
            yield reader.line_num, cells
    except csv.Error as error:
        raise InputError(f"{source}, line {reader.line_num}: {error}") from error


def subfolders(folder: Path) -> list[Path]:
    """Return the folders in a folder, by name, without those that are hidden or symbolic links."""
    # By way of the folder itself, as one may be allowed to list it and not to enter it.
    with os.scandir(f"{folder}/.") as entries:
        names = [
            entry.name
            for entry in entries
            if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
        ]
    return [folder / name for name in sorted(names)]


def files_in(folder: Path) -> list[Path]:
    """Return the files in a folder, by name, without symbolic links and pipes."""
    with os.scandir(f"{folder}/.") as entries:
        names = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    return [folder / name for name in sorted(names)]


def is_plain(path: Path) -> bool:
    """Whether a path is a regular file, not a symbolic link, in a folder that may be entered."""
    try:
        return path.is_file() and not path.is_symlink()
    except PermissionError:
        return False


def folders_below(folder: Path) -> Iterator[tuple[Path, Sequence[Path]]]:
    """Yield a folder and all below it, the higher ones first, each with its files.

    Symbolic links are not followed, so that it neither leaves the folder nor goes round in a circle; hidden
    folders and those that may not be read are passed over, and the search ends where it has become too large.
    """
    waiting = [folder]
    seen = 0
    for _ in range(_DEEPEST):
        deeper: list[Path] = []
        for one in waiting:
            try:
                files = files_in(one)
                deeper += subfolders(one)
            except OSError:
                if one == folder:
                    raise
                continue
            yield one, files
            seen += len(files) + 1
            if seen > _MOST_FILES:
                return
        waiting = deeper


def name_of(path: Path, below: Path | None = None) -> str:
    """Name a run after its file or folder, without the suffix of a file.

    A run in a folder `below` that holds several is named by its path from there.
    """
    if below not in (None, path):
        return path.relative_to(below).as_posix()
    return name_of_path(path.absolute())
