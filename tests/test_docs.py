"""docs/reference/json.md lists every key that is printed and no other; the guide shows what `fit` prints."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import example_files
import numpy as np
import pytest
from growing import Growing
from small_demo import small_demo

from scalerl.cli.main import main
from scalerl.curve import FAMILIES, LOG_LOGISTIC, Curve
from scalerl.forecast.backtest_result import OURS
from scalerl.forecast.freeze import freeze
from scalerl.forecast.rivals import BANK_RIVALS, RIVALS
from scalerl.forecast.sides import quantities
from scalerl.study.record import StudyRecord
from scalerl.study.verdict.verdict import judge_study

DOCS = Path(__file__).parent.parent / "docs"
SECTIONS = dict(
    re.findall(r"^## (scalerl .*?)\n(.*?)(?=^## |\Z)", (DOCS / "reference/json.md").read_text(), re.S | re.M)
)
NAMES: dict[str, str] = {family.name: "FAMILY" for family in FAMILIES} | dict.fromkeys(
    (OURS, *RIVALS, *BANK_RIVALS), "METHOD"
)


@pytest.fixture
def tables(tmp_path):
    """Eight runs of one recipe as CSV: the first to 4 C_mid."""
    curve, rng = Curve(LOG_LOGISTIC, 0.61, 1.9, 2500.0, 0.3), np.random.default_rng(0)
    compute_N = np.linspace(0, 10_000, 26)
    paths = []
    for i in range(8):
        paths.append(tmp_path / f"RECIPE-{i}.csv")
        y_N = curve(compute_N) + rng.normal(0, 0.006, len(compute_N))
        rows = [f"{c:g},{y:.4f}" for c, y in zip(compute_N, y_N, strict=True)]
        paths[-1].write_text("\n".join(["gpu_hours,pass_rate", *rows]))
    return [str(path) for path in paths]


def printed(capsys, *words):
    assert main(words) == 0
    return json.loads(capsys.readouterr().out)


def renamed(key: str) -> str:
    return NAMES.get(key, key)


def with_quantities(answer):
    """The same, the quantities of arms under one name."""
    arms = [
        arm | {"quantities": {"QUANTITY": one for one in arm["quantities"].values()}}  # noqa: B035
        for arm in answer["arms"]
    ]
    return answer | {"arms": arms}


def paths(value, path=""):
    """The path of every value that holds no further keys; the names of recipes, methods, families aside."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            name = re.sub(r"RECIPE-\d", "RECIPE", renamed(key))
            yield from paths(item, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for item in value:
            yield from paths(item, f"{path}[]")
    else:
        yield path


def expanded(text):
    """`a.{b, c}` as a.b and a.c."""
    head, brace, rest = text.partition("{")
    if not brace:
        return [text]
    inside, _, tail = rest.partition("}")
    return [end for part in inside.split(",") for end in expanded(head + part.strip() + tail)]


def listed(section):
    cells = re.findall(r"^\| (`.*?) \|", SECTIONS[section], flags=re.M)
    return {path for cell in cells for text in re.findall(r"`([^`]+)`", cell) for path in expanded(text)}


def check(section, answer):
    """The same keys on both sides; what is null or empty may be listed with the keys that it can have."""
    found, said = set(paths(answer)), listed(section)
    below = {
        path: [other for other in found | said if other.startswith((f"{path}.", f"{path}[]."))]
        for path in found
    }
    assert {path for path in found - said if not below[path]} == set()
    parents = [path for path in found if below[path]]
    astray = {
        path
        for path in said - found
        if not any(path.startswith((f"{parent}.", f"{parent}[].")) for parent in parents)
    }
    assert astray == set()


def check_alike(output, shown):
    """The same words, and numbers that agree but for the last digits of the numerics."""
    number = r"\d+(?:\.\d+)?(?:e[-+]?\d+)?"
    assert re.sub(number, "#", output) == re.sub(number, "#", shown)
    found, said = ([float(text) for text in re.findall(number, page)] for page in (output, shown))
    np.testing.assert_allclose(found, said, rtol=0.05, atol=0.005)


def test_every_key_of_fit(tables, capsys):
    asked = ["--at", "20000", "--target", ".58", "--budget", "20000", "--worth", "1e-6"]
    more = ["--sensitivity", "--cross-check", "--prior-from", *tables[1:]]
    answer = printed(capsys, "fit", tables[0], *asked, *more, "--json")
    plain = printed(capsys, "fit", tables[0], *asked[:6], "--json")
    campaign = answer.pop("campaign")
    assert campaign.keys() == plain.keys()
    check("scalerl fit", answer | {"campaign": None})


def test_every_key_of_paper_mode(tables, capsys):
    check("scalerl fit --paper", printed(capsys, "fit", tables[0], "--paper", "--at", "20000", "--json"))


def test_every_key_of_compare(tables, capsys):
    asked = ["--budget", "20000", "--target", ".58", "--json"]
    check("scalerl compare", printed(capsys, "compare", *tables[:2], *asked))


def test_every_key_of_a_report(tables, tmp_path, capsys):
    words = ["--budget", "20000", "-o", str(tmp_path / "p.html"), "--json"]
    answer = printed(capsys, "report", *tables[:2], *words)
    fitted = printed(capsys, "fit", tables[0], "--at", "20000", "--json")
    fitted["forecast"].pop()  # at ten times the data
    assert answer["runs"][0].pop("fit") == fitted
    compared = printed(capsys, "compare", *tables[:2], "--budget", "20000", "--json")
    for pair in compared["pairs"]:
        del pair["paired_prompts"], pair["paper"]
    by_command_alone = {name: compared[name] for name in ("sources", "unread", "warnings")}
    assert answer.pop("comparison") | by_command_alone == compared
    for run in answer["runs"]:
        run["fit"] = None
    check("scalerl report", answer | {"comparison": None})


def test_every_key_of_backtest(tables, capsys):
    check("scalerl backtest", printed(capsys, "backtest", tables[0], "--at", "1/4,1/2", "--json"))
    bank = printed(capsys, "backtest", "--bank", str(Path(tables[0]).parent), "--at", "1/8,1/4", "--json")
    check("scalerl backtest", bank)


def test_every_key_of_watch(tmp_path, capsys):
    run = Growing(tmp_path / "run", 12)
    run.alarm(100)
    check("scalerl watch", printed(capsys, "watch", str(run.path), "--once", "--json", "--target", ".5"))


def test_every_key_of_a_study(studies, tmp_path):
    """A study with what there can be: a run without a fit, an arm without one, an alarm, forecasts."""
    truth, dead = studies.Truth, dict.fromkeys(range(3), -1)
    arms = {"RECIPE-0": truth(), "RECIPE-1": truth(last={1: -1}), "RECIPE-2": truth(last=dead)}
    path = studies.write(tmp_path, arms, seeds=3)
    run = StudyRecord.read(path).runs[0]
    alarm = {"step": 9, "metric": "truncated", "level": "alarm", "worst": 0.2, "threshold": 0.1, "since": 9}
    studies.lines(path / run.plan.folder / "alarms.jsonl", [alarm])
    assert run.record
    rows = [freeze(replace(run.record, evals=run.record.evals[:n]), "flops", 10_000.0) for n in (13, 26)]
    studies.lines(path / "forecasts.jsonl", [{"run": run.plan.key, **row} for row in rows])
    answer = json.loads(json.dumps(judge_study(StudyRecord.read(path), target=0.55).to_json()))
    assert answer["arms"][0]["stability"]["alarms"] == [{"metric": "truncated", "runs": 1}]
    assert set(answer["arms"][0]["quantities"]) == set(quantities(1.0, 0.5))
    check("scalerl study", with_quantities(answer) | {"comparison": None})
    keys = [path.split(".") for path in listed("scalerl compare")]
    assert set(answer["comparison"]) == {key[0].removesuffix("[]") for key in keys} - {
        "sources",
        "unread",
        "warnings",
    }
    of_pairs = {key[1].removesuffix("[]") for key in keys if key[0] == "pairs[]"}
    assert set(answer["comparison"]["pairs"][0]) == of_pairs - {"paired_prompts", "paper"}


def test_every_key_of_ingest(tmp_path, capsys):
    example_files.write(tmp_path)
    words = ["ingest", str(tmp_path / "verl.jsonl"), "-o", str(tmp_path / "run"), "--json"]
    answer = printed(capsys, *words)
    assert "pass rate" in answer["runs"][0]["taken"]
    check("scalerl ingest", answer | {"runs": [answer["runs"][0] | {"taken": {"WHAT": ""}}]})


def test_every_key_of_plan(capsys):
    words = ["--rates", "h100-8b", "--generators", "2", "--trainers", "1", "--steps", "2", "--json"]
    answer = printed(capsys, "plan", "demo", "--set", "schedule.k=0", *words)
    check("scalerl plan", answer)


def test_every_key_of_a_dry_run(capsys):
    study = str(DOCS.parent / "examples" / "three_arms.toml")
    answer = printed(capsys, "study", study, "--dry-run", "--cores", "2", "--json")
    assert answer["runs"] == sum(arm["runs"] for arm in answer["arms"]) == 9
    assert [arm["changes"] for arm in answer["arms"]][:2] == [{}, {"loss": {"kind": "dapo"}}]
    assert answer["gpu_hours"] is None
    check("scalerl study --dry-run", answer | {"arms": [arm | {"changes": None} for arm in answer["arms"]]})


def test_every_key_of_train(small_base, tmp_path, capsys):
    sets = small_demo(36, 12, f"model={small_base}", "evaluation.forecast_at=[0.6, 0.7]")
    words = ["train", "demo", "-o", str(tmp_path / "run"), *(w for s in sets for w in ("--set", s))]
    cut = printed(capsys, *words, "--until", "18", "--json")
    assert (cut["status"], cut["step"], cut["forecast"]) == ("cut", 18, None)
    answer = printed(capsys, "train", str(tmp_path / "run"), "--resume", "--json")
    assert (answer["status"], answer["step"], answer["evaluations"]) == ("finished", 36, 13)
    check("scalerl train, scalerl demo", answer)
    last = json.loads((tmp_path / "run" / "evals.jsonl").read_text().splitlines()[-1])
    forecast = answer["forecast"]
    assert answer["pass_rate"] == forecast["measured"] == last["pass_rate"]
    low, high = forecast["prediction"]
    assert forecast["outcome"] == ("inside" if low <= last["pass_rate"] <= high else "outside")
    assert answer["compute"]["flops"] == sum(last["flops"].values())


def test_the_guide_shows_what_fit_prints(tmp_path, monkeypatch, capsys):
    guide = (DOCS / "explanation/forecast.md").read_text()
    example = (DOCS.parent / "examples" / "fit_a_log.py").read_text()
    shown = r"    scalerl (fit log.csv [^\n]*)\n\n```\n(.*?)```"
    command, output = re.findall(shown, guide, flags=re.S)[0]
    arrays = re.findall(r"^(?:gpu_hours|pass_rate) = np.array\(\s*\[(.*?)\]", example, flags=re.S | re.M)
    rows = zip(*(array.split(", ") for array in arrays), strict=True)
    (tmp_path / "log.csv").write_text("\n".join(["gpu_hours,pass_rate", *map(",".join, rows)]))
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 0
    check_alike(capsys.readouterr().out, output)


def test_the_comparison_shown_is_that_of_the_example():
    shown = re.findall(r"```\n(.*?)```", (DOCS / "explanation/compare.md").read_text(), flags=re.S)[0]
    example = DOCS.parent / "examples" / "compare_recipes.py"
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, check=True)
    check_alike(done.stdout, shown)


def test_what_is_said_of_the_papers_rule_is_what_its_benchmark_prints():
    """Without noise it is run again; the shares with noise are those of the table."""
    script = DOCS.parent / "benchmarks" / "paper_rule.py"
    done = subprocess.run(
        [sys.executable, str(script), "--pairs", "0"], capture_output=True, text=True, check=True
    )
    results = (DOCS.parent / "benchmarks" / "RESULTS.md").read_text()
    table = re.findall(r"paper_rule.py\n\n```\n(.*?)\n```", results, flags=re.S)[0].splitlines()
    assert done.stdout.splitlines() == [*table[:5], *table[-2:]]
    said = " ".join((DOCS / "explanation/compare.md").read_text().split())
    without, noisy = (np.array([line.split() for line in of], float) for of in (table[1:5], table[5:-2]))
    apart = [f"{value:.3f}"[1:] for value in without[:, 1]]
    moved = [f"{value:.2f}"[1:] for value in without[:, 3]]
    words = "differ by {}, {}, {} and {} make B appear to differ by {}, {}, {} and {}."
    assert words.format(*apart, *moved) in said
    shares = f"{100 * noisy[:, 4].min():.0f} to {100 * noisy[:, 4].max():.0f} %"
    assert f"gets the higher B in {shares}" in said
    source = (DOCS.parent / "src" / "scalerl" / "forecast" / "paper.py").read_text()
    assert shares in source
    at_2, at_1_6, at_1 = (text.split()[0][1:] for text in table[-1].partition(": ")[2].split(", "))
    assert f"standard error is {at_2} at 2 C_mid, {at_1_6} at 1.6, {at_1} at 1)" in source
