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

    path = tmp_path / "checkpoints" / "step-00001"
    with pytest.raises(WriteError, match=r"step-00001: the checkpoint could not be saved \(Is a directory"):
        write_whole(path, lambda aside: save_model(save, tokenizer, aside))
    assert not list(path.parent.iterdir())
