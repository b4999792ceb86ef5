"""The wire format of protocol buffers: the fields of a message, without its schema."""

from __future__ import annotations

from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""The wire types."""
_WIDTH = {FIXED64: 8, FIXED32: 4}


def fields(data: bytes | memoryview) -> Iterator[tuple[int, int, int | memoryview]]:
    """The fields of a message in their order: number, wire type, and value.

    The value of a varint is the unsigned number. Of the other types it is the bytes as they are, not copied:
    8 or 4, little-endian, of a number of fixed width; a text, a message or a packed array otherwise.

    Raises:
        ValueError: the bytes are no message: a field is cut off, a varint has more than 64 bits, or a field
            has number 0 or a type that is not one of these (groups, which no current schema has).
    """
    view = memoryview(data)
    end = len(view)
    at = 0
    while at < end:
        tag = view[at]
        at += 1
        if tag >= 0x80:
            tag, at = _varint(view, at - 1)
        number, kind = tag >> 3, tag & 7
        if not 0 < number < 1 << 29:
            raise ValueError(f"a field has the number {number}")
        if kind == VARINT:
            value, at = _varint(view, at)
            yield number, kind, value
            continue
        if kind == BYTES:
            if at < end and view[at] < 0x80:  # most lengths are, and a call costs more than all else here
                length, at = view[at], at + 1
            else:
                length, at = _varint(view, at)
        elif kind in _WIDTH:
            length = _WIDTH[kind]
        else:
            raise ValueError(f"field {number} is of wire type {kind}")
        if length > end - at:
            raise ValueError(f"field {number} is cut off")
        yield number, kind, view[at : at + length]
        at += length


def varints(data: memoryview) -> Iterator[int]:
    """The numbers of a packed array of varints.

    Raises:
        ValueError: the last one is cut off, or one has more than 64 bits.
    """
    at = 0
    while at < len(data):
        value, at = _varint(data, at)
        yield value


def signed(value: int) -> int:
    """A varint as an int32 or int64, whose negative numbers have all 64 bits."""
    return value - (1 << 64) if value >> 63 else value


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    """A number of 7 bits a byte, the lowest first, and where it ends."""
    value = shift = 0
    for place in range(at, min(at + 10, len(view))):
        byte = view[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 64:
                break
            return value, place + 1
        shift += 7
    raise ValueError("a number is cut off, or has more than 64 bits")
