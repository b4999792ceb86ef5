import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.nn.functional import linear

from scalerl.errors import InputError
from scalerl.rl.config.cluster import Fsdp2
from scalerl.rl.learner.fsdp.checkpoint import check_index
from scalerl.rl.learner.fsdp.learner import passes, passes_of_rank, share_rows
from scalerl.rl.learner.fsdp.score import can_pack, chunked_log_probs
from scalerl.rl.learner.learner import load_learner
from scalerl.rl.loop.resume import resume_line
from scalerl.rl.model.causal_lm import load_model


@pytest.mark.parametrize("chunk", [1, 5, 7, 100])
@pytest.mark.parametrize("biased", [False, True])
def test_chunked_log_probs_and_their_gradients_are_those_of_the_whole_softmax(chunk, biased):
    torch.manual_seed(0)
    hidden_WD, weight_VD = torch.randn(14, 6, dtype=torch.float32), torch.randn(30, 6)
    bias_V = torch.randn(30) if biased else None
    target_W, grad_W = torch.randint(30, (14,)), torch.randn(14)
    inputs = [t.requires_grad_() for t in (hidden_WD, weight_VD, bias_V) if t is not None]
    logp_WV = torch.log_softmax(linear(hidden_WD, weight_VD, bias_V) / 0.7, -1)
    expected_W = logp_WV.gather(-1, target_W[:, None])[:, 0]
    expected = torch.autograd.grad(expected_W, inputs, grad_W)
    logp_W, entropy_W = chunked_log_probs(hidden_WD, weight_VD, bias_V, target_W, 0.7, chunk)
    assert logp_W._base is entropy_W._base is None  # no views, of which FSDP2 would warn
    torch.testing.assert_close(logp_W, expected_W)
    torch.testing.assert_close(entropy_W, -(logp_WV.exp() * logp_WV).sum(-1))
    for found, other in zip(torch.autograd.grad(logp_W, inputs, grad_W), expected, strict=True):
        torch.testing.assert_close(found, other)


def test_what_a_chunk_adds_is_not_lost_in_bfloat16():
    """1000 chunks that add 1/1000 each to a gradient of about 1, which bfloat16 would round away."""
    hidden_WD = torch.ones(1000, 1, dtype=torch.bfloat16)
    weight_VD = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    logp_W, _ = chunked_log_probs(hidden_WD, weight_VD, None, torch.zeros(1000, dtype=torch.long), 1.0, 1)
    logp_W.sum().backward()
    assert weight_VD.grad.flatten().tolist() == [500, -500]  # half of each token


def test_rows_are_shared_by_tokens_and_every_row_is_somebodys():
    length_N = np.array([3, 50, 2, 49, 30, 31])
    shares = share_rows(length_N, 2)
    assert sorted(np.concatenate(shares)) == list(range(6))
    assert sorted(int(length_N[rows].sum()) for rows in shares) == [82, 83]
    assert [len(rows) for rows in share_rows(length_N[:1], 3)] == [1, 0, 0]


def test_all_ranks_join_as_many_passes():
    length_N = np.array([60, 9, 9, 9, 9, 9, 9])
    each = [passes_of_rank(length_N, rank, 3, 2, 0) for rank in range(3)]
    assert {len(rows) for rows in each} == {2}
    assert sorted(np.concatenate([row for rows in each for row in rows])) == list(range(7))
    assert [len(rows) for rows in each[0]] == [1, 0]


def test_passes_by_tokens_hold_no_more_than_that_with_padding():
    length_N = np.array([10, 4, 5, 30, 6])
    found = passes(length_N, np.arange(5), 99, 18)
    assert [rows.tolist() for rows in found] == [[1, 2, 4], [0], [3]]  # 3 x 6; 10; 30, which is more alone


@pytest.mark.parametrize(
    ("values", "what"),
    [({"chunk": 0}, "chunk"), ({"timeout": 0.0}, "timeout"), ({"micro_tokens": -1}, "micro_tokens")],
)
def test_settings_that_make_no_sense(values, what):
    with pytest.raises(ValueError, match=what):
        Fsdp2(**values)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gpt_neox", "qwen3_moe"])
def test_a_model_is_packed_only_where_that_changes_nothing(save_model, architecture):
    model: Any = load_model(save_model(architecture))
    assert can_pack(model)
    seen = model.base_model.forward
    model.base_model.forward = lambda **inputs: seen(**{**inputs, "position_ids": None})
    assert not can_pack(model)  # it reads one completion as going on from the other


def test_a_model_that_counts_its_positions_itself_is_padded(save_model):
    assert not can_pack(load_model(save_model("opt")))


def test_what_many_processes_saved_is_refused_by_one_in_a_line(tiny_recipe, tmp_path):
    learner = load_learner(tiny_recipe, tiny_recipe.model)
    again = f"resume it by torchrun --nproc-per-node N -m scalerl train {tmp_path} --resume"
    with pytest.raises(InputError, match=f"saved by a learner on several processes: {again}$"):
        learner.restore({"version": 3}, tmp_path / "checkpoints" / "step-00003")


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
