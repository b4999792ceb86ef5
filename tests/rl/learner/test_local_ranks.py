"""Trainers on one machine that the command starts by itself."""

import json
import os
import subprocess
import sys

import pytest
import torch
from record_checker import check
from small_demo import small_demo

from scalerl.errors import InputError
from scalerl.rl.learner.launch import lead_or_follow

SMALL = small_demo(
    4,
    1,
    *("task.heldout_per_length=10", "evaluation.samples=1", "batch.micro=8", "optimiser.lr=1e-4"),
)


@pytest.mark.slow
def test_two_trainers_beside_a_generator_need_no_launcher(small_base, tmp_path):
    settings = [word for one in (f"model={small_base}", *SMALL) for word in ("--set", one)]
    how = ["--generators", "1", "--trainers", "2", "-o", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-m", "scalerl", "train", "demo", *settings, *how],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    devices = json.loads((tmp_path / "run" / "config.json").read_text())["devices"]
    assert devices["held"] == {"generate": 1, "train": 2, "evaluate": 1}
    assert check(tmp_path / "run") == []


def test_more_ranks_than_gpus_are_refused_on_every_rank_before_they_wait_for_each_other(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for rank in ("0", "2"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
        with pytest.raises(InputError, match="3 processes need a GPU each here, and PyTorch sees 2"):
            lead_or_follow(60.0, lambda make: None)
