"""What is said of errors of others: one line, and not all of it."""

import pytest

from scalerl.errors import brief_error, first_line


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
