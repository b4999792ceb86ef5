"""A disk that is full when a run is at its end, from the command line."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from small_demo import small_demo

from scalerl.record.reader import RunRecord

SMALL = small_demo(6, 2, "task.heldout_per_length=10", "evaluation.samples=1", "checkpoint.steps=4")


@pytest.fixture
def disk(tmp_path):
    """A file system of its own, and a function that gives it another size in bytes."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(*options):
        return subprocess.run(["mount", *options, str(place)], capture_output=True).returncode

    if os.geteuid() or not shutil.which("mount") or mount("-t", "tmpfs", "-o", "size=32m", "none"):
        pytest.skip("a file system can be made by the superuser alone")
    yield place, lambda n_bytes: mount("-o", f"remount,size={n_bytes // 4096 * 4}k")
    subprocess.run(["umount", str(place)], check=True)


def train(*arguments):
    command = [sys.executable, "-m", "scalerl", "train", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_a_disk_that_is_full_at_the_end_costs_nothing_that_was_trained(small_base, disk):
    place, resize = disk
    run = place / "run"
    small = [word for one in [f"model={small_base}", *SMALL] for word in ("--set", one)]
    done = train("demo", *small, "-o", str(run), "--until", "4")
    assert done.returncode == 0, done.stderr
    room = shutil.disk_usage(place)
    assert not resize(room.used + int(0.85 * (small_base / "model.safetensors").stat().st_size))
    full = train(str(run), "--resume")
    assert full.returncode == 2, full.stderr
    said = [line for line in full.stderr.splitlines() if line.startswith("scalerl: ")]
    assert len(said) == 1
    assert "the checkpoint could not be saved (" in said[0]
    assert said[0].endswith(f"free space, and scalerl train {run} --resume goes on to its end")
    assert "Traceback" not in full.stderr
    assert full.stdout.startswith("scalerl-demo")  # the closing table
    assert RunRecord.read(run).evals[-1].step == 6
    assert (run / "report.html").is_file()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00004"]
    assert not resize(32 << 20)
    done = train(str(run), "--resume", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "finished"
    assert [row["step"] for row in RunRecord.read(run).steps()] == [1, 2, 3, 4, 5, 6]
