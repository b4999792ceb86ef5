"""Read files line by line, and folders file by file, in bounded memory; shared by readers of formats.

All functions raise OSError if a file or folder cannot be read or entered.
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
"""Bytes that are read to recognise a file."""
_DEEPEST = 8
_MOST_FILES = 200_000


def first_bytes(path: Path, size: int) -> bytes:
    """Return the first bytes of a file; empty if it is not a file."""
    if not path.is_file():  # above all a pipe, from which every byte can be read only once
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

    Of a line longer than `ROW` allows only the first bytes are given, one more than allowed and without an
    end. Without `is_text`, binary lines are accepted, as a library may print bytes to a console.

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
    """Yield the lines of a UTF-8 text, one beyond `ROW` in parts, and close the file."""
    with io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        while line := text.readline(limits.ROW.most + 1):
            yield line


def csv_rows(file: BinaryIO, source: str, **dialect: Any) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a CSV that are not blank, the header first, each with the number of its last line.

    Raises:
        InputError: a row is longer than `ROW` allows, has more cells than there are columns, or is not CSV.
        UnicodeDecodeError: the text is not in UTF-8.
    """
    # By default a cell has at most 131,072 characters. The limit is that of the process, and is not reset, as
    # another thread may be reading.
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
    """Return the subfolders of a folder, by name, without hidden ones and symbolic links."""
    # `/.` raises for a folder that may be listed but not entered.
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
    """Return whether a path is a regular file, not a symbolic link, in a folder that may be entered."""
    try:
        return path.is_file() and not path.is_symlink()
    except PermissionError:
        return False


def folders_below(folder: Path) -> Iterator[tuple[Path, Sequence[Path]]]:
    """Yield a folder and all folders below it, the higher ones first, each with its files.

    Symbolic links are not followed, so that the search neither leaves the folder nor goes round in a circle.
    Hidden and unreadable folders are skipped, and the search ends where it has become too large.
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

    A run inside a folder `below`, which holds several, is named by its path from there.
    """
    if below not in (None, path):
        return path.relative_to(below).as_posix()
    return name_of_path(path.absolute())
