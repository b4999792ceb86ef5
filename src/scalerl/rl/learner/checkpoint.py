"""A learner on disk: its training state, and a sharded model in Hugging Face format.

The training state is a distributed checkpoint of PyTorch. Any number of ranks may save it and any other
number may load it: every rank writes what it holds, and reads what it needs from all files. The state is
first copied to CPU memory, tensor by tensor; a thread writes the copy while training goes on. `.metadata` is
written last, so a folder without it is incomplete. Every rank computes the checksums of the files it wrote;
rank 0 collects them for the manifest of the run's checkpoint.
"""

from __future__ import annotations

import json
import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from scalerl.errors import InputError, WriteError, brief_error, first_line
from scalerl.rl.checkpoint.manifest import Sum, Sums, sum_file
from scalerl.rl.learner.sharding import Whole, full_of, gathered, groups_of
from scalerl.rl.model.lora import adapter_parameters, merged_parameters, write_adapter
from scalerl.rl.workers.ranks import on_all_ranks

State = dict[str, Tensor]
DISK, ADAPTER = "learner", "adapter"
"""Subfolders of a run's checkpoint: the training state, and LoRA adapters in PEFT's format."""


@dataclass(frozen=True)
class _Written(WriteResult):
    """A tensor that a rank has written, with the checksum of its file."""

    file_sum: Sum


class _SummingWriter(FileSystemWriter):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.sums: Sums = {}
        """Checksums of all ranks' files, on rank 0 once the save has ended; empty on the other ranks."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write the data, then compute the files' checksums while they are still in the page cache."""
        written = super().write_data(plan, planner).wait()
        names = {result.storage_data.relative_path for result in written}
        # Each rank sums its own files, so that the driver need not read all shards.
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
        written = [result for of_rank in results for result in of_rank if isinstance(result, _Written)]
        self.sums = {result.storage_data.relative_path: result.file_sum for result in written}
        super().finish(metadata, results)


class _NoParents(FileSystem):
    """A file system that never makes parent folders: a run folder removed meanwhile must stay removed."""

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        Path(path).mkdir(exist_ok=True)


def save(state: State, folder: Path, group: dist.ProcessGroup) -> Callable[[], Sums]:
    """Start to save; the tensors in `state` may change once this returns. Collective over `group`.

    A thread uses `group`, so nothing else may. The returned function waits until all ranks have written their
    part, raises a WriteError if one could not, and on rank 0 returns the checksums of all files.
    """
    writer = _SummingWriter(folder)
    found = state_dict_saver.async_save(dict(state), storage_writer=writer, process_group=group)

    def wait() -> Sums:
        try:
            # PyTorch returns the future or, with some stagers, an object that holds it.
            (found if isinstance(found, Future) else found.upload_completion).result()
        except (CheckpointException, OSError, RuntimeError) as error:
            raise WriteError(f"{folder}: the checkpoint could not be saved ({_cause(error)})") from error
        return writer.sums

    return wait


def to_host(state: Mapping[str, Tensor]) -> State:
    """Return copies of tensors in CPU memory, made one at a time; tied tensors stay tied."""
    distinct = {weight.data_ptr(): weight for weight in state.values()}
    copies = {at: weight.detach().to("cpu", copy=True).contiguous() for at, weight in distinct.items()}
    return {name: copies[weight.data_ptr()] for name, weight in state.items()}


def host_state(model: nn.Module) -> State:
    """Return copies of the weights of the plain model in CPU memory, adapters merged."""
    if not any(adapter_parameters(model)):
        return to_host(model.state_dict())  # tied weights stay tied
    # One at a time: all merged weights on the device would be a second model.
    return {n: w.detach().to("cpu", copy=True).contiguous() for n, w in merged_parameters(model)}


def adapter_state(model: nn.Module, dtype: torch.dtype) -> State:
    """Return copies of the adapters in CPU memory in `dtype`, by their names in PEFT's format.

    Collective if they are sharded."""
    whole = ((name, full_of(parameter.detach())) for name, parameter in adapter_parameters(model))
    return {name: tensor.to("cpu", dtype, copy=True).contiguous() for name, tensor in whole}


def write(state: State, folder: Path) -> Sums:
    """Write tensors in CPU memory from this process alone; return the checksums of the files.

    Raises:
        OSError: the tensors cannot be written, or the parent of `folder` is gone.
    """
    writer = _SummingWriter(folder)
    writer.fs = _NoParents()
    try:
        # Silenced in this thread: PyTorch warns in the thread that writes, not in the one that requested it.
        with _alone():
            state_dict_saver.save(dict(state), storage_writer=writer, no_dist=True)
    except CheckpointException as error:
        # The caller recognises a full disk or a moved folder by the OSError.
        found = _first(error) or error
        if isinstance(found, RuntimeError):  # PyTorch's archive writer does not pass on the OSError
            found = OSError(f"not written whole, as on a full disk: {first_line(found)}")
        raise found from error
    return writer.sums


@contextmanager
def _alone() -> Iterator[None]:
    """Silence PyTorch's warning that there is no process group; it warns even with `no_dist`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def check_index(folder: Path) -> None:
    """Raise an InputError unless a folder is a complete checkpoint whose index names only tensor types."""
    if not (folder / ".metadata").exists():
        raise InputError(f"{folder}: no whole checkpoint of a learner")
    try:
        with (folder / ".metadata").open("rb") as file:
            _OfTensors(file).load()
    except (pickle.UnpicklingError, EOFError) as error:
        raise InputError(f"{folder / '.metadata'}: {first_line(error)}") from error


def load(state: State, folder: Path, group: dist.ProcessGroup | None) -> None:
    """Read a checkpoint into the tensors of `state`, in place; collective over `group`, if any.

    Raises:
        InputError: on every rank; the checkpoint is incomplete or of another model.
    """
    # Before PyTorch unpickles the index, which every rank does.
    check = partial(check_index, folder)
    on_all_ranks(check) if group else check()
    try:
        with nullcontext() if group else _alone():
            state_dict_loader.load(state, checkpoint_id=folder, process_group=group, no_dist=group is None)
    except (CheckpointException, RuntimeError, ValueError) as error:
        raise InputError(f"{folder}: does not fit this model ({_cause(error)})") from error


class _OfTensors(pickle.Unpickler):
    """An unpickler that rejects all types but those of a tensor checkpoint's index.

    It reads the index before PyTorch does, because a pickle can execute any code."""

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
        if global_name not in self._NAMES.get(module_name, ()):
            raise pickle.UnpicklingError(
                f"{module_name}.{global_name} has no place in a checkpoint of tensors"
            )
        return super().find_class(module_name, global_name)


def _cause(error: BaseException) -> str:
    """Return the error of the first rank that failed, in brief."""
    return brief_error(_first(error) or error)


def _first(error: BaseException) -> BaseException | None:
    # The other failures are of ranks that waited for the first.
    failures = list(error.failures.values()) if isinstance(error, CheckpointException) else []
    return failures[0][0] if failures else None


def save_pretrained(whole: Whole, folder: Path, dtype: torch.dtype) -> None:
    """Write config and weights, and adapters in `dtype`, but no tokenizer; collective, and rank 0 writes.

    Raises:
        WriteError: on every rank; rank 0 cannot write.
    """
    file = _File(whole.model, folder) if dist.get_rank() == 0 else None
    n_files = len(groups_of(whole))
    for number, tensors in enumerate(gathered(whole), start=1):
        name = f"model-{number:05d}-of-{n_files:05d}.safetensors"
        held = dict(tensors)  # on every rank: gathering a tensor-parallel matrix is collective
        on_all_ranks(lambda name=name, held=held: file.write(name, held) if file else None)
    on_all_ranks(lambda: file.close() if file else None)
    if adapter := adapter_state(whole.model, dtype):
        on_all_ranks(lambda: file.write_adapter(adapter) if file else None)


class _File:
    """A model folder that is being written, on rank 0."""

    def __init__(self, model: Any, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._rest = [(name, b) for name, b in model.state_dict().items() if not isinstance(b, DTensor)]
        self._places: dict[str, str] = {}
        self._bytes = 0

    def write(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors of one group with the names and shapes that they have in Hugging Face format."""
        from transformers.core_model_loading import revert_weight_conversion

        held, self._rest = {**tensors, **dict(self._rest)}, []  # buffers go into the first file
        held = {name: tensor.detach().cpu() for name, tensor in held.items()}
        held = {
            name: tensor.contiguous() for name, tensor in revert_weight_conversion(self._model, held).items()
        }
        with _disk_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            save_file(held, self._folder / name, metadata={"format": "pt"})
        self._places |= dict.fromkeys(held, name)
        self._bytes += sum(tensor.nbytes for tensor in held.values())

    def write_adapter(self, tensors: Mapping[str, Tensor]) -> None:
        with _disk_errors(self._folder):
            write_adapter(tensors, self._model, self._folder / ADAPTER)

    def close(self) -> None:
        """Write config and index, which a reader of the folder needs."""
        config = self._model.config
        # As `save_pretrained` does: vLLM finds the code of a model by its architecture.
        config.architectures = [type(self._model).__name__]
        index = {"metadata": {"total_size": self._bytes}, "weight_map": self._places}
        with _disk_errors(self._folder):
            config.save_pretrained(self._folder)
            if self._model.can_generate():
                self._model.generation_config.save_pretrained(self._folder)
            text = json.dumps(index, indent=2, sort_keys=True)
            (self._folder / "model.safetensors.index.json").write_text(text + "\n", encoding="utf-8")


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Raise disk errors as a WriteError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise WriteError(f"{folder}: the model could not be saved ({error})") from error
