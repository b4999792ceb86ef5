"""What a sharded learner needs to go on, on disk: saved by any number of ranks, loaded by any other.

PyTorch's distributed checkpoint: every rank writes what it holds, and reads what it needs of what others
wrote. The copy is made at once, and written by a thread while training goes on. A folder without `.metadata`
is not whole: that file comes last. Every rank sums the files that it has written; rank 0 collects the sums,
for the manifest of the run's checkpoint.
"""

from __future__ import annotations

import pickle
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from scalerl.errors import InputError, WriteError, brief_error, first_line
from scalerl.rl.checkpoint.manifest import Sum, Sums, sum_file
from scalerl.rl.workers.ranks import on_all_ranks

State = dict[str, Tensor]
DISK = "learner"
"""The folder of this within that of a run's checkpoint."""


class Saving:
    """A save under way."""

    def __init__(self, writer: _SummingWriter, folder: Path, future: Future[Any]) -> None:
        self._writer, self._folder, self._future = writer, folder, future

    def wait(self) -> Sums:
        """Until all ranks have written their part; returns, on rank 0, the sums of their files.

        Raises:
            WriteError: one of them could not.
        """
        try:
            self._future.result()
        except (CheckpointException, OSError, RuntimeError) as error:
            raise WriteError(
                f"{self._folder}: the checkpoint could not be saved ({_cause(error)})"
            ) from error
        return self._writer.sums


@dataclass(frozen=True)
class _Written(WriteResult):
    """A tensor that a rank has written, with the sum of the file that it is in."""

    file_sum: Sum


class _SummingWriter(FileSystemWriter):
    """Sums on every rank the files that it has written."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.sums: Sums = {}
        """Those of all ranks, on rank 0, which ends the save; none on the others."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write, and read again what was written: from memory, as it has just been there."""
        written = super().write_data(plan, planner).wait()
        names = {result.storage_data.relative_path for result in written}
        sums = {name: sum_file(Path(self.path) / name) for name in names}
        summed: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        summed.set_result(
            [
                _Written(w.index, w.size_in_bytes, w.storage_data, sums[w.storage_data.relative_path])
                for w in written
            ]
        )
        return summed

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index of what all ranks have written."""
        written = [result for of_rank in results for result in of_rank if isinstance(result, _Written)]
        self.sums = {result.storage_data.relative_path: result.file_sum for result in written}
        super().finish(metadata, results)


def save(state: State, folder: Path, group: dist.ProcessGroup) -> Saving:
    """Begin to save; what is in `state` may change once this returns. Collective.

    `group` is used from a thread, and so must be no other's.
    """
    writer = _SummingWriter(folder)
    found = state_dict_saver.async_save(dict(state), storage_writer=writer, process_group=group)
    return Saving(writer, folder, found if isinstance(found, Future) else found.upload_completion)


def check_index(folder: Path) -> None:
    """Refuse what PyTorch would not read as a checkpoint of tensors.

    Raises:
        InputError: it is not whole, or its index names what is not a tensor's.
    """
    if not (folder / ".metadata").exists():
        raise InputError(f"{folder}: no whole checkpoint of a sharded learner")
    try:
        with (folder / ".metadata").open("rb") as file:
            _OfTensors(file).load()
    except (pickle.UnpicklingError, EOFError) as error:
        raise InputError(f"{folder / '.metadata'}: {first_line(error)}") from error


def load(state: State, folder: Path, group: dist.ProcessGroup) -> None:
    """Read into the tensors of `state`, in place; collective.

    Raises:
        InputError: on every rank; it is not whole, or that of another model.
    """
    on_all_ranks(lambda: check_index(folder))
    try:
        state_dict_loader.load(state, checkpoint_id=folder, process_group=group)
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
