"""Consoles of trainers as files, and what is read from them."""

from dataclasses import replace

from hostile_logs import everything
from read_logs import read_logs

from scalerl.ingest.formats.console.reader import FORMAT


def write(folder, text, name="run.log"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def read(folder, text, name="run.log"):
    """The log of a console, all metrics kept."""
    path = write(folder, text, name)
    assert FORMAT.recognises(path)
    (log,) = read_logs(FORMAT, path, everything)
    return log


def values(log, name):
    """The values of a metric by step."""
    series = log.metrics[name]
    return dict(zip(series.step_N.tolist(), series.value_N.tolist(), strict=True))


def rates(steps, parts):
    """The evaluations of a run that are in the parts of its console."""
    evaluated = {part.evaluated for part in parts}
    return {one.step: one.held_out for one in steps if one.held_out is not None and one.step in evaluated}


def without_validation(steps):
    return [replace(one, held_out=None) for one in steps if one.reward is not None]
