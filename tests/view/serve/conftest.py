import shutil

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from growing import Growing
from serve_client import serving


@pytest.fixture(scope="session")
def original(tmp_path_factory):
    """A folder with two runs of one recipe, one of another, and what is no run; read only."""
    folder = tmp_path_factory.mktemp("served") / "runs"
    for name, recipe, seed in (("a-0", "a", 0), ("a-1", "a", 1), ("b-0", "b", 2)):
        Growing(folder / recipe / name, 30, seed, recipe={"name": recipe, "kind": recipe}).writer.close()
    (folder / "notes").mkdir()
    (folder / "notes" / "config.json").write_text("{}")
    return folder


@pytest.fixture
def runs(original, tmp_path):
    """A copy of it, to be written to."""
    return shutil.copytree(original, tmp_path / "runs")


@pytest.fixture(scope="module")
def client(original):
    """A browser of it."""
    with serving(original) as client:
        yield client
