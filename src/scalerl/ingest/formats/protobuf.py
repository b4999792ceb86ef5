"""The wire format of protocol buffers: the fields of a message, without its schema."""

from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""The wire types."""
_WIDTH = {FIXED64: 8, FIXED32: 4}


def fields(data: bytes | memoryview) -> Iterator[tuple[int, int, int | memoryview]]:
    """Yield the fields of a message in their order: number, wire type, and value.

    The value of a varint is the unsigned number. For the other types it is the bytes as they are, not copied:
    8 or 4 little-endian ones of a number of fixed width; otherwise a text, a message or a packed array.

    Raises:
        ValueError: a malformed message: a field is cut off, a varint has more than 64 bits, or a field
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
            if at < end and view[at] < 0x80:  # most lengths are, and a call costs more than all else
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


def parts(data: bytes | memoryview, number: int) -> Iterator[memoryview]:
    """Yield all values of one field that have a length or a fixed width; raises as `fields`."""
    return (value for at, _, value in fields(data) if at == number and not isinstance(value, int))


def part(data: bytes | memoryview, number: int) -> memoryview:
    """Return the last of `parts`, the one that counts if a field repeats; empty if it is missing."""
    found = memoryview(b"")
    for value in parts(data, number):  # no list of them: a message may have millions
        found = value
    return found


def integer(data: bytes | memoryview, number: int) -> int:
    """Return the last value of a varint field; 0 where it is missing, the default of protocol buffers."""
    found = 0
    for at, _, value in fields(data):
        if at == number and isinstance(value, int):
            found = value
    return found


def signed(value: int) -> int:
    """Convert a varint to an int32 or int64; a negative number has all 64 bits."""
    return value - (1 << 64) if value >> 63 else value


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    """Decode a number of 7 bits a byte, the lowest first; return it and the place where it ends."""
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
