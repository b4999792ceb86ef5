"""Readers of every kind meet what nobody would log: `benchmarks/attack.py` finds no fault."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ATTACK = Path(__file__).parents[2] / "benchmarks" / "attack.py"


def attacked(*arguments):
    """The outcomes of some inputs, and none is a fault."""
    command = [sys.executable, str(ATTACK), "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_sample_of_the_attacks_finds_no_fault():
    found = attacked("--sample", "12")
    assert len(found) == 12
    assert len({one["format"] for one in found}) > 8
    assert {one["outcome"] for one in found} >= {"read", "refused"}


@pytest.mark.slow
def test_all_attacks_find_no_fault():
    found = attacked()
    assert len(found) >= 600
    for one in found:
        print(f"{one['format']:<14} {one['name']:<24} {one['seconds']:6.2f} s {one['megabytes']:6.0f} MB")
