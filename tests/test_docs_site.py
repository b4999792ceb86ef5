"""The documentation: its examples run and print what they show, its pages, names and messages are there."""

import ast
import importlib
import json
import re
import shlex
import subprocess
import sys
from dataclasses import is_dataclass
from typing import get_args, get_type_hints

import docs_examples
import pytest
import yaml

import scalerl
import scalerl.curve
import scalerl.ingest
import scalerl.rl
import scalerl.study
from scalerl.cli.main import _parser
from scalerl.ingest.vocabularies import ROLES, VOCABULARIES
from scalerl.kinds import choices_of

ROOT = docs_examples.ROOT
DOCS = docs_examples.DOCS
ALL = sorted(DOCS.rglob("*.md"))
PUBLIC = [scalerl, scalerl.curve, scalerl.rl, scalerl.study, scalerl.ingest]


def relative(page):
    return page.relative_to(DOCS).as_posix()


@pytest.fixture
def script(monkeypatch):
    """A module of scripts/, by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module


def check_alike(printed, shown):
    """The same words, and numbers that agree but for the last digits of the numerics."""
    number = r"\d+(?:\.\d+)?(?:e[-+]?\d+)?"
    assert re.sub(number, "#", printed.strip()) == re.sub(number, "#", shown.strip())
    found, said = ([float(text) for text in re.findall(number, page)] for page in (printed, shown))
    assert found == pytest.approx(said, rel=0.05, abs=0.005)


TRAINING = DOCS / "tutorials" / "train.md"
SHORT = [page for page in docs_examples.pages() if page != TRAINING]


@pytest.mark.slow
def test_the_tutorial_of_training_runs(tmp_path, monkeypatch):
    """Minutes of training; what it prints is of the machine."""
    monkeypatch.chdir(tmp_path)
    docs_examples.run_page(TRAINING, lambda block, printed: None)
    assert (tmp_path / "my-run" / "studies" / "three_arms" / "report.html").exists()


@pytest.mark.parametrize("name", ["forecast", "train"])
def test_the_notebooks_are_the_tutorials(name, script):
    """`python scripts/docs_notebooks.py` writes them; their cells are the blocks that run above."""
    docs_notebooks = script("docs_notebooks")
    notebook = json.loads(docs_notebooks.notebook_of(name).read_text())
    page = (DOCS / "tutorials" / f"{name}.md").read_text()
    assert notebook == docs_notebooks.notebook(page)
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(code) == len(list(docs_examples.blocks(page)))


def test_the_picture_of_the_readme_is_drawn(tmp_path, script):
    """From the run in examples/runs."""
    picture = tmp_path / "forecast.png"
    script("docs_pictures").forecast(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000


@pytest.mark.parametrize("page", SHORT, ids=relative)
def test_examples_print_what_is_shown(page, tmp_path, monkeypatch):
    """`python tests/support/docs_examples.py PAGE` writes what they print now."""
    monkeypatch.chdir(tmp_path)
    shown = []

    def take(block, printed):
        if block["before"]:
            shown.append(block["output"])
            check_alike(printed, block["output"])

    docs_examples.run_page(page, take)
    assert shown
    assert all(shown)


def test_the_pages_that_promise_examples_have_them():
    """Tutorials, trainers, and every how-to but those that train; nothing is passed over without a reason."""
    running = {relative(page) for page in docs_examples.pages()}
    promised = {relative(page) for page in ALL if page.parent.name in ("tutorials", "trainers", "howto")}
    training = "cluster code index plan resume studies tasks trackers train vllm watch python"
    assert promised - running == {f"howto/{name}.md" for name in training.split()}
    for page in docs_examples.pages():
        text = page.read_text()
        assert len(list(docs_examples.blocks(text))) + text.count("<!-- not run: ") == (
            text.count("```python\n") + len(re.findall(r"(?<!    scalerl)(?:^    scalerl .*\n)+", text, re.M))
        )


def test_every_item_of_a_list_begins_a_line():
    """A wrap at the dash of an item ends a line with it, and the item disappears in the one before."""
    torn = [
        f"{relative(page)}: {line}"
        for page in ALL
        for line in page.read_text().splitlines()
        if line.endswith(" -")
    ]
    assert not torn


def test_every_page_is_in_the_navigation():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = re.findall(r"[\w/.-]+\.md", str(nav))
    assert sorted(listed) == sorted(map(relative, ALL))


@pytest.mark.parametrize("page", ALL, ids=relative)
def test_commands_parse(page):
    """Every line that begins with `scalerl`; words in capitals stand for what the reader has."""
    for line in docs_examples.commands(page.read_text()):
        words = shlex.split(line, comments=True)[1:]
        end = next((i for i, word in enumerate(words) if word in ("|", ">", "&&", ";")), len(words))
        assert _parser().parse_args(words[:end]).run


@pytest.mark.parametrize("page", ALL, ids=relative)
def test_links_lead_to_files_and_headings(page):
    """As a code host shows the pages: MkDocs checks the links of the site."""
    for target, anchor in re.findall(r"\]\(([^()\s#]*)(?:#([^()\s]*))?\)", page.read_text()):
        if "://" in target:
            continue
        place = (page.parent / target).resolve() if target else page
        assert place.exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.*)$", place.read_text(), re.M)
            slugs = {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}
            assert anchor in slugs, (target, anchor)


def said_in_source():
    """Every text in the source, with … for what is filled in."""
    texts = []
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else "…" for v in node.values]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def test_messages_are_those_of_the_source():
    texts = said_in_source()
    messages = re.findall(r"^### `(.+)`$", (DOCS / "reference/errors.md").read_text(), re.M)
    assert len(messages) > 50
    assert len(set(messages)) == len(messages)
    for message in messages:
        parts = [part for part in message.split("…") if part.strip(" :;,()'")]
        pattern = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
        assert any(pattern.search(text) for text in texts), message


@pytest.mark.parametrize("package", PUBLIC, ids=lambda package: package.__name__)
def test_the_reference_has_every_public_name(package):
    """Each by the module that defines it, so that the directive and the public name are one object."""
    found = {}
    for module, name in re.findall(
        r"^::: ([\w.]+)\.(\w+)$", (DOCS / "reference" / "api.md").read_text(), re.M
    ):
        assert name not in found, name
        found[name] = getattr(importlib.import_module(module), name)
    for name in set(package.__all__) - {"__version__"}:
        assert found[name] is getattr(package, name)


@pytest.mark.parametrize("of", [scalerl.rl.Recipe, scalerl.study.Study])
def test_every_dataclass_of_a_field_is_public(of):
    """A recipe or a study can be written in Python by public names alone."""
    seen, left = set(), [of]
    while left:
        cls = left.pop()
        if cls in seen or not is_dataclass(cls):
            left += [part for part in get_args(cls) if cls not in seen]
            continue
        seen.add(cls)
        left += [*get_type_hints(cls).values(), *(choice.built_in for choice in choices_of(cls).values())]
    assert scalerl.rl.Dapo in seen
    for cls in seen:
        package = scalerl.rl if cls.__module__.startswith("scalerl.rl.") else scalerl.study
        assert cls is getattr(package, cls.__name__, None), cls


def test_the_tables_have_every_argument_key_and_role(script):
    tables = script("docs_tables")
    from scalerl.rl.config.form import _keys
    from scalerl.rl.config.recipe import Recipe

    commands, recipe = tables.commands(), tables.recipe()
    for name in ("fit", "compare", "backtest", "report", "ingest", "train", "study", "demo"):
        assert f"\n    scalerl {name} " in commands
    assert "`--prior-from RUN ...`" in commands
    for key in _keys(Recipe):
        if key.rpartition(".")[2] != "kind":
            assert f"`{key}`" in recipe or f"[`[{key}]`]" in recipe, key
    assert set(tables.MEANINGS) == set(ROLES)
    for vocabulary in VOCABULARIES:
        page = tables.metrics(vocabulary.trainer)
        assert all(f"`{name}`" in page for role in ROLES for name in getattr(vocabulary, role))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('<script src="https://cdn.net/x.js"></script><a href="https://a.org">', ["https://cdn.net/x.js"]),
        ("<link rel=stylesheet href=//fonts.net/css>", ["//fonts.net/css"]),
        ('<link rel="canonical" href="https://here.org/a.html"><img src="demo.png">', []),
    ],
)
def test_what_a_page_would_fetch_is_found(script, text, found):
    pytest.importorskip("mkdocs")
    hooks = script("docs_hooks")
    assert hooks.fetched(text, ".html") == found
    assert hooks.fetched('@import url("https://x.net/a.css"); a { b: url(data:c) }', ".css") == [
        "https://x.net/a.css"
    ]


def test_links_out_of_the_pages_become_paths(script):
    pytest.importorskip("mkdocs")
    hooks = script("docs_hooks")

    def linked(text, folder="docs"):
        return hooks._LINK.sub(lambda found: hooks.link(found, folder), text)

    assert linked("[three](../examples/three_arms.toml)") == "three (`examples/three_arms.toml`)"
    assert linked("[examples/a.py](../examples/a.py)") == "`examples/a.py`"
    assert linked("[trl.py](../../src/trl.py)", "docs/trainers") == "`src/trl.py`"
    assert (
        linked("[json.md](json.md), [here](#a)", "docs/reference")
        == "[What `--json` prints](json.md), [here](#a)"
    )
    assert linked("[out](https://a.org/b)") == "[out](https://a.org/b)"


def build(root, place):
    """What `make docs` does, in `root`: exit status and output."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = re.search(r"-m (mkdocs build .*)$", (ROOT / "Makefile").read_text(), re.M)
    assert command
    words = [sys.executable, "-m", *shlex.split(command[1]), "--site-dir", str(place)]
    done = subprocess.run(words, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


def test_the_site_builds_strictly(tmp_path):
    status, output = build(ROOT, tmp_path)
    assert status == 0, output
    pages = {page.relative_to(tmp_path).as_posix(): page.read_text() for page in tmp_path.rglob("*.html")}
    assert {relative(page).removesuffix("md") + "html" for page in ALL} == set(pages) - {"404.html"}
    assert not [page for page, text in pages.items() if "<!-- table:" in text or "../src/" in text]
    for page, said in {
        "reference/command-line": "--prior-from RUN ...",
        "reference/recipe": "optimiser.warmup_steps",
        "reference/metrics": "val-core/{set}/acc/mean@*",
        "reference/api": "scalerl.forecast.online.Forecaster.callback",
    }.items():
        assert said in pages[f"{page}.html"]
    index = (tmp_path / "search" / "search_index.js").read_text()
    assert "forced interruptions" in index


@pytest.mark.parametrize(
    ("page", "text", "said"),
    [
        ("index.md", "[x](gone.md)", "'gone.md', but the target is not found"),
        ("index.md", "[x](other.md#nowhere)", "does not contain an anchor '#nowhere'"),
        ("more.md", "# More", 'not included in the "nav"'),
        ("index.md", "![x](https://cdn.net/x.png)", "loads https://cdn.net/x.png"),
    ],
)
def test_what_is_broken_stops_the_build(tmp_path, page, text, said):
    """With the site's own configuration, on two pages."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    kept = {key: config[key] for key in ("validation", "hooks", "theme", "extra", "plugins", "strict")}
    kept["plugins"] = ["search", "offline"]
    nav = {"site_name": "x", "nav": ["index.md", "other.md"], **kept}
    (tmp_path / "docs").mkdir()
    for name in ("index.md", "other.md"):
        (tmp_path / "docs" / name).write_text("# A page\n")
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(nav))
    assert build(tmp_path, tmp_path / "sound")[0] == 0
    (tmp_path / "docs" / page).write_text(f"# A page\n\n{text}\n")
    status, output = build(tmp_path, tmp_path / "site")
    assert status != 0
    assert said in output


def test_the_table_of_a_cluster_has_every_key_with_its_default(script):
    """Those of the learner and of vLLM are on pages of their own."""
    tables = script("docs_tables")
    from scalerl.rl.config.cluster import Cluster

    rows = re.findall(r"^\| (`cluster\.\S+`) \| (`\S+`) \|", (DOCS / "howto/cluster.md").read_text(), re.M)
    kinds = {("`cluster.learner.kind`", "`one`")}
    kinds.add(("`cluster.transport.kind`", "`object_store`"))
    keys = {(key, default) for key, default, _ in tables._rows(Cluster, "cluster") if default}
    assert set(rows) == kinds | {row for row in keys if not row[0].startswith("`cluster.learner.")}
