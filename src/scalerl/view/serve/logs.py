"""The runs of a log in a served folder: their ids, and the devices that the user gives."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from scalerl.ingest.formats.format import Unread
from scalerl.ingest.load import read_source
from scalerl.ingest.options import ReadOptions
from scalerl.record.devices import is_of_one_device
from scalerl.record.reader import RunRecord
from scalerl.view.serve.listing import Entry


def read_log(entry: Entry, devices: Mapping[str, float]) -> list[tuple[str, RunRecord | Unread]]:
    """Read the runs of a log, each with its id.

    `devices` has numbers of devices by glob patterns of paths in the folder: the last matching one overrides
    the log. The number of the empty pattern is for logs that do not have one.

    Raises:
        InputError: as in `read_source`.
    """
    named = [number for pattern, number in devices.items() if pattern and fnmatchcase(entry.shown, pattern)]
    options = ReadOptions(format=entry.format, devices=named[-1] if named else None)
    found = read_source(entry.path, options).all
    if not named and "" in devices and any(map(_lacks_devices, found)):
        given = read_source(entry.path, replace(options, devices=devices[""])).all
        if len(given) == len(found):  # otherwise it has grown by a run meanwhile, and will be read again
            pairs = zip(found, given, strict=True)
            found = tuple(said if _lacks_devices(one) else one for one, said in pairs)
    if len(found) == 1:
        return [(entry.id, found[0])]
    # Ids come from names, so that a run keeps its id whatever happens to the others: its position changes
    # when a run that could not be read gets its first evaluation.
    seen: Counter[str] = Counter()
    ids = []
    for one in found:
        name = one.run if isinstance(one, Unread) else str(one.config["name"])
        text = f"{seen[name]} {name}".encode(errors="replace")
        ids.append(f"{entry.id}.{hashlib.blake2b(text, digest_size=6).hexdigest()}")
        seen[name] += 1
    return list(zip(ids, found, strict=True))


def without_columns(entry: Entry, devices: Mapping[str, float], id: str, record: RunRecord) -> RunRecord:
    """Return a record that reads its log again for the logged steps, as many runs are kept in memory."""

    def steps() -> Iterator[dict[str, Any]]:
        for other, one in read_log(entry, devices):
            if other == id and isinstance(one, RunRecord):
                yield from one.steps()

    return replace(record, source_steps=steps)


def _lacks_devices(one: object) -> bool:
    return isinstance(one, RunRecord) and is_of_one_device(one, "gpu_hours")
