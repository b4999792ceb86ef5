"""What a `.wandb` file is made of: a log in blocks, as LevelDB's.

file    7 bytes (":W&B", a magic number, a version), then blocks; the first holds these bytes too
block   32 KiB: chunks, and fewer than 7 bytes of padding
chunk   CRC-32 of kind and data (4 bytes), length (2), kind (1: a whole record, its first, a middle, its
        last part), data
record  one message: fields of a number and a value each
"""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scalerl import limits
from scalerl.errors import InputError, brief, counted

MAGIC = b":W&B\xe1\xbe\x00"
_BLOCK = 32 * 1024
_CHUNK = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_SEEDS = {kind: zlib.crc32(bytes([kind])) for kind in (_FULL, _FIRST, _MIDDLE, _LAST)}


@dataclass
class Trouble:
    """Counts of what was wrong with a file that could be read all the same."""

    large: int = 0
    """Records with more bytes than `ROW` allows."""
    damaged: int = 0
    """Places with a wrong checksum, or whose record is not what it should be."""
    torn: bool = False
    """Whether the file ends within a record."""

    def notes(self, name: str) -> Iterator[str]:
        """Yield the counts as sentences."""
        if self.damaged:
            places = "1 damaged place was" if self.damaged == 1 else f"{self.damaged} damaged places were"
            yield f"{name}: {places} passed over; rows are missing there"
        if self.large:
            yield f"{name}: {counted(self.large, 'row')} of more than {limits.ROW.most:,} bytes left out"
        if self.torn:
            yield f"{name} ends within a record (the run was killed, or still writes): read up to there"


def records(path: Path, trouble: Trouble) -> Iterator[bytes]:
    """Yield the records of a file whose checksums hold; what is wrong is counted in `trouble`."""
    parts: list[bytes] = []
    size = 0
    for kind, data in _chunks(path, trouble):
        if parts and kind in (_FULL, _FIRST):  # its end never came
            trouble.damaged += 1
            parts.clear()
        if kind == _FULL:
            yield data
        elif kind == _FIRST or (parts and kind in (_MIDDLE, _LAST)):
            size = len(data) + (size if parts else 0)
            if size <= limits.ROW.most:
                parts.append(data)
            if kind == _LAST and size <= limits.ROW.most:
                yield b"".join(parts)
            elif kind == _LAST:
                trouble.large += 1
            if kind == _LAST:
                parts.clear()
        else:
            parts.clear()
    trouble.torn |= bool(parts)


def _chunks(path: Path, trouble: Trouble) -> Iterator[tuple[int, bytes]]:
    """Yield kind and data of every chunk; kind 0 where some may be missing."""
    with path.open("rb") as file:
        _check_header(file.read(len(MAGIC)), path)
        # Blocks are counted from the start of the file, its 7 bytes included.
        file.seek(0)
        start, is_last = len(MAGIC), False
        while not is_last:
            block = file.read(_BLOCK)
            is_last = len(block) < _BLOCK
            yield from _of_block(block, start, trouble)
            start = 0


def _of_block(block: bytes, start: int, trouble: Trouble) -> Iterator[tuple[int, bytes]]:
    """Yield the chunks of one block. A bad one's length is used all the same: the next checksum tells."""
    is_good, is_last, unpack, crc32 = True, len(block) < _BLOCK, _CHUNK.unpack_from, zlib.crc32
    while start + _CHUNK.size <= len(block):
        crc, size, kind = unpack(block, start)
        start += _CHUNK.size
        data = block[start : start + size]
        start += size
        if kind in _SEEDS and crc32(data, _SEEDS[kind]) == crc and len(data) == size:
            is_good = True
            yield kind, data
            continue
        if is_last and start > len(block):
            trouble.torn = True
        else:
            # A run of bad chunks is one damaged place, however many chunks a wrong length makes of it.
            trouble.damaged += is_good
        is_good = False
        # What follows may end a record whose start was lost: `records` must not join across the gap.
        yield 0, b""
    trouble.torn |= is_last and start < len(block)


def _check_header(head: bytes, path: Path) -> None:
    """Raise an InputError unless a file starts as those of W&B do."""
    expected = "expected a run-ID.wandb as W&B writes it"
    if not head:
        raise InputError(f"{path}: the file is empty (nothing was logged, or not yet); {expected}")
    if len(head) < len(MAGIC) and MAGIC.startswith(head):
        raise InputError(f"{path}: the file ends after {len(head)} bytes; {expected}")
    if head[:4] != MAGIC[:4]:
        raise InputError(f"{path}: not a file of W&B, it begins with {brief(head)}; {expected}")
    if head != MAGIC:
        raise InputError(f"{path}: of a version that is not known ({brief(head[4:])}); {expected}")
