"""Runs that W&B's own library logged."""

import time

import pytest
import wandb
from wandb_files import is_whole, keep_wandb_home


@pytest.fixture(scope="session")
def logged(tmp_path_factory):
    """Writes runs with W&B's own library, which may reach nothing outside: a function of folder and rows."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        keep_wandb_home(patch, home)

        def log(folder, rows, steps=None, **options):
            quiet = wandb.Settings(
                console="off",
                silent=True,
                x_disable_stats=True,
                x_disable_meta=True,
                x_disable_machine_info=True,
            )
            folder.mkdir(exist_ok=True)
            run = wandb.init(dir=folder, mode="offline", project="p", settings=quiet, **options)
            for n, row in enumerate(rows):
                run.log(row, step=None if steps is None else steps[n])
            run.finish()
            path = max((folder / "wandb").glob(f"*-{run.id}/*.wandb"))
            limit = time.monotonic() + 30
            while not is_whole(path) and time.monotonic() < limit:
                time.sleep(0.01)  # the file is written by another process, which finish() does not wait for
            return path

        yield log
        wandb.teardown()


@pytest.fixture(scope="session")
def run(logged, tmp_path_factory):
    """A file of some blocks: 60 rows of a loss, of nested values and of long texts."""
    rows = [{"loss": 1 / (n + 1), "a": {"b": n, "c": {"d": -n}}, "text": "x" * 1500} for n in range(60)]
    return logged(tmp_path_factory.mktemp("run"), rows, id="one", name="a name", config={"lr": 0.1})
