"""All formats, and the one that a file or folder has."""

from collections.abc import Iterator
from pathlib import Path

from scalerl.errors import InputError
from scalerl.files import check_input
from scalerl.ingest.formats.format import Format, unopened
from scalerl.ingest.formats.importer import announced, named as importer_named
from scalerl.jsonl import check_not_compressed
from scalerl.own_code import OWN


def formats() -> Iterator[Format]:
    """Yield all formats: first those that a file's name or first bytes show, announced ones last."""
    # Each module is imported only in its turn, as most files need none but the first few.
    from scalerl.ingest.formats import wandb_offline

    yield wandb_offline.FORMAT
    from scalerl.ingest.formats import wandb_csv

    yield wandb_csv.FORMAT
    from scalerl.ingest.formats import tensorboard

    yield tensorboard.FORMAT
    from scalerl.ingest.formats import trainer_state

    yield trainer_state.FORMAT
    from scalerl.ingest.formats import mlflow

    yield mlflow.FORMAT
    from scalerl.ingest.formats import databases

    yield from (databases.MLFLOW, databases.TRACKIO)
    from scalerl.ingest.formats import metrics_jsonl, parquet

    yield from (metrics_jsonl.VERL, parquet.FORMAT, metrics_jsonl.FORMAT)
    from scalerl.ingest.formats import results

    yield results.FORMAT
    from scalerl.ingest.formats.console import reader

    yield reader.FORMAT
    yield from announced()


def recognise(path: Path, named: str | None = None) -> Format | None:
    """Return the format of a file or folder; None where no format recognises it.

    Raises:
        InputError: there is no such path, it may not be read, or is a pipe or a device; or there is no format
            of the given name; or the file is empty or compressed.
    """
    try:
        check_input(path)  # a pipe can be read only once
    except (OSError, ValueError) as error:  # the latter for a NUL in the name
        raise InputError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if named is not None:
        for one in formats():
            if one.name == named:
                return one
        if (own := importer_named(named)) is not None:
            return own
        names = ", ".join(one.name for one in formats())
        raise InputError(f"no format {named!r}; there are {names}, or {OWN}")
    try:
        found = next((one for one in formats() if one.recognises(path)), None)
        if found is None and path.is_file():  # no reader, not even one of tables, can read some files
            if not path.stat().st_size:
                raise InputError(f"{path}: the file is empty")
            with path.open("rb") as file:
                check_not_compressed(file.read(8), str(path))
    except OSError as error:
        raise InputError(unopened(error, path)) from error
    return found
