"""What is written whole or not at all."""

import pytest

from scalerl.errors import WriteError
from scalerl.rl.checkpoint.store import save_model, write_whole
from scalerl.rl.model.causal_lm import load_tokenizer


def test_a_tokenizer_that_cannot_be_written_is_a_checkpoint_that_is_not_saved(llama_folder, tmp_path):
    """The library raises a bare Exception: for a full disk, or a folder that is moved at that moment."""
    tokenizer = load_tokenizer(llama_folder)

    def save(folder):
        (folder / "tokenizer.json").mkdir()
        return {}

    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "checkpoints" / "step-00001"
    with pytest.raises(WriteError, match=r"step-00001: the checkpoint could not be saved \(Is a directory"):
        write_whole(path, lambda aside: save_model(save, tokenizer, aside))
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_run_folder_that_is_moved_meanwhile_is_not_made_again(tmp_path):
    """`save_pretrained` makes the folders above its own, which the move has taken away."""
    run, there = tmp_path / "run", tmp_path / "moved"
    (run / "checkpoints").mkdir(parents=True)

    def write(aside):
        run.rename(there)
        aside.mkdir(parents=True)
        (aside / "model.safetensors").write_text("")
        raise OSError("no such file: learner")

    with pytest.raises(WriteError, match="could not be saved"):
        write_whole(run / "checkpoints" / "step-00006", write)
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]


def test_a_checkpoint_that_fails_leaves_the_run_folder(tmp_path):
    def write(aside):
        raise OSError("no space left on device")

    for kept in ("config.json", "checkpoints/step-00003"):
        (tmp_path / kept).mkdir(parents=True)
    with pytest.raises(WriteError):
        write_whole(tmp_path / "checkpoints" / "step-00006", write)
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["step-00003"]
