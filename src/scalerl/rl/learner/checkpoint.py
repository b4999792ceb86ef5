"""A learner on disk: what it needs to go on, and a sharded model in Hugging Face format.

What it needs to go on is PyTorch's distributed checkpoint, saved by any number of ranks and loaded by any
other, one included: every rank writes what it holds, and reads what it needs of the others' files. The copy
is made at once, tensor by tensor into the memory of the CPU, and written by a thread while training goes on.
A folder without `.metadata` is not whole: that file comes last. Every rank sums the files that it has
written; rank 0 collects the sums, for the manifest of the run's checkpoint.
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
"""The folders within that of a run's checkpoint: of this, and of LoRA's adapters in PEFT's format."""


@dataclass(frozen=True)
class _Written(WriteResult):
    """A tensor that a rank has written, with the sum of the file that it is in."""

    file_sum: Sum


class _SummingWriter(FileSystemWriter):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.sums: Sums = {}
        """Sums of all ranks' files on rank 0, once the save has ended; none on the others."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write, and sum what was written: it is read from the page cache."""
        written = super().write_data(plan, planner).wait()
        names = {result.storage_data.relative_path for result in written}
        # By the rank that wrote them, so that the driver need not read the shards of all.
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
    """Makes one folder, and none above it: a run folder that was removed meanwhile must stay removed."""

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        Path(path).mkdir(exist_ok=True)


def save(state: State, folder: Path, group: dist.ProcessGroup) -> Callable[[], Sums]:
    """Start to save; what is in `state` may change once this returns. Collective over `group`.

    `group` is used from a thread, and so must be used by nothing else. What is returned waits until all ranks
    have written their part, raises a WriteError where one could not, and returns on rank 0 the sums of all.
    """
    writer = _SummingWriter(folder)
    found = state_dict_saver.async_save(dict(state), storage_writer=writer, process_group=group)

    def wait() -> Sums:
        try:
            # PyTorch returns the future, or with some stagers an object that holds it.
            (found if isinstance(found, Future) else found.upload_completion).result()
        except (CheckpointException, OSError, RuntimeError) as error:
            raise WriteError(f"{folder}: the checkpoint could not be saved ({_cause(error)})") from error
        return writer.sums

    return wait


def to_host(state: Mapping[str, Tensor]) -> State:
    """Return copies in the memory of the CPU, made one by one; what is one tensor stays one."""
    distinct = {weight.data_ptr(): weight for weight in state.values()}
    copies = {at: weight.detach().to("cpu", copy=True).contiguous() for at, weight in distinct.items()}
    return {name: copies[weight.data_ptr()] for name, weight in state.items()}


def host_state(model: nn.Module) -> State:
    """Return copies of the weights of the plain model in the memory of the CPU, adapters merged."""
    if not any(adapter_parameters(model)):
        return to_host(model.state_dict())  # tied weights stay tied
    # One by one: all merged weights on the device would be the model once more.
    return {n: w.detach().to("cpu", copy=True).contiguous() for n, w in merged_parameters(model)}


def adapter_state(model: nn.Module, dtype: torch.dtype) -> State:
    """Return copies of the adapters in the memory of the CPU, in the precision that they compute in, by their
    names in PEFT's format; collective where they are sharded."""
    whole = ((name, full_of(parameter.detach())) for name, parameter in adapter_parameters(model))
    return {name: tensor.to("cpu", dtype, copy=True).contiguous() for name, tensor in whole}


def write(state: State, folder: Path) -> Sums:
    """Write tensors of the CPU from this process alone; return the sums of the files.

    Raises:
        OSError: they cannot be written, or what `folder` is to be in is gone.
    """
    writer = _SummingWriter(folder)
    writer.fs = _NoParents()
    try:
        # Here, in the thread that writes: PyTorch warns where it is done, not where it is asked for.
        with _alone():
            state_dict_saver.save(dict(state), storage_writer=writer, no_dist=True)
    except CheckpointException as error:
        # The caller tells a full disk and a folder that was moved from others by the error of the system.
        found = _first(error) or error
        if isinstance(found, RuntimeError):  # PyTorch's writer of archives has lost it
            found = OSError(f"not written whole, as on a full disk: {first_line(found)}")
        raise found from error
    return writer.sums


@contextmanager
def _alone() -> Iterator[None]:
    """Silence PyTorch's warning that there is no process group, which it gives also where none is wanted."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def check_index(folder: Path) -> None:
    """Raise an InputError unless a folder is a whole checkpoint whose index names types of tensors alone."""
    if not (folder / ".metadata").exists():
        raise InputError(f"{folder}: no whole checkpoint of a learner")
    try:
        with (folder / ".metadata").open("rb") as file:
            _OfTensors(file).load()
    except (pickle.UnpicklingError, EOFError) as error:
        raise InputError(f"{folder / '.metadata'}: {first_line(error)}") from error


def load(state: State, folder: Path, group: dist.ProcessGroup | None) -> None:
    """Read into the tensors of `state`, in place; collective over `group`, if any.

    Raises:
        InputError: on every rank; it is not whole, or that of another model.
    """
    # Before PyTorch unpickles the index, and on every rank, as each reads it.
    check = partial(check_index, folder)
    on_all_ranks(check) if group else check()
    try:
        with nullcontext() if group else _alone():
            state_dict_loader.load(state, checkpoint_id=folder, process_group=group, no_dist=group is None)
    except (CheckpointException, RuntimeError, ValueError) as error:
        raise InputError(f"{folder}: does not fit this model ({_cause(error)})") from error


class _OfTensors(pickle.Unpickler):
    """Reads the index of a checkpoint before PyTorch does: a pickle can execute anything, and that of tensors
    names no types but these."""

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
    """Return the error of the first rank that failed."""
    return brief_error(_first(error) or error)


def _first(error: BaseException) -> BaseException | None:
    # Those after the first are ranks that waited for it.
    failures = list(error.failures.values()) if isinstance(error, CheckpointException) else []
    return failures[0][0] if failures else None


def save_pretrained(whole: Whole, folder: Path, dtype: torch.dtype) -> None:
    """Write config and weights, and adapters in `dtype`; collective, and rank 0 writes. A tokenizer is not in
    it.

    Raises:
        WriteError: on every rank, where rank 0 cannot write.
    """
    file = _File(whole.model, folder) if dist.get_rank() == 0 else None
    n_files = len(groups_of(whole))
    for number, tensors in enumerate(gathered(whole), start=1):
        name = f"model-{number:05d}-of-{n_files:05d}.safetensors"
        held = dict(tensors)  # on every rank: to gather a matrix that ranks share is collective
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
        """Write the tensors of one group, with the names and shapes that such models have on disk."""
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
        """Write config and index, without which nothing can be read."""
        config = self._model.config
        # As `save_pretrained` does: vLLM, for one, finds the code of a model by it.
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
    """Turn errors of the disk into a WriteError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise WriteError(f"{folder}: the model could not be saved ({error})") from error
