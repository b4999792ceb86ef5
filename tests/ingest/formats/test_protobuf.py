import contextlib

import pytest
from hypothesis import example, given, strategies as st

from scalerl.ingest.formats.protobuf import BYTES, FIXED32, FIXED64, VARINT, fields, signed


def varint(value):
    data = bytearray()
    while value >= 0x80:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])


def field(number, kind, value):
    payload = varint(value) if kind == VARINT else value
    return varint(number << 3 | kind) + (varint(len(value)) if kind == BYTES else b"") + payload


NUMBERS = st.integers(1, 2**29 - 1)
FIELDS = st.one_of(
    st.tuples(NUMBERS, st.just(VARINT), st.integers(0, 2**64 - 1)),
    st.tuples(NUMBERS, st.just(FIXED64), st.binary(min_size=8, max_size=8)),
    st.tuples(NUMBERS, st.just(FIXED32), st.binary(min_size=4, max_size=4)),
    st.tuples(NUMBERS, st.just(BYTES), st.binary(max_size=300)),
)


def plain(found):
    return [(n, kind, bytes(value) if isinstance(value, memoryview) else value) for n, kind, value in found]


@given(st.lists(FIELDS, max_size=5))
@example([(2**29 - 1, VARINT, 2**64 - 1)])
def test_reads_what_is_written(message):
    data = b"".join(field(*one) for one in message)
    assert plain(fields(data)) == message
    assert plain(fields(memoryview(data))) == message


@given(st.lists(FIELDS, min_size=1, max_size=3), st.data())
def test_a_message_cut_within_a_field_is_refused(message, data):
    parts = [field(*one) for one in message]
    end = data.draw(st.integers(1, len(parts[-1]) - 1))
    with pytest.raises(ValueError, match="cut off"):
        list(fields(b"".join(parts[:-1]) + parts[-1][:end]))


@given(st.binary(max_size=60))
def test_anything_else_is_a_value_error(data):
    with contextlib.suppress(ValueError):
        assert all(0 < number < 2**29 for number, _, _ in fields(data))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x00\x01", "number 0"),
        (b"\x0b", "wire type 3"),
        (b"\x0f", "wire type 7"),
        (b"\x08" + b"\xff" * 9 + b"\x02", "64 bits"),
        (b"\x08" + b"\x80" * 10 + b"\x00", "64 bits"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "cut off"),
        (varint(2**29 << 3) + b"\x00", "number 536870912"),
    ],
)
def test_malformed(data, message):
    with pytest.raises(ValueError, match=message):
        list(fields(data))


@given(st.integers(-(2**63), 2**63 - 1))
def test_signed(number):
    ((_, _, value),) = fields(b"\x08" + varint(number % 2**64))
    assert isinstance(value, int)
    assert signed(value) == number
