"""The import rules: what points where, and what the light half never loads."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "scalerl"

# Each part may import itself, these, and the modules at the bottom.
ALLOWED = {
    "record": set(),
    "run_writer": {"record"},
    "ingest": {"record", "curve"},
    "curve": {"record"},
    "report": {"record", "curve"},
    "rl": {"record", "run_writer"},
    "console": set(),
    "integrations": {"record", "run_writer", "ingest", "curve"},
    "serve": {"record", "ingest", "curve", "report"},
    "study": {"record", "run_writer", "curve", "report", "rl"},
    "plan": {"record", "curve", "rl"},
    "commands": {
        "record",
        "run_writer",
        "ingest",
        "curve",
        "report",
        "rl",
        "study",
        "plan",
        "console",
        "serve",
    },
}
BOTTOM = {
    *("errors", "_version", "_lazy", "_views", "alarms", "left_out", "files", "frames", "jsonl", "limits"),
    *("model_config", "run_cut", "run_folder", "tty"),
}


def imported(file: Path) -> set[str]:
    """The parts of scalerl that a file imports, anywhere in it."""
    parts = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        parts |= {name.split(".")[1] for name in names if name.startswith("scalerl.")}
    return parts


@pytest.mark.parametrize("part", sorted(ALLOWED))
def test_imports_point_one_way(part):
    place = SRC / part
    files = sorted(place.rglob("*.py")) if place.is_dir() else [SRC / f"{part}.py"]
    assert files
    for file in files:
        astray = imported(file) - ALLOWED[part] - BOTTOM - {part}
        assert not astray, f"{file} imports {sorted(astray)}"


def test_every_part_has_a_rule():
    parts = {path.stem for path in SRC.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert parts - {"__init__", "cli"} - BOTTOM == set(ALLOWED)


def test_the_light_half_loads_nothing_heavy():
    code = (
        "import sys, scalerl, scalerl.cli.main, scalerl.forecast.freeze, scalerl.ingest.formats.table, scalerl.view\n"
        "import scalerl.integrations, scalerl.plan.split, scalerl.plan.measured, scalerl.plan.cost\n"
        "names = 'torch transformers pydantic matplotlib rich jinja2 starlette uvicorn'\n"
        "heavy = set(names.split()) & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    _run_afresh(code)


def test_a_submodule_never_takes_the_place_of_its_function():
    code = (
        "import scalerl.curve.fit, scalerl.forecast.compare, scalerl.forecast.backtest\n"
        "from scalerl.curve import backtest, compare, fit\n"
        "assert callable(fit) and callable(compare) and callable(backtest)\n"
        "assert (scalerl.fit, scalerl.curve.fit) == (fit, fit)"
    )
    _run_afresh(code)


@pytest.mark.parametrize("package", ["scalerl", "scalerl.curve", "scalerl.integrations", "scalerl.view"])
def test_every_public_name_is_there(package):
    code = f"import {package} as p; [getattr(p, n) for n in p.__all__]; assert set(p.__all__) <= set(dir(p))"
    _run_afresh(code)


def test_a_fit_waits_for_no_other_command():
    code = (
        "import sys; from scalerl import fit\n"
        "late = {f'scalerl.curve.{name}' for name in ('backtest', 'compare', 'online')}\n"
        "assert not late & set(sys.modules), late & set(sys.modules)"
    )
    _run_afresh(code)


def test_the_table_of_a_fit_waits_for_no_page(tmp_path):
    """It has its rows and a formatter in common with the report, and nothing else."""
    log = tmp_path / "log.csv"
    rows = [f"{c},{0.61 - 0.21 / (1 + (c / 2500) ** 2)}" for c in range(0, 8001, 500)]
    log.write_text("\n".join(["gpu_hours,pass_rate", *rows]))
    code = (
        "import sys; from scalerl.cli.main import main\n"
        f"assert main(['fit', {str(log)!r}, '--worth', '1e-6']) == 0\n"
        "late = {name for name in sys.modules if name.startswith('scalerl.view.')}\n"
        "assert late == {'scalerl.view.run.fit_rows', 'scalerl.view.numbers'}, late"
    )
    _run_afresh(code)


def _run_afresh(code):
    subprocess.run([sys.executable, "-c", code], check=True)
