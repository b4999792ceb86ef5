"""What a run says it is doing, within its steps and before the first: to its caller, and in progress.json."""

import json
import math
from dataclasses import replace

import pytest
from cut_runs import CutError, cut_at, recipe_of, run

from scalerl.record.activity import Activity, Count, read_activity
from scalerl.rl.loop.progress import Activities
from scalerl.rl.train import train
from scalerl.view import closing_rows


@pytest.fixture
def recipe(guesser):
    return recipe_of(guesser)


@pytest.fixture
def at_once(monkeypatch):
    """Every activity is reported and written."""
    monkeypatch.setattr("scalerl.rl.loop.progress._REPORT_SECONDS", 0.0)
    monkeypatch.setattr("scalerl.rl.loop.progress.WRITE_SECONDS", 0.0)


@pytest.mark.usefixtures("at_once")
def test_a_run_says_what_it_does_before_its_first_step_and_within_each(recipe, tmp_path):
    seen = []
    record = run(recipe, tmp_path / "run", activity=seen.append)
    doings = [activity.doing for activity in seen]
    assert list(dict.fromkeys(doings))[:5] == [
        *("loading the model", "starting the generator", "evaluating", "generating", "training")
    ]
    n = record.evals[0].n_prompts
    first = [activity.count for activity in seen[: doings.index("generating")] if activity.count.of]
    assert {(count.of, count.unit) for count in first} == {(n, "completions")}
    done = [count.done for count in first]
    assert done == sorted(done)
    assert done[0] == 0
    assert done[-1] > n / 2
    of_steps = [activity for activity in seen if activity.doing == "training"]
    assert {activity.step for activity in of_steps} >= {1, 2, 9}
    assert {activity.count.unit for activity in of_steps} == {"micro-batches"}
    generating = [activity for activity in seen if activity.doing == "generating"]
    assert {activity.count.of for activity in generating} == {recipe.batch.prompts}
    assert any(activity.tokens for activity in generating)
    assert math.isnan(generating[0].left)  # before a step nothing is known of it
    assert generating[-1].left >= 0


@pytest.mark.usefixtures("at_once")
def test_it_stands_in_the_run_folder_until_the_run_ends(recipe, tmp_path):
    path, found = tmp_path / "run", []

    def look(progress):
        found.append((progress.step, read_activity(path)))

    run(recipe, path, progress=look)
    steps = [activity.step for step, activity in found if activity.doing == "training"]
    assert steps
    assert all(activity is not None for _, activity in found)
    assert read_activity(path) is None
    assert not (path / "progress.json").exists()


@pytest.mark.usefixtures("at_once")
def test_an_evaluation_beside_the_training_is_said_too(recipe, tmp_path):
    slow = replace(recipe, evaluation=replace(recipe.evaluation, count=1, samples=400))
    seen = []
    train(slow, tmp_path / "run", slow.model, activity=seen.append)
    waited = [activity for activity in seen if activity.doing == "evaluating"]
    assert waited
    counts = [activity.evaluating for activity in seen if activity.evaluating.of]
    assert {count.of for count in counts} == {400 * 20}


@pytest.mark.usefixtures("at_once")
def test_a_start_that_was_killed_is_begun_anew(recipe, tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / "progress.json").write_text(json.dumps(Activity("loading the model").to_json()))
    with pytest.raises(CutError):
        run(recipe, path, resume=True, progress=cut_at(1))


def test_reports_are_seldom_and_another_activity_comes_at_once():
    reported, written = [], []
    activities = Activities(reported.append, written.append)
    for n in range(100_000):
        if activities.due("generating"):
            activities.doing("generating", Count(n, 100_000, "groups"), tokens=n)
    activities.doing("training", Count(0, 4, "micro-batches"))
    assert len(reported) < 100
    assert len(written) == 1
    assert [reported[0].doing, reported[-1].doing] == ["generating", "training"]
    assert reported[-1].tokens == 0


def test_the_rate_and_the_end_are_those_of_what_is_done_now():
    activity = Activity("evaluating", 0, Count(50, 200, "completions", since=100.0), 0, 100.0, 110.0)
    assert activity.count.ends_in(110.0) == pytest.approx(30.0)
    assert math.isnan(activity.tokens_per_second)
    generating = Activity("generating", 3, Count(1, 16, "groups", since=100.0), 5000, 100.0, 110.0)
    assert generating.tokens_per_second == pytest.approx(500.0)
    assert math.isnan(generating.count.ends_in(110.0))  # groups do not come steadily


@pytest.mark.parametrize("text", ["", "[]", "{", '{"doing": 3}', '{"count": {"done": "many"}}'])
def test_a_file_that_is_torn_or_of_something_else_says_nothing(tmp_path, text):
    (tmp_path / "progress.json").write_text(text)
    assert read_activity(tmp_path) is None


def test_what_is_written_is_read_back(tmp_path):
    activity = Activity("generating", 3, Count(1, 16, "groups", 7.0), 5000, 100.0, 110.0, Count(), 0.5, 60.0)
    (tmp_path / "progress.json").write_text(json.dumps(activity.to_json()).replace("NaN", "null"))
    found = read_activity(tmp_path)
    assert found is not None
    assert (found.count, found.tokens, found.left) == (activity.count, 5000, 60.0)


def test_a_resume_says_which_checkpoint_it_goes_on_from(recipe, tmp_path, caplog):
    path = tmp_path / "run"
    with pytest.raises(CutError):
        run(recipe, path, progress=cut_at(5))
    with caplog.at_level("INFO", logger="scalerl"):
        record = run(recipe, path, resume=True)
    assert f"resuming after step 3, from {path / 'checkpoints' / 'step-00003'}" in caplog.messages
    found = dict(closing_rows(record))
    assert found["checkpoint"] == str(path / "checkpoints" / "final")
    assert found["samples"] == str(path / "samples.jsonl")
