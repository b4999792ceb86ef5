"""Processes that ask for more memory than there is: one line with the terms, and a checkpoint."""

import pickle
from dataclasses import replace

import pytest
import torch
from cut_runs import lines, recipe_of, record_and_weights, run
from greedy_loss import Greedy, allocate
from record_checker import check

from scalerl.errors import InputError, OutOfMemoryError
from scalerl.rl.config.memory import RoleMemory
from scalerl.rl.config.settings import Evaluation, Local, Steps
from scalerl.rl.engine import generator as generator_module
from scalerl.rl.engine.build import load_generator
from scalerl.rl.model.out_of_memory import is_out_of_memory, within_memory
from scalerl.rl.train import train

GIB = 2**30


@pytest.fixture
def recipe(guesser):
    Greedy.calls = Greedy.fails_at = 0
    return replace(recipe_of(guesser), loss=Greedy())


def message_of(error, *, memory=None, torn=False):
    def do():
        raise error

    def of_role():
        if memory is None:
            raise InputError("unknown")
        return memory

    with pytest.raises(OutOfMemoryError) as caught:
        within_memory(do, "trainer", of_role, torn)
    assert caught.value.__context__ is None  # which would hold the tensors of the failed pass
    assert caught.value.torn is torn
    return str(caught.value)


def test_an_allocation_that_fails_is_one_line_with_the_terms_of_the_memory_check():
    memory = RoleMemory(
        "trainer", {"weights": 2 * GIB, "base model": 0}, {"logits": 3 * GIB}, "batch.micro_tokens or context"
    )
    with pytest.raises(RuntimeError) as of_cpu:
        allocate()
    expected = "it needs 5.0 GiB (logits 3.0, weights 2.0): change batch.micro_tokens or context"
    text = "trainer: out of memory (an allocation of 1,048,576.0 GiB failed); "
    assert message_of(of_cpu.value, memory=memory) == text + expected
    of_gpu = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total ...")
    text = "trainer: out of memory (an allocation of 2.00 GiB failed)"
    assert message_of(of_gpu, memory=memory, torn=True) == f"{text}; {expected}"
    assert message_of(of_gpu) == f"{text}: change batch, context or decode_slots"
    assert message_of(MemoryError()) == "trainer: out of memory: change batch, context or decode_slots"


def test_other_errors_are_none_of_memory():
    for error in (RuntimeError("shapes do not match"), ValueError("out of memory"), OSError("out of memory")):
        assert not is_out_of_memory(error)
    with pytest.raises(RuntimeError, match="size"):
        within_memory(lambda: torch.ones(2) @ torch.ones(3), "trainer", lambda: pytest.fail("called"))
    for text in ("CUDA error: out of memory", "cuBLAS: CUBLAS_STATUS_ALLOC_FAILED when calling"):
        assert is_out_of_memory(RuntimeError(text))
    assert within_memory(lambda: 3, "trainer", lambda: pytest.fail("called")) == 3


def test_the_error_crosses_processes():
    there = pickle.loads(pickle.dumps(OutOfMemoryError("trainer: out of memory", torn=True)))
    assert (str(there), there.torn, there.exit_status) == ("trainer: out of memory", True, 1)


def test_a_trainer_that_runs_out_leaves_a_checkpoint_from_which_the_run_is_the_same(recipe, tmp_path):
    run(recipe, tmp_path / "whole")
    n_calls, Greedy.calls = Greedy.calls, 0
    Greedy.fails_at = n_calls // 2
    with pytest.raises(OutOfMemoryError, match=r"trainer: out of memory.*it needs 0.0 GiB \(") as caught:
        run(recipe, tmp_path / "run")
    assert str(caught.value).endswith("--resume --set key=value goes on from a checkpoint of this step")
    made = len(lines(tmp_path / "run" / "steps.jsonl"))
    assert 0 < made < 9
    assert (tmp_path / "run" / "checkpoints" / f"step-{made:05d}.1").is_dir()
    run(recipe, tmp_path / "run", resume=True)
    assert check(tmp_path / "run") == []
    assert record_and_weights(tmp_path / "run") == record_and_weights(tmp_path / "whole")


def test_a_generator_that_runs_out_leaves_a_checkpoint_from_which_the_run_is_the_same(
    recipe, tmp_path, monkeypatch
):
    """Where it starts completions, too: they wait again."""
    run(recipe, tmp_path / "whole")
    honest, calls = generator_module.log_probs_TV, 0

    def full(*args):
        nonlocal calls
        calls += 1
        return allocate() if calls == 40 else honest(*args)

    monkeypatch.setattr(generator_module, "log_probs_TV", full)
    with pytest.raises(
        OutOfMemoryError, match=r"generator: out of memory.*KV cache.*: change decode_slots or"
    ):
        run(recipe, tmp_path / "run")
    run(recipe, tmp_path / "run", resume=True)
    assert record_and_weights(tmp_path / "run") == record_and_weights(tmp_path / "whole")


def test_a_run_goes_on_with_less_memory(recipe, tmp_path):
    """With fewer slots than were in use, completions under way begin again; what is trained is as old as k
    allows."""
    Greedy.fails_at = 3
    with pytest.raises(OutOfMemoryError):
        run(recipe, tmp_path / "run")
    less = replace(
        recipe,
        decode_slots=3,
        batch=replace(recipe.batch, micro=2, micro_tokens=50),
        evaluation=replace(recipe.evaluation, decode_slots=2),
        learner=replace(recipe.learner, chunk=7),
    )
    record = run(less, tmp_path / "run", resume=True)
    assert check(tmp_path / "run") == []
    assert record.config["recipe"]["decode_slots"] == 3
    assert record.config["recipe"]["batch"]["micro_tokens"] == 50
    steps = lines(tmp_path / "run" / "steps.jsonl")
    assert steps[-1]["restarted"] > 0
    assert max(row.get("staleness_max", 0) for row in steps) <= recipe.schedule.k
    run(replace(less, budget=Steps(10), decode_slots=20), tmp_path / "run", resume=True)
    other = replace(less, batch=replace(less.batch, samples=5), budget=Steps(11))
    with pytest.raises(InputError, match=r"the run has batch.samples = 4"):
        run(other, tmp_path / "run", resume=True)


def test_a_generator_in_its_own_process_that_does_not_fit_ends_the_run_at_once(
    save_model, tiny_recipe, tmp_path
):
    """GPT-2 is of a form whose memory is not checked before."""
    recipe = replace(tiny_recipe, model=save_model("gpt2"), placement=Local(), decode_slots=10**12)
    with pytest.raises(
        OutOfMemoryError, match=r"^generator: out of memory \(an allocation of .* TiB failed\): change batch"
    ):
        train(recipe, tmp_path / "run", evaluate_aside=False)


def test_an_evaluation_that_does_not_fit_says_so(save_model, tiny_recipe, tmp_path):
    recipe = replace(
        tiny_recipe,
        model=save_model("gpt2"),
        budget=Steps(1),
        evaluation=Evaluation(count=1, samples=10**12, decode_slots=10**12),
    )
    with pytest.raises(Exception, match=r"evaluation: out of memory \(an allocation of .*\): change batch"):
        train(recipe, tmp_path / "run")


def test_a_generator_that_does_not_fit_has_the_terms_of_its_memory(tiny_recipe):
    with pytest.raises(OutOfMemoryError, match=r"generator: out of.* GiB \(.*KV cache [\d,.]+, .*weights"):
        load_generator(tiny_recipe, tiny_recipe.model, 0, 10**12)
