"""Checkpoints: everything that a resume needs, complete or absent.

    checkpoints/step-00150/            a model folder in Hugging Face format, which can be served
    checkpoints/step-00150.1/          likewise, of a run that was stopped within the next step; both contain:
      training/state.json              the state of every part of the run, a tree in which each array is named
      training/arrays.safetensors      the arrays
      learner/                         the learner's state: a part from each of its processes
      adapter/                         with LoRA, its adapters in PEFT's format; in the model they are merged
      manifest.json                    length and checksum of every file: `scalerl.rl.checkpoint.manifest`

The state is copied between two steps, or between two decode steps if a run is stopped. A thread then writes
it to a temporary folder, adds checksums, syncs and renames it, and removes all but the newest `keep`
checkpoints, and older ones that a resume has set aside.
"""

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from scalerl.errors import WriteError
from scalerl.files import sync
from scalerl.rl.checkpoint.manifest import Sums, check_manifest, write_manifest
from scalerl.rl.config.settings import Checkpointing

FORMAT = 9
STEP, ASIDE = "step-", "aside-"
"""Start of the names of checkpoints, and of those that a resume has set aside."""
_LOG = logging.getLogger("scalerl")
_ARRAY, _NUMPY = "$array", "$numpy"

Write = Callable[[Path], Sums]
"""Writes files into a folder; returns the checksums that it has already computed, by file name."""


class BackgroundWriter:
    """A thread that writes one thing at a time; the next write waits for the one in progress."""

    def __init__(self, what: str) -> None:
        """Start the thread; `what` names the written thing in warnings, such as `this checkpoint`."""
        self._what = what
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[None] | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Call `write` in the thread, once the write in progress has ended."""
        self.wait()
        self._under_way = self._thread.submit(write)

    def wait(self) -> None:
        """Wait for the write in progress; log a warning if it failed."""
        try:
            self.finish()
        except WriteError as error:
            _LOG.warning("%s; training goes on without %s", error, self._what)

    def finish(self) -> None:
        """Wait for the write in progress.

        Raises:
            WriteError: the write failed.
        """
        if self._under_way is not None:
            future, self._under_way = self._under_way, None
            future.result()

    def close(self) -> None:
        """Wait for the write in progress, and stop the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()


class Checkpoints(BackgroundWriter):
    """The writer of a run's checkpoints, which are written one at a time beside training."""

    def __init__(
        self,
        folder: Path,
        settings: Checkpointing,
        saver: Callable[[Path], Write],
        tokenizer: Any,
        on_made: Callable[[], None] = lambda: None,
    ) -> None:
        """Save the learner by `saver`, which is `Learner.saver`; the thread calls `on_made` after each."""
        self.folder, self._settings, self._on_made = folder, settings, on_made
        super().__init__("this checkpoint")
        self._saver, self._tokenizer = saver, tokenizer
        self._last = time.monotonic()

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due after this step."""
        minutes = (time.monotonic() - self._last) / 60
        by_step = self._settings.steps and step % self._settings.steps == 0
        return bool(by_step or (self._settings.minutes and minutes >= self._settings.minutes))

    def make(self, step: int, state: Mapping[str, Any], within: bool = False) -> None:
        """Write a checkpoint from copies, so that training may continue at once; wait for an earlier one.

        Nothing is written if the step already has one: a resume from there repeats evaluations in progress.
        With `within`, the next step has started, and its work so far is worth another checkpoint.
        """
        self.wait()
        self._last = time.monotonic()
        if not within and any(of == step for of, _ in step_folders(self.folder)):
            return
        name = f"{STEP}{step:05d}" + f".{_next_part(self.folder, step)}" * within
        try:
            # Copies are made in this thread, between two steps; the other thread only writes.
            save = self._saver(self.folder)
        except WriteError as error:
            self._under_way = Future()
            self._under_way.set_exception(error)  # `wait` logs it, `finish` raises it
        else:
            self.start(partial(self._write, self.folder / name, step, state, save))

    def _write(self, path: Path, step: int, state: Mapping[str, Any], save: Write) -> None:
        def training(aside: Path) -> Sums:
            sums = save_model(save, self._tokenizer, aside)
            save_state(aside / "training", state)
            return sums

        write_whole(path, training)
        # Older checkpoints are removed only once the new one is complete.
        self._on_made()
        remove(old for _, old in step_folders(path.parent)[self._settings.keep :])
        drop_asides(path.parent, step)


_NOT_WHOLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError)
"""Errors that reading a damaged file may raise."""


def newest_checkpoints(folder: Path) -> Iterator[tuple[int, Path, dict[str, Any]]]:
    """Yield step, folder and state of all undamaged checkpoints, newest first; log the damaged ones."""
    for step, path in step_folders(folder):
        try:
            check_manifest(path)
            state = load_state(path / "training")
        except (OSError, *_NOT_WHOLE) as error:
            _LOG.warning("%s is damaged (%s): passed over", path, error)
            continue
        yield step, path, state


def step_folders(folder: Path, start: str = STEP) -> list[tuple[int, Path]]:
    """Return step and folder of the checkpoints whose names start with `start`, newest first."""
    numbers = ((_numbers(path.name.removeprefix(start)), path) for path in folder.glob(f"{start}*"))
    found = sorted(((key, path) for key, path in numbers if key and path.is_dir()), reverse=True)
    return [(step, path) for (step, _), path in found]


def _numbers(name: str) -> tuple[int, int] | None:
    """Return step and part of "00150" or "00150.2", else None; part 0 is the end of the step."""
    step, dot, part = name.partition(".")
    if not step.isdecimal() or not (part.isdecimal() or not dot):
        return None
    return int(step), int(part or 0)


def _next_part(folder: Path, step: int) -> int:
    """Return the next free part number for a checkpoint within the step after `step`."""
    found = (_numbers(path.name.removeprefix(STEP)) for path in folder.glob(f"{STEP}{step:05d}*"))
    return 1 + max((key[1] for key in found if key), default=0)


def drop_asides(folder: Path, step: int) -> None:
    """Remove the checkpoints set aside by a resume, up to a `step` that the run has made again."""
    remove(path for of, path in step_folders(folder, ASIDE) if of <= step)


def remove(folders: Iterable[Path]) -> None:
    """Remove checkpoints, and ignore errors."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


# -- files -------------------------------------------------------------------------------------------------


def write_whole(folder: Path, write: Write) -> None:
    """Let `write` fill a temporary folder, add its manifest, sync it, and rename it; `folder` must not exist.

    Raises:
        WriteError: the folder cannot be written.
    """
    aside = folder.with_name(f".{folder.name}.part")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        folder.parent.mkdir(exist_ok=True)  # without parents: a moved run folder must not be made again
        aside.mkdir()
        write_manifest(aside, write(aside))
        for path in (*aside.rglob("*"), aside):  # syncing a folder syncs the names in it
            sync(path)
        aside.rename(folder)
        sync(folder.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        with suppress(OSError):  # they are not empty, unless `save_pretrained` made a moved run folder again
            folder.parent.rmdir()
            folder.parent.parent.rmdir()
        raise WriteError(f"{folder}: the checkpoint could not be saved ({error})") from error


def save_model(save: Write, tokenizer: Any, folder: Path) -> Sums:
    """Write a model in Hugging Face format by `save`, and its tokenizer; return the checksums of `save`."""
    sums = save(folder)
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # tokenizers raises a bare Exception if it cannot write a file
        raise OSError(str(error)) from error
    return sums


def save_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write a tree of plain values, numpy arrays and tensors."""
    arrays: dict[str, Tensor] = {}
    # JSON and safetensors, not pickle: an untrusted checkpoint must not run code.
    tree = without_arrays(state, arrays)
    folder.mkdir()
    save_file(arrays, folder / "arrays.safetensors")
    whole = {"format": FORMAT, "state": tree}
    (folder / "state.json").write_text(json.dumps(whole), encoding="utf-8")


def load_state(folder: Path) -> dict[str, Any]:
    """Return the tree that `save_state` has written.

    Raises:
        ValueError: it has another format version.
    """
    whole = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    if whole["format"] != FORMAT:
        raise ValueError(f"its format is {whole['format']}, and {FORMAT} is read here")
    return with_arrays(whole["state"], load_file(folder / "arrays.safetensors"))


def without_arrays(tree: Any, arrays: dict[str, Tensor]) -> Any:
    """Return a tree for JSON, with arrays moved to `arrays` and replaced by their names there."""
    if type(tree) in (str, int, float, bool):  # the most common case
        return tree
    if isinstance(tree, Mapping):
        return {key: without_arrays(value, arrays) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [without_arrays(value, arrays) for value in tree]
    if isinstance(tree, np.ndarray | Tensor):
        name = str(len(arrays))
        tensor = torch.from_numpy(np.ascontiguousarray(tree)) if isinstance(tree, np.ndarray) else tree
        arrays[name] = tensor.detach().cpu().contiguous()
        return {_ARRAY: name, _NUMPY: isinstance(tree, np.ndarray)}
    return tree.item() if isinstance(tree, np.generic) else tree


def with_arrays(tree: Any, arrays: Mapping[str, Tensor]) -> Any:
    """Return the tree from the results of `without_arrays`."""
    if isinstance(tree, list):
        return [with_arrays(value, arrays) for value in tree]
    if not isinstance(tree, dict):
        return tree
    if _ARRAY in tree:
        return arrays[tree[_ARRAY]].numpy() if tree[_NUMPY] else arrays[tree[_ARRAY]]
    return {key: with_arrays(value, arrays) for key, value in tree.items()}
