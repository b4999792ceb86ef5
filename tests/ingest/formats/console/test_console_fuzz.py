"""Damaged consoles of every trainer: each is refused in one line, or its sound rows keep their values."""

import random
from functools import cache

import console_logs
import pytest
from console_logs import CONSOLES, NOISE, by_ray, plain, run
from hostile_logs import alarm, everything

from scalerl import InputError
from scalerl.ingest.formats.console.reader import FORMAT
from scalerl.ingest.logs.log import Log
from scalerl.ingest.logs.order import REASONS
from scalerl.record.left_out import REPEATED, SUPERSEDED

STEPS = run(9)
TEXTS = [
    b"\0",
    b"\r",
    b"\n",
    b"\x1b[31m",
    b"{",
    b"}",
    b"'",
    b'"',
    b" - ",
    b": ",
    b"(x pid=1) ",
    b"\xff\xfe",
    b"nan",
]
NAMES = [*CONSOLES, "trl"]


@cache
def parts_of(name):
    """The parts of a console, and the metric of its evaluations."""
    if name == "trl":
        pytest.importorskip("transformers")
        return tuple(console_logs.trl(STEPS)), "eval_reward"
    write, _, metric = CONSOLES[name]
    return tuple(write(STEPS)), metric


def damage(text, draw):
    """A text with bytes changed, put in or lost, lines lost, doubled or exchanged."""
    data = bytearray(text)
    for _ in range(draw.randint(1, 4)):
        at = draw.randint(0, len(data))
        kind = draw.randrange(6)
        if kind < 2:
            data[at : at + draw.randint(0, 3)] = draw.choice(TEXTS)
        elif kind == 2:
            data[at : at + draw.randint(1, 200)] = b""
        elif kind == 3:
            data[at : at + 1] = bytes([draw.choice([c for c in range(256) if not 48 <= c < 58])])
        else:
            lines = bytes(data).splitlines(keepends=True)
            draw.shuffle(lines) if kind == 4 else lines.append(draw.choice(lines or [b"\n"]))
            data = bytearray(b"".join(lines))
    return bytes(data)


def mutated(name, draw):
    """A console of which some parts are damaged, and the evaluations of the others."""
    parts, metric = parts_of(name)
    hurt = set(draw.sample(range(len(parts)), draw.choice([1, 1, 2, 3])))
    out = []
    for n, part in enumerate(parts):
        whole = (by_ray if name != "trl" and draw.random() < 0.2 else plain)([part]).encode()
        text = damage(whole, draw) if n in hurt else whole
        if n in hurt and not text.endswith(b"\n"):
            text += b"\n"
        out.append(text)
        if draw.random() < 0.1:
            out.append(draw.choice(NOISE).encode())
    sound = {part.evaluated for n, part in enumerate(parts) if n not in hurt} - {None}
    kept = {one.step: one.held_out for one in STEPS if one.step in sound}
    return b"".join(out), metric, kept


def check(path, metric, kept):
    """Whether a console is refused in one line, or has all evaluations that are not damaged."""
    assert FORMAT.recognises(path) in (True, False)
    log, refusal = None, ""
    try:
        (log,) = FORMAT.read(path, everything)
    except InputError as error:
        refusal = str(error)
    if log is None:
        assert refusal.startswith(str(path))
        assert "\n" not in refusal
        return False
    assert isinstance(log, Log)
    series = log.metrics.get(metric)
    found = dict(zip(series.step_N.tolist(), series.value_N.tolist(), strict=True)) if series else {}
    gone = log.omitted.get(metric)
    told = set()
    if gone is not None:  # a damaged row took the step of another, and that is said
        reasons = [REASONS[code] for code in gone.reason_V]
        told = {
            s for s, why in zip(gone.step_V.tolist(), reasons, strict=True) if why in (REPEATED, SUPERSEDED)
        }
    for step, rate in kept.items():
        assert found.get(step) == rate or step in told, (step, rate, found)
    return True


def fuzz(tmp_path, name, first, count):
    """Read `count` mutations of a console; the number of those read."""
    read = 0
    path = tmp_path / "run.log"
    for seed in range(first, first + count):
        data, metric, kept = mutated(name, random.Random(f"{name} {seed}"))
        path.write_bytes(data)
        try:
            read += check(path, metric, kept)
        except AssertionError as error:
            raise AssertionError(f"{name}, seed {seed}: {error}") from error
    return read


@pytest.mark.parametrize("name", NAMES)
def test_a_hundred_damaged_consoles(tmp_path, name):
    with alarm(60):
        assert fuzz(tmp_path, name, 0, 100) > 50


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_thousand_damaged_consoles(tmp_path, name):
    with alarm(300):
        read = fuzz(tmp_path, name, 100, 1000)
    print(f"{name}: {read} read")
    assert read > 500
