"""Completions kept as text: those of a run, beside what the run trained on and evaluated."""

import json

import pytest
from cut_runs import lines, run
from record_checker import check
from small_runs import small_recipe

from scalerl.rl.config.settings import Evaluation, Samples, Steps
from scalerl.rl.model.causal_lm import load_tokenizer
from scalerl.rl.verify.samples import spread_over


@pytest.fixture(scope="module")
def folder(guesser, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    recipe = small_recipe(
        guesser,
        budget=Steps(6),
        evaluation=Evaluation(every=3, samples=2),
        samples=Samples(evaluation=3, every=2, training=2),
    )
    run(recipe, folder)
    return folder


def test_as_many_as_asked_of_each_evaluation_and_of_every_second_step(folder):
    assert check(folder) == []
    kept = [(row["source"], row["step"]) for row in lines(folder / "samples.jsonl")]
    assert sorted(kept) == sorted(
        [("evaluation", step) for step in (0, 3, 6) for _ in range(3)]
        + [("training", step) for step in (2, 4, 6) for _ in range(2)]
    )


def test_the_same_prompts_at_every_evaluation_spread_over_all(folder):
    evaluated = [row for row in lines(folder / "samples.jsonl") if row["source"] == "evaluation"]
    ids = lines(folder / "eval_prompts.jsonl")[0]["id"]
    by_step = [[row["prompt"] for row in evaluated if row["step"] == step] for step in (0, 3, 6)]
    assert by_step == [[ids[0], ids[len(ids) // 3], ids[2 * len(ids) // 3]]] * 3
    assert spread_over(2, 5) == [0, 1]
    assert spread_over(5, 0) == []


def test_a_completion_is_judged_by_its_text(folder):
    """The reward that is recorded is that of the text that is recorded: the task says so."""
    from scalerl.rl.config.recipe import load_recipe
    from scalerl.rl.types import as_reward

    task = load_recipe(folder).task
    prompts = {p.id: p for split in ("train", "heldout") for p in task.prompts(split)}
    tokenizer = load_tokenizer(load_recipe(folder).model)
    rows = lines(folder / "samples.jsonl")
    assert any(row["correct"] for row in rows)
    assert any(row["finish"] == "interrupted" for row in rows)
    for row in rows:
        prompt = prompts[row["prompt"]]
        assert row["prompt_text"] == tokenizer.decode(tokenizer(prompt.text)["input_ids"])
        verdict = as_reward(task.verify(prompt, row["completion"]))
        assert row["correct"] == (verdict.correct and row["finish"] != "truncated")
        assert row["reward"] == (verdict.value if row["finish"] != "truncated" else -1.0)


def test_the_report_has_the_newest_and_the_oldest_evaluation(folder):
    from scalerl.view import write_report

    page = write_report(folder).read_text()
    assert page.index("Evaluation at step 6") < page.index("Evaluation at step 0")
    assert "Evaluation at step 3" not in page
    last = json.loads((folder / "samples.jsonl").read_text().splitlines()[-1])
    assert last["source"] == "evaluation"
    assert f"{last['finish']}, {last['length']} tokens" in page
