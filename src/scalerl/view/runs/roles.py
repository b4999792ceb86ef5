"""The work over time: the fates of groups, sampling across weight updates, and how busy the roles were."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scalerl.errors import counted
from scalerl.numbers import as_float, as_mapping, duration, percent, plain
from scalerl.view.facts.facts import Rows
from scalerl.view.runs.panels import Panel, Steps, field

FATES = (
    ("trained", "trained"),
    ("zero_variance", "left out: the rewards were all the same"),
    ("truncated", "left out: truncation left fewer than two completions"),
    ("failed", "left out: verification failed"),
    ("in_flight", "in flight at the end"),
)
"""The fates of groups, and their names on the page."""
_ROLES = (("generate", "generators"), ("train", "trainer"))


def ledger_rows(steps: Steps, lost: Sequence[Mapping[str, Any]] = ()) -> Rows:
    """Return the fates of all admitted groups; empty if the steps have no ledger.

    `lost` are the lines of lost.jsonl, which have the costs that a resumed run had lost.
    """
    last = as_mapping(steps[-1].get("ledger")) if steps else {}
    if not last:
        return []
    rows = [("groups admitted", plain(as_float(last.get("admitted"))))]
    rows += [(label, plain(as_float(last[name]))) for name, label in FATES if last.get(name)]
    wrong = [row for row in steps if not balances(as_mapping(row.get("ledger")))]
    sums = f"DO NOT BALANCE at {counted(len(wrong), 'step')}" if wrong else "balance at every step"
    rows.append(("the sums", sums))
    if restarted := as_float(steps[-1].get("restarted")):
        rows.append(("begun again, as a process had died", plain(restarted)))
    if lost:
        again = int(np.nansum(field(lost, "lost.steps")))
        rows.append(("resumed", f"{counted(len(lost), 'time')}, running {counted(again, 'step')} again"))
    return rows


def balances(ledger: Mapping[str, Any]) -> bool:
    """Whether every admitted group has exactly one fate."""
    return as_float(ledger.get("admitted")) == sum(as_float(ledger.get(name, 0)) for name, _ in FATES)


def in_flight_rows(steps: Steps, recipe: Any = None) -> Rows:
    """Return rows about sampling across updates from the lines of steps.jsonl; empty without such figures.

    Shares are means over all steps and over the last tenth of them. The largest staleness is given with the
    one that the schedule of `recipe` allows.
    """
    shares = (
        ("completions sampled by two or more versions of the weights", "multi_version"),
        ("trained tokens with a staleness over 4 steps", "staleness_share_over_4"),
    )
    rows = []
    for label, key in shares:
        known_N = _known(steps, key)
        if known_N.size:
            late = known_N[-max(known_N.size // 10, 1) :].mean()
            rows.append((label, f"{percent(known_N.mean())}; in the last tenth of the run {percent(late)}"))
    staleness_N, cache_N = _known(steps, "staleness_max"), _known(steps, "kv_staleness_max")
    if staleness_N.size:
        schedule = as_mapping(as_mapping(recipe).get("schedule"))
        k = schedule.get("k")
        name = "k - 1" if schedule.get("kind") == "off_policy" else "k"
        bound = f"; the schedule allows {name} = {plain(k - (name != 'k'))}" if k is not None else ""
        rows.append(("largest staleness of a trained token", f"{plain(staleness_N.max())} steps{bound}"))
    if cache_N.size:
        rows.append(("largest staleness of an entry of a KV cache", f"{plain(cache_N.max())} steps"))
    return rows


def _known(steps: Steps, key: str) -> np.ndarray:
    values_N = field(steps, key)
    return values_N[np.isfinite(values_N)]


def role_rows(steps: Steps, apart: bool = True) -> Rows:
    """Return how long each role worked and waited, over all its processes, and its speed while working.

    `apart` says whether generators have devices of their own.
    """
    if not steps or not as_mapping(steps[-1].get("idle_seconds")):
        return []
    rows = []
    for (role, name), made in zip(_ROLES, ("generated", "trained"), strict=True):
        busy, idle, total = (float(seconds_N[0]) for seconds_N in _seconds(steps[-1:], role, apart))
        speed = float(field(steps[-1:], f"tokens.{made}")[0]) / busy if busy > 0 else 0.0
        share = idle / total if total > 0 else 0.0
        text = f"busy {duration(busy)}, idle {duration(idle)} ({percent(share)})"
        if (other := total - busy - idle) > 0.5:
            text += f", verifying and recording {duration(other)}"
        rows.append((name, f"{text}; {speed / 1000:.1f}k tokens a second of work"))
    sent_N = field(steps, "weight_sync.bytes") > 0
    if not sent_N.any():
        return rows
    bytes_N, seconds_N, updated_N = (
        field(steps, f"weight_sync.{key}")[sent_N] for key in ("bytes", "seconds", "update_seconds")
    )
    text = f"{plain(bytes_N[-1] / 1e6)} MB a version, sent in {plain(seconds_N.mean())} s"
    if np.isfinite(updated_N).any():
        text += f", at every generator after {plain(np.nanmean(updated_N))} s"
    return [*rows, ("weights", f"{text} on average; {duration(seconds_N.sum())} of the trainer's time")]


def role_panels(apart: bool = True) -> tuple[Panel, Panel]:
    """Return the panels of how busy each role was, and of the groups in flight."""
    roles = {name: functools.partial(_busy, role=role, apart=apart) for role, name in _ROLES}
    places = ("generating", "generated", "verified")
    queues = {place: f"queue.{place}" for place in places}
    return (
        Panel("Busy", "% of the time of each role", roles, scale=100),
        Panel("Groups in flight", "by where they are", queues, largest=places),
    )


def _busy(steps: Steps, role: str, apart: bool) -> np.ndarray:
    """Return the share of its time that a role was busy in each step, shape (n,); the first is NaN."""
    busy_N, _, total_N = _seconds(steps, role, apart)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.diff(busy_N, prepend=math.nan) / np.diff(total_N, prepend=math.nan)


def _seconds(steps: Steps, role: str, apart: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return busy, idle and total seconds of a role's processes up to each step, each of shape (n,).

    The total of trainers is the time for which all devices were held, minus that of generators that are
    `apart` and of devices that neither has; a resume may change their number, so wall time does not give it.
    """
    busy_N, idle_N = field(steps, f"device_seconds.{role}"), field(steps, f"idle_seconds.{role}")
    if role != "train":
        return busy_N, idle_N, busy_N + idle_N
    generate_N = field(steps, "device_seconds.generate")
    others_N = np.nan_to_num(field(steps, "idle_seconds.apart"))  # older runs did not count these
    held_N = generate_N + busy_N + field(steps, "device_seconds.idle") - others_N
    generators_N = generate_N + field(steps, "idle_seconds.generate")
    return busy_N, idle_N, held_N - generators_N if apart else held_N
