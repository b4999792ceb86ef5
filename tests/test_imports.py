"""The import rules: what points where, and what the light half never loads."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "scalerl"
ROOMS = (
    *(
        "errors",
        "_version",
        "_lazy",
        "_views",
        "tty",
        "limits",
        "files",
        "frames",
        "jsonl",
        "model_config",
        "own_code",
        "kinds",
        "numbers",
        "quantiles",
    ),
    *("record", "curve", "forecast"),
    *("ingest.vocabularies", "ingest.logs", "ingest.formats", "ingest.trackers", "ingest"),
    *("rl.types", "rl.algo", "rl.sandbox", "rl.tasks", "rl.config", "rl.model", "rl.kernels", "rl.workers"),
    *("rl.checkpoint", "rl.verify", "rl.sync", "rl.engine", "rl.learner", "rl.placement", "rl.health"),
    *("rl.loop", "rl.tracking", "rl.training_run", "rl.train", "rl.evaluate", "rl"),
    *("view.assets", "view.style", "view.table", "view.formats", "view.document"),
    *("view.facts", "view.plotting", "view.runs", "view.terminal"),
    *("view.notebook", "view.serve"),
    *("view", "integrations", "plan", "study", "cli", "__main__"),
)
"""From the bottom to the top: a room may import itself and those before it."""
APART = (
    ("rl", ("curve", "forecast", "ingest", "view", "study", "plan", "integrations", "cli")),
    ("curve", ("rl",)),
    ("forecast", ("rl", "ingest")),
    ("ingest", ("rl", "forecast")),
    ("view", ("rl",)),
    ("integrations", ("rl", "view")),
    ("plan", ("view", "ingest")),
)
"""Rooms that must not import some of those before them."""
_NAME = re.compile(r"scalerl(?:\.[a-z_]\w*)+")


def modules():
    """All modules of the package and their files."""
    for file in sorted(SRC.rglob("*.py")):
        yield ".".join(file.relative_to(SRC.parent).with_suffix("").parts).removesuffix(".__init__"), file


MODULES = dict(modules())
PACKAGES = {module for module, file in MODULES.items() if file.name == "__init__.py"}


def room(module):
    """The room that a module is in: the longest of the names."""
    name = module.removeprefix("scalerl.")
    return next((r for r in sorted(ROOMS, key=len, reverse=True) if f"{name}.".startswith(f"{r}.")), None)


def imported(module):
    """The modules that one imports, anywhere in it, or names in strings; of a lazy name its own."""
    tree = ast.parse(MODULES[module].read_text())
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import"
            package = node.module or ""
            below = {f"{package}.{alias.name}" for alias in node.names} & set(MODULES)
            homes = {lazy_home(package, alias.name) for alias in node.names} - {""}
            names |= below | homes or {package}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            names |= set(_NAME.findall(node.value))
    return names & (set(MODULES) - {"scalerl", module})


@cache
def lazy_homes(package):
    """The module of each name that a package offers lazily."""
    return {
        alias.name: imported.module or ""
        for block in ast.parse(MODULES[package].read_text()).body
        if isinstance(block, ast.If)
        for imported in block.body
        if isinstance(imported, ast.ImportFrom)
        for alias in imported.names
    }


def lazy_home(package, name):
    """The module that a name of a package is in, if the package offers it lazily; of such a name its home."""
    home = lazy_homes(package).get(name, "") if package in PACKAGES else ""
    return home and (lazy_home(home, name) or home)


IMPORTED = {module: imported(module) for module in MODULES}


def test_every_module_is_in_a_room():
    astray = [module for module in MODULES if module != "scalerl" and room(module) is None]
    assert not astray


@pytest.mark.parametrize("name", ROOMS)
def test_imports_point_down(name):
    allowed = ROOMS[: ROOMS.index(name) + 1]
    found = {
        f"{module} -> {other}"
        for module in MODULES
        if module != "scalerl" and room(module) == name
        for other in IMPORTED[module]
        if room(other) not in allowed and not is_package_of_lazy_names(module)
    }
    assert not found


def is_package_of_lazy_names(module):
    """Whether it is an `__init__.py`, which offers the names of the modules below it."""
    return MODULES[module].name == "__init__.py"


@pytest.mark.parametrize(("part", "others"), APART)
def test_halves_do_not_know_each_other(part, others):
    for module, found in IMPORTED.items():
        if f"{module}.".startswith(f"scalerl.{part}."):
            astray = [other for other in found if other.split(".")[1] in others]
            assert not astray, f"{module} imports {astray}"


def test_rooms_say_what_imports_them():
    for package in (module for module in MODULES if is_package_of_lazy_names(module) and module != "scalerl"):
        doc = " ".join(ast.get_docstring(ast.parse(MODULES[package].read_text())).split())
        said = re.search(r"Imported by ((?:`[\w.]+`(?:, )?)+)\.", doc)
        assert re.findall(r"`([\w.]+)`", said[1] if said else "") == importers_of(package), package


def importers_of(package):
    """The rooms with a module that imports one of a room: of other halves of the package the half."""
    half, found = package.split(".")[1], set()
    for module, names in IMPORTED.items():
        if any(folder_of(name) == package for name in names):
            by = folder_of(module)
            inside = f"{by}.".startswith(f"{package}.") or by == "scalerl" or is_package_of_lazy_names(module)
            found |= set() if inside else {by}
    parts = [by.split(".")[1:] for by in found]
    return sorted({".".join(part) if part[0] == half else part[0] for part in parts})


def folder_of(module):
    """The package that a module is in, or is."""
    return module if is_package_of_lazy_names(module) else module.rpartition(".")[0]


def test_no_modules_import_each_other_in_a_circle():
    graph = {module: IMPORTED[module] for module in MODULES if not is_package_of_lazy_names(module)}
    done, path = set(), []

    def visit(module):
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done and module in graph:
            path.append(module)
            for other in sorted(graph[module]):
                visit(other)
            done.add(path.pop())

    for module in graph:
        visit(module)


def test_no_module_is_imported_by_a_name_that_is_made_up_of_parts():
    """Those of `own_code` are the user's; every other name is whole, so that its edge is seen here."""
    for module, file in MODULES.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
                ("import_module", "__import__")
            ):
                assert "__package__" not in ast.unparse(node), module
                assert not isinstance(node.args[0], ast.JoinedStr), module


def test_no_class_has_the_name_of_another():
    found = {}
    for module, file in MODULES.items():
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module)
    assert {name: where for name, where in found.items() if len(where) > 1} == {}


def test_rooms_are_small_and_say_what_is_in_them():
    for folder in {file.parent for file in MODULES.values()} - {SRC}:
        assert len(list(folder.glob("*.py"))) <= 21, f"{folder} has more than 20 files and its __init__.py"
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), folder


def test_tests_are_where_what_they_test_is():
    tests = Path(__file__).parent
    rooms = {file.parent.relative_to(SRC) for file in MODULES.values()}
    found = {file.parent.relative_to(tests) for file in tests.rglob("test_*.py")}
    assert rooms - found == set()
    assert {folder for folder in found if not (SRC / folder).is_dir()} == set()
    names = [file.name for file in tests.rglob("test_*.py")]
    assert {name for name in names if names.count(name) > 1} == set()


def test_the_light_half_loads_nothing_heavy():
    code = (
        "import sys, scalerl, scalerl.cli.main, scalerl.forecast.freeze, scalerl.view\n"
        "import scalerl.ingest.formats.table\n"
        "import scalerl.integrations, scalerl.plan.split, scalerl.plan.measured\n"
        "names = 'torch transformers pydantic matplotlib rich jinja2 starlette uvicorn'\n"
        "heavy = set(names.split()) & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    _run_afresh(code)


def test_tasks_and_the_names_of_training_load_no_torch():
    """Workers that verify load the file of a task, and must fork from a small process."""
    code = (
        "import sys, scalerl.rl, scalerl.study\n"
        "from scalerl.rl import Chain, Dataset, Limits, Prompt, Reward, Task, Verifier\n"
        "assert not {'torch', 'transformers', 'pydantic'} & set(sys.modules)"
    )
    _run_afresh(code)


def test_a_submodule_never_takes_the_place_of_its_function():
    code = (
        "import scalerl.curve.fit, scalerl.forecast.compare, scalerl.forecast.backtest\n"
        "from scalerl.curve import fit\nfrom scalerl.forecast import backtest, compare\n"
        "assert callable(fit) and callable(compare) and callable(backtest)\n"
        "assert (scalerl.fit, scalerl.curve.fit) == (fit, fit)\n"
        "import scalerl.rl.train, scalerl.study.run.jobs, scalerl.study.verdict.arm_fits\n"
        "assert callable(scalerl.rl.train)\n"
        "assert callable(scalerl.study.run) and callable(scalerl.study.verdict)"
    )
    _run_afresh(code)


@pytest.mark.parametrize(
    "package",
    [
        *("scalerl", "scalerl.curve", "scalerl.forecast", "scalerl.integrations", "scalerl.view"),
        *("scalerl.ingest", "scalerl.rl", "scalerl.study"),
    ],
)
def test_every_public_name_is_there(package):
    code = f"import {package} as p; [getattr(p, n) for n in p.__all__]; assert set(p.__all__) <= set(dir(p))"
    _run_afresh(code)


def test_a_fit_waits_for_no_other_command():
    code = (
        "import sys; from scalerl import fit\n"
        "late = {f'scalerl.forecast.{name}' for name in ('backtest', 'compare', 'online')}\n"
        "assert not late & set(sys.modules), late & set(sys.modules)"
    )
    _run_afresh(code)


def test_the_table_of_a_fit_waits_for_no_page(tmp_path):
    """It has its rows, a formatter and a printer in common with the report and `watch`, and nothing else."""
    log = tmp_path / "log.csv"
    rows = [f"{c},{0.61 - 0.21 / (1 + (c / 2500) ** 2)}" for c in range(0, 8001, 500)]
    log.write_text("\n".join(["gpu_hours,pass_rate", *rows]))
    code = (
        "import sys; from scalerl.cli.main import main\n"
        f"assert main(['fit', {str(log)!r}, '--worth', '1e-6']) == 0\n"
        "late = {name for name in sys.modules if name.startswith('scalerl.view.')}\n"
        "known = ('facts', 'facts.fit_rows', 'numbers', 'terminal', 'terminal.rows')\n"
        "assert late <= {f'scalerl.view.{name}' for name in known}, late"
    )
    _run_afresh(code)


def _run_afresh(code):
    subprocess.run([sys.executable, "-c", code], check=True)
