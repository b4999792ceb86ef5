"""What the first evaluation says against training a model as it is."""

import re
from dataclasses import replace

from byte_model import save_byte_model

from scalerl.record.evaluation import EvalPoint
from scalerl.rl.algo.length import NoLengthControl
from scalerl.rl.config.settings import Context, Steps
from scalerl.rl.loop.evaluations import before_training
from scalerl.rl.train import train


def test_a_model_that_solves_some_and_ends_its_completions_is_no_matter_of_warning():
    assert before_training(EvalPoint(0, 0.01, n_prompts=9, n_samples=2, truncated=0.24)) == []
    assert before_training(EvalPoint(0, 0.5, n_prompts=9, n_samples=2)) == []


def test_a_model_that_solves_nothing_and_is_cut_is_warned_of_before_it_is_trained(
    tiny_recipe, tmp_path, caplog
):
    short = Context(prompt=64, thinking=1, answer=1)
    model = str(save_byte_model(tmp_path / "model"))
    recipe = replace(tiny_recipe, model=model, context=short, length=NoLengthControl(), budget=Steps(1))
    record = train(recipe, tmp_path / "run")
    assert record.evals[0].pass_rate == 0
    cut = record.evals[0].truncated
    assert cut > 0.25
    said = "\n".join(caplog.messages)
    assert re.search(r"the model solves none of \d+ held-out prompts", said)
    assert f"{cut:.0%} of the model's completions are cut" in said
