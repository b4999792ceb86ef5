"""Runs whose log does not give the number of devices: their GPU-hours are those of one."""

from collections.abc import Sequence

from scalerl.errors import InputError
from scalerl.record.reader import RunRecord

DEVICES_NOT_LOGGED = "the number of devices is not logged: compute is for one device (--devices N)"
"""The assumption about such a log, as its config.json states it."""
OF_ONE_DEVICE = "of one device: the log does not say how many (--devices N)"
HOURS = ("gpu_hours", "dollars")
"""The axes that count devices."""

Named = Sequence[tuple[str, RunRecord | None]]
"""Runs by name. The record of a table is None, and its hours are taken at face value."""


def is_of_one_device(run: RunRecord | None, axis: str) -> bool:
    """Return whether compute on `axis` is that of one device, as the log does not say how many there were."""
    assumed = None if run is None else run.config.get("assumed")
    return axis in HOURS and isinstance(assumed, list) and DEVICES_NOT_LOGGED in assumed


def mixed_devices(runs: Named, axis: str) -> tuple[str, ...]:
    """Return a run with the hours of one device and one with the hours of all; empty if all runs are alike,
    or the axis does not count devices."""
    of_one = [name for name, run in runs if is_of_one_device(run, axis)]
    of_all = [name for name, run in runs if not is_of_one_device(run, axis)]
    return (of_one[0], of_all[0]) if of_one and of_all else ()


def common_axes(runs: Named, axes: Sequence[Sequence[str]]) -> list[str]:
    """Return the axes that all runs have in the same unit; `axes` has those of each run."""
    common = [axis for axis in axes[0] if all(axis in own for own in axes)]
    return [axis for axis in common if not mixed_devices(runs, axis)]


def check_devices(runs: Named, axis: str) -> None:
    """Raise an InputError if hours of one device would be compared with hours of all: see `mixed_devices`."""
    if mixed := mixed_devices(runs, axis):
        raise InputError(
            f"run '{mixed[0]}' does not say on how many devices it ran: give --devices N or --x steps"
        )
