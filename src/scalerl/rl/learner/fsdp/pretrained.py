"""A sharded model into a folder in Hugging Face format, a block at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from scalerl.errors import WriteError
from scalerl.rl.learner.fsdp.sharding import Whole, gathered, groups_of
from scalerl.rl.workers.ranks import on_all_ranks


def save_pretrained(whole: Whole, folder: Path) -> None:
    """Write config and weights; collective, and rank 0 writes. A tokenizer is not in it.

    Raises:
        WriteError: on every rank, where rank 0 cannot write.
    """
    file = _File(whole.model, folder) if dist.get_rank() == 0 else None
    n_files = len(groups_of(whole))
    for number, tensors in enumerate(gathered(whole), start=1):
        name = f"model-{number:05d}-of-{n_files:05d}.safetensors"
        on_all_ranks(lambda name=name, tensors=tensors: file.write(name, tensors) if file else None)
    on_all_ranks(lambda: file.close() if file else None)


class _File:
    """A model folder that is being written."""

    def __init__(self, model: Any, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._rest = [(name, b) for name, b in model.state_dict().items() if not isinstance(b, DTensor)]
        self._places: dict[str, str] = {}
        self._bytes = 0

    def write(self, name: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """The tensors of one group, under the names and in the shapes that such models have on disk."""
        from transformers.core_model_loading import revert_weight_conversion

        held, self._rest = dict([*tensors, *self._rest]), []  # buffers go into the first file
        held = {name: tensor.detach().cpu() for name, tensor in held.items()}
        held = {
            name: tensor.contiguous() for name, tensor in revert_weight_conversion(self._model, held).items()
        }
        with _told(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            save_file(held, self._folder / name, metadata={"format": "pt"})
        self._places |= dict.fromkeys(held, name)
        self._bytes += sum(tensor.nbytes for tensor in held.values())

    def close(self) -> None:
        """Config and index, without which nothing can be read."""
        config = self._model.config
        config.architectures = [type(self._model).__name__]
        index = {"metadata": {"total_size": self._bytes}, "weight_map": self._places}
        with _told(self._folder):
            config.save_pretrained(self._folder)
            if self._model.can_generate():
                self._model.generation_config.save_pretrained(self._folder)
            text = json.dumps(index, indent=2, sort_keys=True)
            (self._folder / "model.safetensors.index.json").write_text(text + "\n", encoding="utf-8")


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    """What the disk says, as an error of ours."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise WriteError(f"{folder}: the model could not be saved ({error})") from error
