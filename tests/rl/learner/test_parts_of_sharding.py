import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from scalerl.errors import InputError
from scalerl.rl.config.settings import BatchSize, LearnerSettings
from scalerl.rl.learner.batch import by_length, in_groups, of_rank, share_rows
from scalerl.rl.learner.checkpoint import check_index
from scalerl.rl.learner.score import packs
from scalerl.rl.loop.resume import resume_line
from scalerl.rl.model.causal_lm import load_model
from scalerl.rl.model.packed_attention import NAME, register


def test_rows_are_shared_by_tokens_and_every_row_is_somebodys():
    length_N = np.array([3, 50, 2, 49, 30, 31])
    shares = share_rows(length_N, 2)
    assert sorted(np.concatenate(shares)) == list(range(6))
    assert sorted(int(length_N[rows].sum()) for rows in shares) == [82, 83]
    assert [len(rows) for rows in share_rows(length_N[:1], 3)] == [1, 0, 0]


def test_all_ranks_join_as_many_passes():
    length_N = np.array([60, 9, 9, 9, 9, 9, 9])
    cut = partial(by_length, length_N, size=BatchSize(micro=2), packed=False)
    each = [of_rank(length_N, rank, 3, cut) for rank in range(3)]
    assert {len(rows) for rows in each} == {2}
    assert sorted(np.concatenate([row for rows in each for row in rows])) == list(range(7))
    assert [len(rows) for rows in each[0]] == [1, 0]


def test_passes_by_tokens_hold_no_more_than_that():
    length_N = np.array([10, 4, 5, 30, 6])
    size = BatchSize(micro_tokens=18)
    found = by_length(length_N, np.arange(5), size, packed=False)
    assert [rows.tolist() for rows in found] == [[1, 2, 4], [0], [3]]  # 3 x 6; 10; 30, which is more alone
    size = BatchSize(micro_tokens=25)
    found = by_length(length_N, np.arange(5), size, packed=True)
    assert [rows.tolist() for rows in found] == [[1, 2, 4, 0], [3]]  # 4 + 5 + 6 + 10; 30


def test_groups_stay_whole_in_passes_by_tokens_where_they_fit():
    length_N, group_N = np.array([5, 5, 6, 6, 9, 9, 9]), np.array([0, 0, 1, 1, 2, 2, 2])
    found = in_groups(length_N, group_N, BatchSize(micro_tokens=20))
    assert [rows.tolist() for rows in found] == [[0, 1], [2, 3], [4, 5], [6]]


@pytest.mark.parametrize(
    ("values", "what"),
    [({"chunk": 0}, "chunk"), ({"timeout": 0.0}, "timeout"), ({"tensor_parallel": 0}, "par")],
)
def test_settings_that_make_no_sense(values, what):
    with pytest.raises(ValueError, match=what):
        LearnerSettings(**values)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen3_moe", "mistral", "opt", "gpt2"])
def test_a_model_is_packed_only_where_that_changes_nothing(save_model, architecture):
    changes = {"sliding_window": None} if architecture == "mistral" else {}
    model: Any = load_model(save_model(architecture, **changes))
    assert packs(model, register())
    assert model.config._attn_implementation == NAME
    model.set_attn_implementation("sdpa")
    seen = model.base_model.forward
    model.base_model.forward = lambda **inputs: seen(**{**inputs, "cu_seq_lens_q": whole(inputs)})
    assert not packs(model, register())  # it reads one completion as going on from the other
    assert model.config._attn_implementation == "sdpa"  # as it was before


def whole(inputs):
    """The bounds of one sequence of all tokens."""
    return torch.tensor([0, inputs["input_ids"].numel()], dtype=torch.int32)


def test_a_model_that_cannot_be_packed_is_padded(save_model):
    """Its tokens see a window."""
    model: Any = load_model(save_model("mistral", sliding_window=8))
    assert not packs(model, register())
    assert model.config._attn_implementation == "sdpa"


def test_the_line_that_goes_on_is_that_of_whoever_started_the_run(monkeypatch):
    run = Path("runs/mine")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert resume_line(run) == "scalerl train runs/mine --resume"
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    line = "torchrun --nproc-per-node 4 -m scalerl train runs/mine --resume"
    assert resume_line(run) == line
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert resume_line(run) == line.replace("torchrun", "torchrun --nnodes 2")


class Touches:
    """A file that is made by whoever unpickles this."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return open, (str(self._path), "w")


def test_the_index_of_a_checkpoint_has_nothing_done(tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Touches(tmp_path / "touched")))
    with pytest.raises(InputError, match=r"\.metadata: .*open has no place in a checkpoint of tensors"):
        check_index(tmp_path)
    assert not (tmp_path / "touched").exists()


def test_a_checkpoint_names_tensors_alone(tmp_path):
    """What is no tensor would be unpickled by PyTorch, whatever it is."""
    index = Metadata({"version": BytesStorageMetadata()})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(InputError, match="BytesStorageMetadata has no place"):
        check_index(tmp_path)


def test_half_an_index_is_a_line(tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({}))[:-20])
    with pytest.raises(InputError, match=r"\.metadata: "):
        check_index(tmp_path)
