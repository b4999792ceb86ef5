"""What is said of errors of others: one line, and not all of it."""

import importlib
import pickle
from pathlib import Path
from typing import Any

import pytest

import scalerl
from scalerl.errors import DivergedError, InputError, ScalerlError, WorkerError, brief_error, first_line


@pytest.mark.parametrize(
    ("error", "line", "brief"),
    [
        (ValueError(), "ValueError", "ValueError"),
        (ValueError("\n \n"), "ValueError", "ValueError"),
        (OSError("\nno route\nto host"), "no route", "OSError: no route"),
        (ValueError("x" * 300), "x" * 200 + "...", "ValueError: " + "x" * 200 + "..."),
    ],
)
def test_an_error_is_its_first_line(error, line, brief):
    assert first_line(error) == line
    assert brief_error(error) == brief


def kinds_of(kind):
    return {kind}.union(*map(kinds_of, kind.__subclasses__()))


def test_every_error_comes_whole_from_another_process():
    """One that does not is another error by then: a run that diverged would be one that lost its learner."""
    pytest.importorskip("ray")
    top = Path(scalerl.__path__[0])
    for file in top.rglob("*.py"):
        if "Error(" in file.read_text():
            importlib.import_module(".".join(("scalerl", *file.relative_to(top).with_suffix("").parts)))
    arguments: dict[Any, Any] = {DivergedError: (7, "the gradient is not\nfinite")}
    kinds = {kind for kind in kinds_of(ScalerlError) if kind.__module__.startswith("scalerl.")}
    assert {DivergedError, InputError, WorkerError} < kinds
    assert len(kinds) >= 12
    for kind in kinds:
        error = kind(*arguments.get(kind, ("one line\nand another",)))
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind
        assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))
    error = pickle.loads(pickle.dumps(DivergedError(7, "it is over")))
    assert (error.step, str(error)) == (7, "step 7: it is over")
