"""What a sharded learner needs to go on, on disk: saved by any number of ranks, loaded by any other.

PyTorch's distributed checkpoint: every rank writes what it holds, and reads what it needs of what others
wrote. The copy is made at once, and written by a thread while training goes on. A folder without `.metadata`
is not whole: that file comes last.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from scalerl.errors import InputError, WriteError, brief_error

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
        InputError: it is not whole, or that of another model.
    """
    if not (folder / ".metadata").exists():
        raise InputError(f"{folder}: no whole checkpoint of a sharded learner")
    try:
        state_dict_loader.load(state, checkpoint_id=folder, process_group=group)
    except (CheckpointException, RuntimeError, ValueError) as error:
        raise InputError(f"{folder}: does not fit this model ({_cause(error)})") from error


def _cause(error: BaseException) -> str:
    """What the first rank that failed says."""
    failures = list(error.failures.values()) if isinstance(error, CheckpointException) else []
    return brief_error(failures[0][0] if failures else error)
