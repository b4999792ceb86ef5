"""What code may try against its sandbox and its judge, in every backend: nothing comes of any of it."""

import os
import subprocess
import sys
from pathlib import Path

import abuses
import pytest
from sandboxes import backend_or_skip

from scalerl.rl.sandbox.backend import is_privileged
from scalerl.rl.sandbox.find import find_python
from scalerl.rl.sandbox.sandbox import Sandbox

ROOT = Path(__file__).parents[3]
NAMES = [*abuses.PROGRAMS, *abuses.CODES]
linux = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox requires Linux")


@pytest.fixture(params=["bwrap", "namespaces"])
def sandbox(request):
    return Sandbox(backend_or_skip(request.param), find_python(""), abuses.MEMORY)


@pytest.mark.parametrize("name", NAMES)
def test_an_abuse_has_no_consequence(sandbox, tmp_path, name):
    assert abuses.consequences_of(name, sandbox, tmp_path) == []


@linux
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in abuses.SPARED])
def test_without_a_sandbox_the_same_abuse_has_one(tmp_path, name):
    """Which shows that the test above would see it."""
    assert abuses.consequences_without(name, tmp_path) != []


def test_there_are_more_than_thirty_of_each_kind_together():
    assert len(NAMES) >= 30
    assert len(abuses.SPARED) < len(NAMES) / 2


@linux
@pytest.mark.parametrize("backend", [pytest.param("bwrap", marks=pytest.mark.slow), "namespaces"])
def test_a_user_without_rights_is_held_as_well(tmp_path, backend):
    """As root the sandbox has a user of its own, and elsewhere a user namespace."""
    python = "/usr/bin/python3"
    ready = f"import sys; assert sys.version_info >= (3, 11); open({abuses.__file__!r})"
    command = [python, "-B", "-c", ready]
    if not is_privileged():
        pytest.skip("not root: the other tests have run without rights")
    nobody = {"user": 65534, "group": 65534, "extra_groups": []}
    if not Path(python).exists() or subprocess.run(command, **nobody, stderr=subprocess.DEVNULL).returncode:
        pytest.skip(f"no {python} of 3.11 or newer that another user can run, with this folder")
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HOME": str(tmp_path), "TMPDIR": "/tmp"}
    command = [python, "-B", str(ROOT / "tests" / "support" / "abuses.py"), backend]
    done = subprocess.run(command, **nobody, env=env, capture_output=True, text=True)
    if "not permitted" in done.stderr or "ermission" in done.stderr:
        pytest.skip(done.stderr.strip().rpartition("\n")[2])
    found = abuses.json.loads(done.stdout)
    assert "user namespace" in found["sandbox"]
    assert {name: what for name, what in found["consequences"].items() if what} == {}
    assert list(found["consequences"]) == NAMES
