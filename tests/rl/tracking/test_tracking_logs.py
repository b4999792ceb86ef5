"""Trackers: what they are told, that it is read back as the run, and that a resumed run goes on there."""

import json
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tracked_runs import TO, check_read_back, check_same_run, kept_rows, lines, stores, tracked_by
from trackers_of_tests import Keeps

from scalerl.cli.main import main
from scalerl.curve import fit
from scalerl.errors import CannotAnswerError, InputError
from scalerl.ingest.load import read_source
from scalerl.rl.config.recipe import from_dict, load_recipe
from scalerl.rl.tracking.trackers import COLUMNS
from scalerl.rl.train import train

DOCS = Path(__file__).parents[3] / "docs"


def test_a_run_is_the_same_with_trackers_and_without(run, plain):
    check_same_run(run, plain)
    assert "tracking.json" not in {path.name for path in plain.path.iterdir()}


@pytest.mark.parametrize("name", TO)
def test_what_is_logged_is_read_back_as_the_run(run, nobody_outside, name):
    exact = name != "tensorboard"  # which keeps 32 bits
    found = check_read_back(run, stores(run, nobody_outside)[name], exact)
    if exact:
        before, after = (fit(one, x="flops").to_json([1e9]) for one in (run, found))
        # A tracker has the name of the metric, and not that of the task, nor those of suites as its tasks.
        named = {"name": "eval/pass_rate", "dataset": None, "chosen": False, "others": []}
        logged = {"metric": before["metric"] | named, "warnings": []}
        assert before | logged == after | {"warnings": []}


def test_completions_are_sent_as_they_are_kept(run):
    sent = [row for row in lines(run.path.with_name("kept.jsonl")) if "samples" in row]
    assert all(row["of"] == row["samples"][0]["step"] for row in sent)
    assert all(len({one["source"] for one in row["samples"]}) == 1 for row in sent)
    assert sorted_by_step(one for row in sent for one in row["samples"]) == sorted_by_step(run.samples())


def sorted_by_step(rows):
    return sorted(rows, key=lambda row: (row["source"], row["step"], row["prompt"]))


def shown(row):
    """A line of samples.jsonl as the tables have it."""
    return [dashed(row[name]) if name == "versions" else row[name] for name in COLUMNS]


def dashed(versions):
    return "-".join(map(str, versions))


def kept_tables(run):
    """By source: all rows of samples.jsonl, as the tables have them."""
    found = {}
    for row in run.samples():
        found.setdefault(row["source"], []).append(shown(row))
    assert set(found) == {"evaluation", "training"}
    return found


def test_wandb_has_tables_of_completions(run):
    (media,) = (run.path / "wandb").glob("offline-run-*/files/media/table/samples")
    found = {"evaluation": [], "training": []}
    for path in media.glob("*.table.json"):
        table = json.loads(path.read_text())
        assert tuple(table["columns"]) == COLUMNS
        found[path.name.partition("_")[0]] += table["data"]
    for source, rows in kept_tables(run).items():
        assert sorted(found[source]) == sorted(rows)


def test_mlflow_has_tables_of_completions(run, nobody_outside):
    for source, rows in kept_tables(run).items():
        path = stores(run, nobody_outside)["mlflow"] / "artifacts" / f"samples_{source}.json"
        table = json.loads(path.read_text())
        assert tuple(table["columns"]) == COLUMNS
        assert sorted(table["data"]) == sorted(rows)


@pytest.mark.filterwarnings("ignore:html5lib:DeprecationWarning")
def test_tensorboard_has_tables_of_completions(run):
    """As TensorBoard's own text plugin reads them, and draws them."""
    from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator
    from tensorboard.plugins.text.text_plugin import text_array_to_html
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(run.path / "tensorboard"), size_guidance={TENSORS: 0})
    events.Reload()
    for source, rows in kept_tables(run).items():
        arrays = [make_ndarray(event.tensor_proto) for event in events.Tensors(f"samples/{source}")]
        found = [[cell.decode().removeprefix("    ") for cell in row] for a in arrays for row in a[1:]]
        assert sorted(found) == sorted([str(cell) for cell in row] for row in rows)
        page = str(text_array_to_html(arrays[0], enable_markdown=True))
        assert page.count("<tr>") == len(arrays[0])
        assert "<code>" in page


def test_a_run_folder_with_logs_in_it_is_still_a_run(run, capsys):
    assert main(["fit", str(run.path), "--x", "flops", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["points"] == len(run.evals)


@pytest.mark.skipif(find_spec("trackio") is None, reason="trackio is not installed")
def test_trackio_is_read_back_as_the_run(recipe, small_base, plain, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    followed = tracked_by(recipe, "trackio", project="ours")
    cut = train(followed, tmp_path / "run", small_base, evaluate_aside=False, until=8)
    assert len(cut.evals) == 3
    record = train(followed, tmp_path / "run", small_base, evaluate_aside=False, resume=True)
    check_read_back(record, tmp_path / "trackio" / "ours.db")


def test_the_recipe_goes_to_the_tracker(run, nobody_outside):
    for place in stores(run, nobody_outside).values():
        config = read_source(place).runs[0].config["trainer_config"]
        assert config["recipe.optimiser.lr"] == 3e-4
        assert config["recipe.loss.kind"] == "cispo"
        assert config["seed"] == 0


def test_every_number_of_a_step_is_logged(run):
    rows = {row["step"]: row["metrics"] for row in kept_rows(run) if "train/reward_mean" in row["metrics"]}
    assert len(rows) == 36
    for step in run.steps():
        logged = rows[step["step"]]
        assert logged["train/reward_mean"] == step["reward_mean"]
        assert logged["train/queue_generating"] == step["queue"]["generating"]
        assert logged["compute/flops"] == sum(step["flops"].values())
        assert logged["compute/tokens_trained"] == step["tokens"]["trained"]
        assert logged.get("health/logp_gap") == step.get("logp_gap")
        numbers = {key for key, value in step.items() if isinstance(value, int | float)} - {"step", "time"}
        names = {name.partition("/")[2] for name in logged}
        assert numbers <= names


def test_alarms_are_logged_as_they_come_and_go(run):
    found = [
        (row["step"], row["metrics"]["health/alarm_length_drift"])
        for row in kept_rows(run)
        if "health/alarm_length_drift" in row["metrics"]
    ]
    said = [row for row in lines(run.path / "alarms.jsonl") if row["metric"] == "length_drift"]
    levels = {"warning": 1, "alarm": 2}
    assert found == [(row["step"], 0 if row["over"] else levels[row["level"]]) for row in said]
    assert 2 in [level for _, level in found]


def test_forecasts_are_those_of_a_fit_at_that_moment(run):
    rows = [row for row in kept_rows(run) if "eval/pass_rate" in row["metrics"]]
    assert [row["step"] for row in rows] == [point.step for point in run.evals]
    made = []
    for n, row in enumerate(rows, start=1):
        said = {k.partition("/")[2]: v for k, v in row["metrics"].items() if k.startswith("forecast/")}
        try:
            result = fit(replace(run, evals=run.evals[:n]), x="steps")
        except CannotAnswerError:
            assert said == {}
            continue
        made.append(row["step"])
        forecast, ceiling = result.forecast(36), result.intervals.A
        expected = {"median": forecast.median, "identified": float(result.identified)}
        expected |= {"low": forecast.prediction[0], "high": forecast.prediction[1]}
        if not result.misfit:
            expected |= {"ceiling": result.median.A, "ceiling_low": ceiling[0], "ceiling_high": ceiling[1]}
        assert said == expected
    assert 3 <= len(made) < len(rows)


def test_the_guide_names_what_is_logged_and_nothing_else(run):
    page = (DOCS / "howto/trackers.md").read_text().partition("## What is logged")[2].partition("\n## ")[0]
    listed = {
        f"{head}{part.strip()}"
        for cell in re.findall(r"^\| (`.*?) \|", page, flags=re.M)
        for name in re.findall(r"`([^`]+)`", cell)
        for head, inside in [re.fullmatch(r"([^{]*)(?:\{(.*)\})?", name).groups()]
        for part in (inside.split(",") if inside else [""])
    }
    patterns = [re.compile(re.sub("FIELD|METRIC|KEY|SUITE", r"\\w+", name)) for name in listed]
    logged = {name for row in kept_rows(run) for name in row["metrics"]}
    for name in logged:
        assert any(pattern.fullmatch(name) for pattern in patterns), name
    for pattern in patterns:
        if not re.search("ceiling|head_gap", pattern.pattern):  # withheld, and of another precision
            assert any(pattern.fullmatch(name) for name in logged), pattern.pattern


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("wand", r"tracking.to: found 'wand', expected .*'wandb'"),
        (["wandb", "comet"], r"tracking.to: found 'comet', expected"),
        (3, "tracking.to: expected a list"),
    ],
)
def test_an_unknown_tracker_is_refused_by_its_name(to, message):
    with pytest.raises(InputError, match=message):
        from_dict(
            {
                "model": "m",
                "task": {"kind": "chain"},
                "budget": {"kind": "steps", "amount": 1},
                "tracking": {"to": to},
            }
        )


def test_one_name_is_a_list_of_one():
    assert load_recipe("demo", ["tracking.to=wandb"]).tracking.to == ("wandb",)
    assert load_recipe("demo", ['tracking.to=["wandb", "mlflow"]']).tracking.to == ("wandb", "mlflow")


class CrashError(Exception):
    pass


@pytest.mark.slow
def test_a_resumed_run_goes_on_where_it_was_logged(short, small_base, short_plain, tmp_path, nobody_outside):
    """It crashes at step 7, and goes on from the checkpoint of step 4: three steps come twice."""

    def crash(progress):
        if progress.step == 7 and not progress.evaluated:
            raise CrashError

    keeps = Keeps(tmp_path / "kept.jsonl")
    options: dict[str, Any] = {"evaluate_aside": False, "trackers": [keeps]}
    followed = tracked_by(short, *TO)
    with pytest.raises(CrashError):
        train(followed, tmp_path / "run", small_base, progress=crash, **options)
    before = json.loads((tmp_path / "run" / "tracking.json").read_text())
    record = train(followed, tmp_path / "run", small_base, resume=True, **options)
    after = json.loads((tmp_path / "run" / "tracking.json").read_text())
    for name in ("wandb", "mlflow"):
        assert after[name]["id"] == before[name]["id"]
    check_same_run(record, short_plain)
    for name, place in stores(record, nobody_outside).items():
        check_read_back(record, place, exact=name != "tensorboard")
    rows = lines(keeps.file)
    begins = [row for row in rows if "open" in row]
    assert [(row["kept"], row["first"]) for row in begins] == [({}, 1), ({"opened": "1"}, 5)]
    assert [row["close"] for row in rows if "close" in row] == ["failed", "finished"]
    steps = [row["step"] for row in rows if "train/loss" in row.get("metrics", {})]
    assert steps == [*range(1, 8), *range(5, 13)]


def test_trackers_may_change_on_a_resume(short, small_base, short_plain, tmp_path):
    options: dict[str, Any] = {"evaluate_aside": False}
    train(short, tmp_path / "run", small_base, until=8, **options)
    (tmp_path / "run" / "tracking.json").write_text("{")  # and a damaged file costs no run
    record = train(tracked_by(short, "tensorboard"), tmp_path / "run", small_base, resume=True, **options)
    check_same_run(record, short_plain)
    assert record.config["recipe"]["tracking"]["to"] == ["tensorboard"]
    (imported,) = read_source(tmp_path / "run" / "tensorboard").runs
    assert [point.step for point in imported.evals] == [9, 12]
