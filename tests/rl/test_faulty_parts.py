"""Choices of the user's own that raise an error during a run: one line, and a run that goes on."""

from dataclasses import replace

import pytest
from cut_runs import lines, recipe_of, record_and_weights, run
from faulty_parts import PARTS, Fault
from record_checker import check

from scalerl.errors import OwnCodeError


@pytest.fixture(scope="module")
def recipe(guesser):
    return replace(recipe_of(guesser), **PARTS)


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory):
    """The record and the weights of a run without a fault, and how often it calls each choice."""
    Fault.calls, Fault.at = {}, {}
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(recipe, folder)
    return record_and_weights(folder), Fault.calls


@pytest.mark.parametrize("name", PARTS)
def test_a_choice_that_raises_leaves_a_checkpoint_from_which_the_run_is_the_same(
    name, recipe, whole, tmp_path
):
    record, calls = whole
    Fault.at, Fault.calls = {name: round(0.7 * calls[name])}, {}
    with pytest.raises(OwnCodeError) as caught:
        run(recipe, tmp_path / "run")
    what = {"curriculum": ": retires", "length": ": penalty"}.get(name, "")
    start = f"{name}: {type(PARTS[name]).__name__}{what} raised an error (KeyError: 'mine') at "
    assert str(caught.value).startswith(start)
    assert "faulty_parts.py:" in str(caught.value)
    assert str(caught.value).endswith("--resume goes on from a checkpoint of this step")
    made = len(lines(tmp_path / "run" / "steps.jsonl"))
    assert 0 < made < 9
    assert (tmp_path / "run" / "checkpoints" / f"step-{made:05d}.1").is_dir()
    Fault.at = {}  # it is mended
    run(recipe, tmp_path / "run", resume=True)
    assert not (tmp_path / "run" / "lost.jsonl").exists()  # all that was made is kept
    assert check(tmp_path / "run") == []
    assert record_and_weights(tmp_path / "run") == record
