"""Pages in the browser of all tests, without a network; and what they are of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hostile_study
import numpy as np
import pytest
from mixed_runs import write_mixed
from simulated_runs import BUDGET, HOSTILE, write_run, write_table

from scalerl.curve import Points, fit
from scalerl.forecast.compare import compare
from scalerl.record.reader import RunRecord
from scalerl.study.page.figures import study_figures
from scalerl.study.page.page import study_document
from scalerl.view import write_report
from scalerl.view.assets import write_text
from scalerl.view.facts.shown import ShownRun
from scalerl.view.runs.gathered import RunsView
from scalerl.view.runs.page import runs_document


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a file; the test fails where the page asks for anything else, or says that something is wrong."""
    wrong: list[str] = []
    contexts = []

    def judge(route: Any) -> None:
        if route.request.url.startswith("file://"):
            route.continue_()
        else:
            wrong.append(f"asked for {route.request.url}")
            route.abort()

    def visit(path: Path, width: int = 1280, scheme: str = "light") -> Any:
        size: Any = {"width": width, "height": 900}
        context = browser.new_context(viewport=size, color_scheme=scheme, offline=True)
        contexts.append(context)
        context.route("**/*", judge)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on(
            "console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None
        )
        page.goto(path.as_uri())
        return page

    yield visit
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture
def charted(visit: Callable[..., Any], pages: Any) -> Callable[..., Any]:
    """Opens the page of a kind, and waits until its chart is drawn."""

    def charted(kind: str, *size: Any, **look: Any) -> Any:
        page = visit(pages[kind], *size, **look)
        page.wait_for_selector("#chart[data-drawn]")
        return page

    return charted


@pytest.fixture(scope="session")
def shown(tmp_path_factory: pytest.TempPathFactory) -> RunsView:
    """Two runs, one with a hostile name, and one that cannot be fitted; a budget and a target."""
    folder = tmp_path_factory.mktemp("runs")
    runs = []
    for name, A, seed in (("base", 0.6, 0), (HOSTILE, 0.5, 1), ("flat", 0.3, 2)):
        record = RunRecord.read(write_run(folder / str(seed), name, A, seed))
        run = ShownRun(name, Points.from_record(record, "gpu_hours"), record)
        runs.append(run.fitted_with())
    fits = {run.name: [run.fit] for run in runs if run.fit is not None}
    comparison = compare(fits, budget=16_000.0, target=0.55)
    recipes = {run.name: [run] for run in runs}
    return RunsView(tuple(runs), budget=16_000.0, target=0.55, recipes=recipes, comparison=comparison)


class Pages(dict[str, Path]):
    """Pages by what they are of, each written when it is first asked for: some take half a minute."""

    def __init__(self, write: dict[str, Callable[[], Path]]) -> None:
        self._write = write

    def __missing__(self, kind: str) -> Path:
        self[kind] = path = self._write[kind]()
        return path


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory, shown: RunsView) -> Pages:
    """Pages of every kind."""
    folder = tmp_path_factory.mktemp("pages <i>")
    record, found = shown.runs[1].record, shown.runs[0].fit
    assert record is not None
    assert found is not None
    near = float(found.median.A) - 0.008  # a target whose text is beside that of the ceiling
    one = RunsView(shown.runs[:1], budget=16_000.0, target=near)
    return Pages(
        {
            "several": lambda: _written(shown, folder / "several.html"),
            "hundred": lambda: _written(_hundred(shown), folder / "hundred.html"),
            "long": lambda: _written(_long(folder), folder / "long.html"),
            "one": lambda: _written(one, folder / "one.html"),
            "run": lambda: write_report(record, out=folder / "run.html"),
            "study": lambda: _study(folder),
            "groups": lambda: _written(_groups(folder), folder / "groups.html"),
            "mixed": lambda: write_report(write_mixed(folder / "mixed"), out=folder / "mixed.html"),
        }
    )


def _study(folder: Path) -> Path:
    arms = dict(list(hostile_study.ARMS.items())[::2])  # the base, and a name that is a script
    study = hostile_study.build(folder / "study", arms)
    document = study_document(study, folder, study_figures(study))
    return write_text(folder / "study.html", document.html())


def _written(view: RunsView, path: Path) -> Path:
    return write_text(path, runs_document(view).html())


def _groups(folder: Path) -> RunsView:
    """Four recipes of two seeds each, whose curves end close to one another."""
    runs = []
    for n, A in enumerate((0.55, 0.56, 0.57, 0.7)):
        for seed in (0, 1):
            recipe = {"lr": 1e-4 * (1 + n // 2), "kind": n}
            path = write_run(folder / f"g{n}{seed}", f"recipe {n}-{seed}", A, 2 * n + seed, recipe=recipe)
            record = RunRecord.read(path)
            points = Points.from_record(record, "gpu_hours")
            runs.append(ShownRun(record.name, points, record, fit(points)))
    return RunsView(tuple(runs), budget=16_000.0, target=0.55, not_compared="Nothing is compared.")


def _hundred(shown: RunsView) -> RunsView:
    """A hundred runs that share five fits: what makes a page heavy is what it draws."""
    rng = np.random.default_rng(0)
    base = shown.runs[0].points
    drawn = [replace(base, pass_rate_N=base.pass_rate_N - 0.02 * i) for i in range(5)]
    fits = [fit(points) for points in drawn]
    runs = []
    for i in range(100):
        noise_N = rng.normal(0, 0.005, len(base))
        points = replace(drawn[i % 5], pass_rate_N=drawn[i % 5].pass_rate_N + noise_N)
        runs.append(ShownRun(f"run {i}", points, shown.runs[0].record, fits[i % 5]))
    return RunsView(tuple(runs), not_compared="Nothing is compared.")


def _long(folder: Path) -> RunsView:
    from scalerl.ingest.formats.table import read_table

    points = read_table(write_table(folder / "long.csv", 10_000), "gpu_hours", "pass_rate", None)
    run = ShownRun("long", points, None, fit(points))
    return RunsView((run,), budget=2 * BUDGET, not_compared="Nothing is compared.")
