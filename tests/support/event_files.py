"""Records of TensorBoard's event files."""

import struct

from scalerl.ingest.formats.tensorboard import _masked_crc


def record(data):
    length = struct.pack("<Q", len(data))
    crc = [struct.pack("<I", _masked_crc(part)) for part in (length, data)]
    return length + crc[0] + data + crc[1]


def delimited(number, data):
    assert len(data) < 128
    return bytes([number << 3 | 2, len(data)]) + data


def event(tag, step, value, time=1e9, plugin=None):
    """One scalar: `value` is a float of the old form, or the bytes of a tensor."""
    body = delimited(1, tag.encode())
    body += b"\x15" + struct.pack("<f", value) if isinstance(value, float) else delimited(8, value)
    if plugin is not None:
        body += delimited(9, delimited(1, delimited(1, plugin.encode())))
    head = b"\x09" + struct.pack("<d", time) + b"\x10" + bytes([step])
    return record(head + delimited(5, delimited(1, body)))


START = record(b"\x09" + struct.pack("<d", 1e9) + delimited(3, b"brain.Event:2"))
