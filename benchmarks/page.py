"""How long `scalerl report` takes, and a browser until it shows the page (first contentful paint).

    python benchmarks/page.py [--runs 100] [--evaluations 1000]

One run of 25 evaluations, one of as many as asked for, and as many runs of as many, as tables. The browser is
Chromium, by Playwright; paint and chart are medians of five visits. The command is measured in processor
seconds, which other work on the machine hardly changes.
"""

from __future__ import annotations

import argparse
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from playwright.sync_api import sync_playwright

from scalerl.curve import LOG_LOGISTIC, Curve, fit
from scalerl.ingest.formats.table import read_table
from scalerl.view.assets import write_text
from scalerl.view.facts.shown import ShownRun
from scalerl.view.runs.gathered import RunsView
from scalerl.view.runs.page import runs_document

_PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime"


def write_table(path: Path, seed: int, n: int) -> Path:
    """Write a run of `n` evaluations along a known curve."""
    rng = np.random.default_rng(seed)
    compute_N = np.linspace(0, 12_000, n)
    rate_N = Curve(LOG_LOGISTIC, 0.6 - 0.02 * seed, 1.9, 2500.0, 0.3)(compute_N) + rng.normal(0, 0.006, n)
    rows = (f"{compute:.2f},{rate:.4f}\n" for compute, rate in zip(compute_N, rate_N, strict=True))
    path.write_text(f"gpu_hours,pass_rate\n{''.join(rows)}")
    return path


def report(folder: Path, evaluations: int) -> tuple[Path, float]:
    """Write the page of one run; return it and the CPU seconds of the command."""
    table = write_table(folder / "run.csv", 0, evaluations)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    words = [sys.executable, "-m", "scalerl", "report", str(table), "-o", str(folder / "page.html")]
    subprocess.run(words, check=True, capture_output=True)
    return folder / "page.html", resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def many(folder: Path, runs: int, evaluations: int) -> Path:
    """Write the page of many runs, which share five fits, as only what is drawn makes a page heavy."""
    points = [read_table(write_table(folder / f"{n}.csv", n, evaluations)) for n in range(5)]
    fits = [fit(one) for one in points]
    shown = (ShownRun(f"run {n}", points[n % 5], None, fits[n % 5]) for n in range(runs))
    document = runs_document(RunsView(tuple(shown), not_compared="Nothing is compared."))
    return write_text(folder / "page.html", document.html())


def visit(page: Path) -> tuple[float, float]:
    """Return median seconds to a browser's first contentful paint, and to the chart being drawn."""
    paints, charts = [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for _ in range(5):
            tab = browser.new_page()
            started = time.perf_counter()
            tab.goto(page.as_uri())
            tab.wait_for_selector("#chart[data-drawn]", timeout=60_000)
            charts.append(time.perf_counter() - started)
            paints.append(tab.evaluate(_PAINT) / 1000)
            tab.close()
        browser.close()
    return statistics.median(paints), statistics.median(charts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--evaluations", type=int, default=1000)
    args = parser.parse_args()
    print("| runs | evaluations each | report, CPU s | page, MB | first paint, s | chart drawn, s |")
    print("|---|---|---|---|---|---|")
    for runs, evaluations in ((1, 25), (1, args.evaluations), (args.runs, args.evaluations)):
        with tempfile.TemporaryDirectory() as folder:
            made = report(Path(folder), evaluations) if runs == 1 else None
            page, took = made or (many(Path(folder), runs, evaluations), math.nan)
            found = (took, page.stat().st_size / 1e6, *visit(page))
        print(f"| {runs} | {evaluations:,} | {' | '.join(f'{value:.2f}' for value in found)} |", flush=True)


if __name__ == "__main__":
    main()
