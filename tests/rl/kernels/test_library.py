"""The C kernels: what is compiled is kept, and what cannot be is not."""

import os

import pytest

from scalerl.rl.kernels.library import load_library


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Count the runs of a compiler, in a cache of its own; returns how many there were."""
    runs, script = tmp_path / "runs", tmp_path / "counted-cc"
    script.write_text(f'#!/bin/sh\necho run >> {runs}\nexec cc "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    monkeypatch.setenv("SCALERL_CACHE", str(tmp_path / "cache"))
    return lambda: len(runs.read_text().splitlines())


def test_a_compiler_that_does_not_work_is_none(monkeypatch, tmp_path):
    monkeypatch.setenv("SCALERL_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", "false")
    assert load_library("packed.c", {}) is None
    assert not list((tmp_path / "kernels").iterdir())


def test_the_second_process_finds_what_the_first_has_compiled(compiler, tmp_path):
    assert load_library("packed.c", {})
    assert load_library("packed.c", {})
    assert compiler() == 1
    (kept,) = (tmp_path / "cache" / "kernels").iterdir()  # and nothing beside it
    assert kept.name.startswith("packed-")
    assert load_library("native.c", {})
    assert compiler() == 2


def test_another_compiler_or_processor_is_compiled_for_anew(compiler, tmp_path, monkeypatch):
    load_library("packed.c", {})
    os.utime(tmp_path / "counted-cc", (0, 0))  # another version of it
    load_library("packed.c", {})
    monkeypatch.setattr("platform.platform", lambda: "another kind of machine")
    load_library("packed.c", {})
    assert compiler() == 3


@pytest.mark.parametrize("content", [b"", b"half a library"])
def test_a_spoiled_library_is_made_again(compiler, tmp_path, content):
    load_library("packed.c", {})
    (kept,) = (tmp_path / "cache" / "kernels").iterdir()
    kept.unlink()  # written over, it would be changed for this process, too
    kept.write_bytes(content)
    assert load_library("packed.c", {})
    assert compiler() == 2
    assert load_library("packed.c", {})
    assert compiler() == 2


def test_a_cache_that_cannot_be_written_costs_a_compilation(compiler, tmp_path):
    (tmp_path / "cache").write_text("a file")  # root may write to any folder
    assert load_library("packed.c", {})
    assert load_library("packed.c", {})
    assert compiler() == 2
