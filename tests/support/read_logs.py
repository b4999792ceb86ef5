"""Reading a source whose runs can all be read."""

from scalerl.ingest.logs.log import Log


def read_logs(format, path, wanted):
    """The runs that a format finds at a path; each of them must be readable."""
    found = format.read(path, wanted)
    logs = [one for one in found if isinstance(one, Log)]
    assert len(logs) == len(found), found
    return logs
