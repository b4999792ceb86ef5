"""Importers of the user's own: what their rows make, and what is said of those that are wrong."""

import json
import re
import sys

import pytest

from scalerl import InputError, load_run
from scalerl.cli.main import main
from scalerl.ingest.formats import importer
from scalerl.record.evaluation import compute_of

IMPORTER = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Theirs:
    def recognises(self, path):
        return False

    def rows(self, path):
        {}
"""
ROWS = """for n in range(9):
            yield {'step': n, 'pass_rate': n / 20, 'gpu_hours': 3.0 * n, 'total_tokens': 1e6 * n}
"""


def read(folder, monkeypatch, body):
    monkeypatch.chdir(folder)
    (folder / "theirs.py").write_text(IMPORTER.format(body))
    (folder / "x.bin").write_bytes(b"\0")
    return load_run("x.bin", format="theirs.py:Theirs")


def test_plain_names_of_compute_make_its_axes(tmp_path, monkeypatch):
    run = read(tmp_path, monkeypatch, ROWS)
    assert run.logged_axes() == ("gpu_hours", "tokens", "steps")
    assert run.metric.name == "pass_rate"
    assert [compute_of(run.evals[-1], axis) for axis in ("gpu_hours", "tokens")] == [24.0, 8e6]


def test_a_run_is_called_as_its_file_whatever_that_is(tmp_path, monkeypatch):
    read(tmp_path, monkeypatch, ROWS)
    (tmp_path / "run.theirs").touch()
    assert load_run("run.theirs", format="theirs.py:Theirs").name == "run"


def test_values_that_are_texts_are_suspected_where_no_metric_has_a_number(tmp_path, monkeypatch):
    (tmp_path / "x.bin").touch()
    (tmp_path / "theirs.py").write_text(IMPORTER.format("yield {'step': 1, 'acc': '0.5'}"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"no metric 'acc' .*is a number \(does the importer yield text\?\)"):
        load_run("x.bin", format="theirs.py:Theirs", metric="acc")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1 / 0", "cannot read it (ZeroDivisionError"),
        ("yield {'step': 1}\n        raise KeyError('loss')", "cannot read it (KeyError"),
        ("return [(1, 0.2)]", "yields rows of tuple, expected a mapping"),
        ("return None", "cannot read it (TypeError"),
        ("raise SystemExit(4)", "cannot read it (SystemExit"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path, monkeypatch, body, message):
    with pytest.raises(InputError) as error:
        read(tmp_path, monkeypatch, body)
    assert str(error.value).startswith(f"x.bin: theirs.py:Theirs {message}")
    assert "\n" not in str(error.value)


def test_what_an_importer_prints_stays_out_of_the_json(tmp_path, monkeypatch, capsys):
    read(tmp_path, monkeypatch, "print('reading')\n        " + ROWS)
    capsys.readouterr()
    assert main(["fit", "x.bin", "--format", "theirs.py:Theirs", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["points"] == 9
    assert "reading" in printed.err


@pytest.fixture
def announce(tmp_path, monkeypatch):
    """Install a package that announces the importer `theirs`, of the module that the function is given."""

    def of(code):
        (tmp_path / "announcing_theirs.py").write_text(code)
        info = tmp_path / "announcing_theirs-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: announcing_theirs\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[scalerl.importers]\ntheirs = announcing_theirs:Theirs\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "announcing_theirs", raising=False)

    for cached in (importer.announced, importer._warn):
        cached.cache_clear()
    yield of
    importer.announced.cache_clear()


LEAVES = "raise SystemExit(3)"
RAISES = IMPORTER.format("return []").replace("return False", "raise ConnectionError('oh')")


@pytest.mark.parametrize(
    ("code", "warning"),
    [
        (
            LEAVES,
            r"importer theirs of an installed package is left out: .* cannot be loaded \(SystemExit: 3\)",
        ),
        ("import no_such_module", r"importer theirs of .* is left out: .*\(ModuleNotFoundError: .*"),
        (RAISES, "importer theirs: recognises raised ConnectionError: oh; it is taken for .*"),
    ],
)
def test_a_broken_importer_of_a_package_costs_no_other_log(announce, tmp_path, capsys, caplog, code, warning):
    announce(code)
    rows = "".join(f"{c},{c / (c + 9)}\n" for c in range(30))
    (tmp_path / "scalerl-0.csv").write_text("gpu_hours,pass_rate\n" + rows)
    assert main(["fit", str(tmp_path / "scalerl-0.csv"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["axis"] == "gpu_hours"
    (said,) = caplog.messages
    assert re.fullmatch(warning, said)


def test_a_broken_importer_that_is_asked_for_is_an_error(announce, tmp_path, capsys):
    announce(LEAVES)
    (tmp_path / "x.bin").write_bytes(b"\0")
    assert main(["ingest", str(tmp_path / "x.bin"), "-o", str(tmp_path / "run"), "--format", "theirs"]) == 2
    assert capsys.readouterr().err.startswith(
        "scalerl: announcing_theirs:Theirs cannot be loaded (SystemExit: 3)"
    )
