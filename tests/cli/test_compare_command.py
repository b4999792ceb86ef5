import json
import re
from pathlib import Path

import example_files
import numpy as np
import pytest

from scalerl.cli.main import main
from scalerl.curve import LOG_LOGISTIC, Curve
from scalerl.record.evaluation import EvalPoint
from scalerl.record.writer import RunWriter


def write_run(folder, seed, C_mid=2500.0, lr=1e-5, name="mine", base=0):
    """A run folder of 16 evaluations on 100 prompts, 10 samples each, from the base model of a seed."""
    rng = np.random.default_rng(seed)
    recipe = {"name": name, "seed": seed, "optimiser": {"lr": lr}, "model": f"chain-base:seed={base}"}
    model = {"path": f"models/{base}"}
    writer = RunWriter(folder, {"name": name, "seed": seed, "recipe": recipe, "model": model})
    truth = Curve(LOG_LOGISTIC, 0.61 + 0.03 * base, 1.92, C_mid, 0.40)
    for step in range(0, 12_001, 800):
        correct_P = rng.binomial(1000, float(truth(step)), 100)
        point = EvalPoint(step, float(correct_P.mean()) / 1000, n_prompts=100, n_samples=1000)
        writer.evaluation(point, "set", [str(i) for i in range(100)], correct_P)
    return str(folder)


@pytest.fixture
def runs(tmp_path):
    mine = [write_run(tmp_path / f"mine-{seed}", seed) for seed in (0, 1)]
    return [*mine, *(write_run(tmp_path / f"fast-{seed}", seed, 1250.0, 2e-5, "fast") for seed in (2, 3))]


def write_table(path, seed, A=0.61):
    compute_N = np.linspace(0, 12_000, 16)
    y_N = Curve(LOG_LOGISTIC, A, 1.92, 2500.0, 0.40)(compute_N) + np.random.default_rng(seed).normal(
        0, 0.003, 16
    )
    lines = ["hours,accuracy", *(f"{c},{y}" for c, y in zip(compute_N, y_N, strict=True))]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_a_table_with_steps_beside_its_hours_has_both_axes(tmp_path, capsys):
    hours, steps = tmp_path / "hours.csv", tmp_path / "steps.csv"
    hours.write_text("step,gpu_hours,acc\n" + "".join(f"{n},{2 * n},.{n}\n" for n in range(10, 20)))
    steps.write_text("step,acc\n" + "".join(f"{n},.{n}\n" for n in range(10, 20)))
    assert main(["compare", str(hours), str(steps), "--y", "acc"]) == 2
    assert "is on steps; all have steps: choose --x steps" in capsys.readouterr().err


def test_runs_on_two_axes_are_refused_with_the_one_that_would_do(tmp_path, capsys):
    """A run with a budget in steps, beside a log of another trainer that has GPU-hours first."""
    example_files.write(tmp_path)
    config = tmp_path / "runs" / "mine" / "config.json"
    config.write_text(json.dumps({"name": "m", "budget": {"kind": "steps", "amount": 100}}))
    sides = [str(tmp_path / "runs" / "mine"), str(tmp_path / "verl.jsonl")]
    assert main(["compare", *sides]) == 2
    err = capsys.readouterr().err
    assert f"'{sides[0]}' is on steps, '{sides[1]}' is on gpu_hours; all have steps" in err
    (axis,) = re.findall(r"choose --x (\w+)", err)
    assert main(["compare", *sides, "--x", axis]) == 2
    assert "runs of different metrics are not compared" in capsys.readouterr().err
    sides += ["--y", "val-core/*"]
    assert main(["compare", *sides, "--x", axis]) == 0
    capsys.readouterr()
    assert main(["compare", *sides, "--x", "gpu_hours"]) == 2  # hours of one device, beside those of all
    err = capsys.readouterr().err
    assert f"'{sides[1]}' does not say on how many devices it ran" in err
    assert main(["compare", *sides, "--x", "gpu_hours", "--devices", "8"]) == 0
    assert main(["compare", *sides, "--x", axis, "--devices", "1"]) == 0  # one of them is a log
    alone = write_run(tmp_path / "alone", 0)
    assert main(["compare", alone, str(tmp_path / "log.csv")]) == 2
    assert f"none is common: '{alone}' has steps; " in capsys.readouterr().err


def test_runs_are_grouped_by_recipe(runs, capsys):
    assert main(["compare", *runs, "--x", "steps", "--budget", "20000", "--json"]) == 0
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert err == ""
    assert data["base"] == "mine"
    assert data["sources"] == {"mine": runs[:2], "fast": runs[2:]}
    (pair,) = data["pairs"]
    assert pair["efficiency"]["verdict"] == "reaches it sooner"
    assert pair["differences"]["C_mid"]["median"] == pytest.approx(0.5, abs=0.05)
    assert pair["paired_prompts"]["n_prompts"] == 100
    assert pair["paired_prompts"]["matched_at"] == 12_000
    assert pair["paper"]["by"] == "B"
    for paper in (*pair["paper"]["compared"], *pair["paper"]["separate"]):
        assert paper["r0"]["source"] == "measured"


def test_the_table_says_the_same_as_the_json(runs, capsys):
    assert main(["compare", *runs, "--x", "steps", "--base", "fast"]) == 0
    text = capsys.readouterr().out
    assert "mine against fast" in text
    assert "REACHES IT LATER" in text
    assert "over 100 prompts, paired" in text
    assert "Seeds of one recipe are assumed to differ" in text


def test_one_name_for_two_recipes(tmp_path, capsys):
    runs = [write_run(tmp_path / f"run-{lr}", 0, lr=lr) for lr in (1e-5, 2e-5)]
    assert main(["compare", *runs, "--x", "steps", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["sources"]) == ["mine", "mine (run-2e-05)"]


def test_tables_are_recipes_unless_grouped(tmp_path, capsys):
    a, b, c = (write_table(tmp_path / f"{name}.csv", seed) for seed, name in enumerate("abc"))
    columns = ["--x", "hours", "--y", "accuracy", "--json"]
    assert main(["compare", a, b, c, *columns]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["runs"] == {"a": 1, "b": 1, "c": 1}
    assert [pair["paired_prompts"] for pair in data["pairs"]] == [None, None]
    assert main(["compare", "--group", f"both={a},{b}", c, *columns]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == {"both": 2, "c": 1}


def test_tables_of_one_name_have_those_of_their_folders(tmp_path, capsys):
    for seed, folder in enumerate("ab"):
        (tmp_path / folder).mkdir()
        write_table(tmp_path / folder / "evals.csv", seed)
    tables = [str(tmp_path / folder / "evals.csv") for folder in "ab"]
    assert main(["compare", *tables, "--x", "hours", "--y", "accuracy", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == {"a/evals": 1, "b/evals": 1}


def test_runs_of_a_group_are_given_by_patterns_and_may_have_commas_in_their_names(tmp_path, capsys):
    names = ("new-0", "new-1", "old,0", "old,1", "old[2]", "o" * 200, "p" * 200)
    paths = {name: write_table(tmp_path / f"{name}.csv", seed) for seed, name in enumerate(names)}
    new, old = f"new={tmp_path}/new-*.csv", f"old={','.join(paths[name] for name in names[2:])}"
    assert main(["compare", "--group", new, "--group", old, "--x", "hours", "--y", "accuracy", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == {"new": 2, "old": 5}
    assert main(["compare", "--group", f"new={tmp_path}/none-*.csv", paths["new-0"]]) == 2
    assert "none-*.csv: no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{a}"], "a comparison needs two recipes or more, found 1: a"),
        (["{a}", "{b}", "--base", "c"], "no recipe 'c' to compare with; recipes: a, b"),
        (["{a}", "{a}"], "given twice"),
        (["{b}", "--group", "x={a}", "--group", "x={a}"], "--group x is given twice"),
        (["{a}", "missing.csv"], "missing.csv: no such file"),
        ([], "a comparison needs two recipes or more, found 0"),
    ],
)
def test_errors_are_one_line(tmp_path, capsys, arguments, message):
    places = {name: write_table(tmp_path / f"{name}.csv", seed) for seed, name in enumerate("ab")}
    filled = [argument.format(**places) for argument in arguments]
    assert main(["compare", *filled, "--x", "hours", "--y", "accuracy"]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_a_group_needs_a_name_and_runs(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["compare", "--group", "runs/a,runs/b"])
    assert exit_info.value.code == 2
    assert "expected NAME=RUN,RUN" in capsys.readouterr().err


def test_of_a_misfit_no_ceiling_is_shown(tmp_path, capsys):
    """A run whose pass rate jumps against one that rises as it should: no A, no p, no crossing, and why."""
    even, jump = write_table(tmp_path / "even.csv", 0), tmp_path / "jump.csv"
    compute_N = np.linspace(0, 12_000, 24)
    y_N = Curve(LOG_LOGISTIC, 0.61, 1.92, 2500.0, 0.40)(compute_N) + np.where(compute_N > 6000, -0.1, 0.0)
    y_N += np.random.default_rng(1).normal(0, 0.003, 24)
    jump.write_text("\n".join(["hours,accuracy", *(f"{c},{y}" for c, y in zip(compute_N, y_N, strict=True))]))
    columns = ["--x", "hours", "--y", "accuracy", "--r0", ".4", "--budget", "12000"]
    assert main(["compare", even, str(jump), *columns, "--json"]) == 0
    (pair,) = json.loads(capsys.readouterr().out)["pairs"]
    assert pair["differences"]["A"] is None
    assert pair["crossing"] is None
    assert pair["paper"] is None
    assert pair["differences"]["pass_rate"]["median"] is not None
    for claim in (pair["ceiling"], pair["efficiency"]):
        assert claim["verdict"] == "inconclusive"
        assert claim["why"].startswith("no saturating curve describes a run of jump: the pass rate jumps")
        assert [claim[name] for name in ("p", "p_adjusted", "p_runs_only", "seeds")] == [None] * 4
    assert main(["compare", even, str(jump), *columns]) == 0
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line)
    assert rows["ceiling A"].strip() == "withheld"
    assert rows["crossing"].strip() == "withheld"
    assert rows["ceiling"].strip() == f"INCONCLUSIVE   {pair['ceiling']['why']}"
    assert rows["the paper's rule would say"].strip().startswith("nothing: no saturating curve describes")


def test_runs_are_paired_by_their_seeds(tmp_path, capsys):
    folders = {seed: write_run(tmp_path / f"mine-{seed}", seed) for seed in (0, 1, 2)}
    others = [write_run(tmp_path / f"fast-{seed}", seed, 1250.0, 2e-5, "fast") for seed in (1, 2)]
    asked = ["compare", *folders.values(), *others, "--x", "steps", "--json"]
    assert main(asked) == 0
    assert json.loads(capsys.readouterr().out)["pairs"][0]["common_seeds"] is None
    assert main([*asked, "--paired"]) == 0
    assert json.loads(capsys.readouterr().out)["pairs"][0]["common_seeds"] == 2
    assert main(["compare", *folders.values(), others[0], "--x", "steps", "--paired"]) == 0
    assert (
        "fast and mine have no two seeds of one base model in common: not paired" in capsys.readouterr().err
    )


def test_seeds_of_several_base_models_are_independent_runs_of_one_recipe_unless_paired(tmp_path, capsys):
    runs = [
        write_run(tmp_path / f"{name}-{seed}", seed, C_mid, lr, name, base=seed)
        for name, C_mid, lr in (("mine", 2500.0, 1e-5), ("fast", 1250.0, 2e-5))
        for seed in (0, 1, 2)
    ]
    widths = {}
    for paired in ([], ["--paired"]):
        assert main(["compare", *runs, "--x", "steps", "--json", *paired]) == 0
        data = json.loads(capsys.readouterr().out)
        assert data["runs"] == {"mine": 3, "fast": 3}
        low, high = data["pairs"][0]["differences"]["pass_rate_seen"]["interval"]
        widths[data["pairs"][0]["common_seeds"]] = high - low
    assert widths[None] > 1.5 * widths[3]  # the base models, .03 apart in A, do not cancel


def test_runs_without_a_seed_or_with_one_twice_cannot_be_paired(tmp_path, capsys):
    mine, fast = (write_run(tmp_path / name, 1, lr=lr, name=name) for name, lr in (("a", 1e-5), ("b", 2e-5)))
    again = write_run(tmp_path / "again", 1, lr=1e-5, name="a")
    assert main(["compare", mine, again, fast, "--x", "steps", "--paired"]) == 2
    assert "is the second run of a with seed 1; --paired needs one" in capsys.readouterr().err
    table = write_table(tmp_path / "t.csv", 3)
    other = write_table(tmp_path / "u.csv", 4)
    assert main(["compare", table, other, "--x", "hours", "--y", "accuracy", "--paired"]) == 2
    assert "t.csv: has no seed in a config.json, so --paired cannot pair it" in capsys.readouterr().err


def test_runs_on_different_prompts_are_reported(tmp_path, capsys):
    """Two tables with 500 and 1,319 prompts: neither number stands for both, and the answer says so."""
    paths = []
    for name, prompts in (("a", 500), ("b", 1319)):
        path = tmp_path / f"{name}.csv"
        header, *rows = Path(write_table(path, 1)).read_text().splitlines()
        path.write_text("\n".join([f"{header},n_prompts,n_samples", *(f"{row},{prompts},1" for row in rows)]))
        paths.append(str(path))
    assert main(["compare", *paths, "--x", "hours", "--y", "accuracy"]) == 0
    out, err = capsys.readouterr()
    assert "warning: runs differ in their held-out prompts (500, 1,319)" in err
    assert "accuracy, held-out pass rate (1 sample each)" in out
    assert "assumed to be evaluated on the same prompts" not in out
    assert f"warning: {paths[0]}: the evaluation noise is unknown" in err  # the path once
    Path(paths[1]).write_text(Path(paths[1]).read_text().replace(",1319,", ",500,"))
    assert main(["compare", *paths, "--x", "hours", "--y", "accuracy"]) == 0
    assert "assumed to be evaluated on the same prompts" in capsys.readouterr().out


def test_a_pass_rate_is_not_compared_with_pass_at_8(tmp_path, capsys):
    paths = [write_table(tmp_path / f"{name}.csv", 1) for name in "ab"]
    other = Path(paths[1])
    rows = other.read_text()
    for name, status in (("pass@8", 2), ("val_loss", 2), ("solve_rate", 0)):
        other.write_text(rows.replace("accuracy", name))
        assert main(["compare", *paths, "--x", "hours", "--y", f"accuracy,{name}"]) == status
        err = capsys.readouterr().err
        assert ("runs of different metrics are not compared" in err) == (status == 2)
