"""What a sharded learner needs to go on, on disk: saved by any number of ranks, loaded by any other.

PyTorch's distributed checkpoint: every rank writes what it holds, and reads what it needs of what others
wrote. The copy is made at once, and written by a thread while training goes on. A folder without `.metadata`
is not whole: that file comes last.
"""

from __future__ import annotations

import pickle
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from scalerl.errors import InputError, WriteError, brief_error, first_line

State = dict[str, Tensor]
DISK = "learner"
"""The folder of this within that of a run's checkpoint."""


class Saving:
    """A save under way."""

    def __init__(self, folder: Path, future: Future[Any]) -> None:
        self._folder, self._future = folder, future

    def wait(self) -> None:
        """Until all ranks have written their part.

        Raises:
            WriteError: one of them could not.
        """
        try:
            self._future.result()
        except (CheckpointException, OSError, RuntimeError) as error:
            raise WriteError(
                f"{self._folder}: the checkpoint could not be saved ({_cause(error)})"
            ) from error


def save(state: State, folder: Path, group: dist.ProcessGroup) -> Saving:
    """Begin to save; what is in `state` may change once this returns. Collective.

    `group` is used from a thread, and so must be no other's.
    """
    found = state_dict_saver.async_save(dict(state), checkpoint_id=folder, process_group=group)
    return Saving(folder, found if isinstance(found, Future) else found.upload_completion)


def load(state: State, folder: Path, group: dist.ProcessGroup) -> None:
    """Read into the tensors of `state`, in place; collective.

    Raises:
        InputError: it is not whole, or that of another model, or its index names what is not a tensor's.
    """
    if not (folder / ".metadata").exists():
        raise InputError(f"{folder}: no whole checkpoint of a sharded learner")
    try:
        with (folder / ".metadata").open("rb") as file:
            _OfTensors(file).load()
        state_dict_loader.load(state, checkpoint_id=folder, process_group=group)
    except (pickle.UnpicklingError, EOFError) as error:
        raise InputError(f"{folder / '.metadata'}: {first_line(error)}") from error
    except (CheckpointException, RuntimeError, ValueError) as error:
        raise InputError(f"{folder}: does not fit this model ({_cause(error)})") from error


class _OfTensors(pickle.Unpickler):
    """Reads what PyTorch will: the index of a checkpoint is a pickle, which could have anything done. That of
    tensors names nothing but these."""

    _NAMES: ClassVar = {
        "pathlib": {"PosixPath"},
        "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
        "torch.serialization": {"_get_layout"},
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.distributed.checkpoint.metadata": {
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties"),
            *("ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
        },
    }

    def find_class(self, module_name: str, global_name: str) -> Any:
        """What a pickle names, if it is known."""
        if global_name not in self._NAMES.get(module_name, ()):
            raise pickle.UnpicklingError(
                f"{module_name}.{global_name} has no place in a checkpoint of tensors"
            )
        return super().find_class(module_name, global_name)


def _cause(error: BaseException) -> str:
    """What the first rank that failed says."""
    failures = list(error.failures.values()) if isinstance(error, CheckpointException) else []
    return brief_error(failures[0][0] if failures else error)
