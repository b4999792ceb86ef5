"""Damaged files for the readers of logs: what each must take, or refuse in one line."""

import itertools
import math
import signal
from contextlib import contextmanager

from hypothesis import strategies as st

from scalerl import InputError


def damaged(data):
    """The bytes of a sound file cut, with bytes changed or put in; or something else altogether."""
    at = st.integers(0, len(data))
    edit = st.tuples(at, st.integers(0, 3), st.binary(max_size=8))
    return st.one_of(
        at.map(lambda end: data[:end]),
        st.lists(edit, min_size=1, max_size=6).map(lambda edits: _edited(data, edits)),
        st.binary(max_size=200),
        st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")),
    )


def _edited(data, edits):
    edited = bytearray(data)
    for at, dropped, new in edits:
        edited[at : at + dropped] = new
    return bytes(edited)


def read_hostile(format, path):
    """The logs of a file that may be damaged, None where it is refused as it is to be; and they are sound."""
    assert format.recognises(path) in (True, False)
    logs, refusal = None, None
    try:
        logs = format.read(path, everything)
    except InputError as error:
        refusal = str(error)
    except OSError:
        return None
    if logs is None:
        assert refusal
        assert "\n" not in refusal
        assert str(path.parent) in refusal
        return None
    for log in logs:
        assert isinstance(log.name, str)
        assert log.metrics.keys() <= set(log.names)
        for series in log.metrics.values():
            steps, values = series.step_N.tolist(), series.value_N.tolist()
            assert len(steps) == len(values) == len(series.time_N) > 0
            assert all(a < b for a, b in itertools.pairwise(steps))
            assert all(map(math.isfinite, steps + values))
    return logs


@contextmanager
def alarm(seconds):
    """Ends what takes longer as an error; of tests that may wait for ever, not of how fast anything is."""

    def ring(signum, frame):
        raise AssertionError(f"still at it after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def everything(name):
    return True
