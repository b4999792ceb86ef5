"""`scalerl report` of six simulated runs, and what its page holds."""

import json
import re

from simulated_runs import HOSTILE, write_run, write_table

from scalerl.cli.main import main

ALL = ("a0", "a1", "b", "flat", "short", "tab.csv")


def write_reported(folder):
    """Two seeds of a recipe, another with a hostile name, a flat one, a short one, and a table."""
    write_run(folder / "a0", "base", seed=0, recipe={"loss": "cispo", "seed": 0, "health": {}})
    write_run(folder / "a1", "base", seed=1, recipe={"loss": "cispo", "seed": 1, "health": {}})
    write_run(folder / "b", HOSTILE, 0.5, 2, recipe={"loss": "dapo"})
    write_run(folder / "flat", "flat", 0.3, 3, recipe={"loss": "none"})
    write_run(folder / "short", "short", seed=4, n=3, recipe={"loss": "short"}, forecast=False)
    write_table(folder / "tab.csv", 30)
    return folder


def report(runs, *words, sources=ALL):
    """The exit status of the command."""
    return main(["report", *(str(runs / name) for name in sources), *map(str, words)])


def data_of(page):
    """What the chart of a page is drawn from."""
    return json.loads(re.findall(r'<script type="application/json" id="runs">(.*?)</script>', page)[0])
