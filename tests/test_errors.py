"""What is said of errors of others: one line, and not all of it."""

import importlib
import importlib.util
import pickle
import pkgutil

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
    for module in pkgutil.walk_packages(scalerl.__path__, "scalerl."):
        if "Error(" in (importlib.util.find_spec(module.name).loader.get_source(module.name) or ""):
            importlib.import_module(module.name)
    arguments = {DivergedError: (7, "the gradient is not\nfinite")}
    kinds = kinds_of(ScalerlError)
    assert {DivergedError, InputError, WorkerError} < kinds
    assert len(kinds) >= 12
    for kind in kinds:
        error = kind(*arguments.get(kind, ("one line\nand another",)))
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind
        assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))
    error = pickle.loads(pickle.dumps(DivergedError(7, "it is over")))
    assert (error.step, str(error)) == (7, "step 7: it is over")
