"""The sandbox of this machine, for tests; without one they are skipped, and say why."""

import re

import pytest

from scalerl.errors import InputError
from scalerl.rl.sandbox.find import find_backend

_CANNOT = (
    r"requires Linux|is not installed|has no Landlock|no table of|not permitted|[Pp]ermission|No space left"
)
"""What a machine may lack; another reason is a fault of the sandbox."""


def backend_or_skip(wanted, python=""):
    """The backend, where this machine can have it."""
    try:
        return find_backend(wanted, python)
    except InputError as error:
        reasons = str(error).partition(" works here (")[2].partition("); install")[0]
        if all(re.search(_CANNOT, reason) for reason in reasons.split("; ")):
            pytest.skip(str(error))
        raise
