"""The checks of scripts/gpu_check.py: on a CPU with shapes of no size, and on a GPU (`pytest -m gpu`)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo

from scalerl.rl.learner import sharding
from scalerl.rl.learner.sharding import blocks_of

ROOT = Path(__file__).parents[1]
QUICK = ("head", "logps", "replay", "learner", "decode", "ipc", "peers")
SLOW = ("train", "lost", "run", "sharded", "ray", "ray_vllm", "vllm", "vllm_decode")
# PyTorch hides it by itself, where warnings are no errors.
GRAD_HIDDEN = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture
def checks(monkeypatch):
    """The package of the checks, as the script has it."""
    for folder in ("scripts", "benchmarks", "tests/support"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    import gpu_checks

    return gpu_checks


@pytest.fixture
def lab(checks, tmp_path):
    from gpu_checks.lab import Lab

    threads = torch.get_num_threads()
    yield Lab.of(True, tmp_path)
    torch.set_num_threads(threads)


@pytest.fixture
def script(checks, monkeypatch, capsys):
    """The script, called in this process: every check has one of its own all the same."""
    import gpu_check

    def script(*arguments):
        if "--tiny" in arguments:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        monkeypatch.setattr("sys.argv", ["gpu_check.py", *arguments])
        with pytest.raises(SystemExit) as ended:
            gpu_check.main()
        out, complaint = capsys.readouterr()
        return ended.value.code, [json.loads(line) for line in out.splitlines()], complaint

    return script


def test_every_check_is_run_by_these_tests(checks):
    assert {check.name for check in checks.CHECKS} == {"imports", *QUICK, *SLOW}
    assert sum(check.seconds for check in checks.CHECKS) <= 45 * 60


@GRAD_HIDDEN
@pytest.mark.parametrize("name", QUICK)
def test_a_check_passes_on_a_cpu(checks, lab, name):
    figures = next(check for check in checks.CHECKS if check.name == name).run(lab)
    assert figures
    assert json.loads(json.dumps(figures)) == figures


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_a_long_check_passes_on_a_cpu(script, name, tmp_path):
    status, [line], _ = script("--tiny", "--only", name, "--out", str(tmp_path / "out.jsonl"))
    if line["status"] == "skipped":
        pytest.skip(line["error"])
    assert (status, line["status"]) == (0, "ok"), line


@pytest.mark.slow
def test_recorded_log_probabilities_of_another_temperature_fail(lab, monkeypatch):
    from gpu_checks import engine

    honest = engine.log_probs_TV
    monkeypatch.setattr(
        engine, "log_probs_TV", lambda model, hidden, temperature, fp32: honest(model, hidden, 1.1, fp32)
    )
    with pytest.raises(AssertionError, match="float32_max"):
        engine.logps(lab)


def test_a_head_in_the_models_own_precision_fails(lab, monkeypatch):
    from gpu_checks import numerics

    honest = numerics.log_probs_TV
    monkeypatch.setattr(
        numerics, "log_probs_TV", lambda model, hidden, temperature, fp32: honest(model, hidden, 1.0, False)
    )
    with pytest.raises(AssertionError, match="fp32_error"):
        numerics.head(lab)


@pytest.fixture
def training(checks, monkeypatch):
    """The module of the check of a step, with two of its rows."""
    from gpu_checks import training

    rows = {row: training.ROWS[row] for row in ("padded", "compiled")}
    monkeypatch.setattr(training, "ROWS", rows)
    return training


@pytest.mark.slow
@GRAD_HIDDEN
def test_compiled_layers_that_attend_a_position_off_fail(training, lab, monkeypatch):
    honest = training.compile_blocks

    def off_by_one(model, backend):
        for block in blocks_of(model):
            attention: Any = block.self_attn
            attention.register_forward_hook(lambda module, inputs, out: (out[0].roll(1, 1), *out[1:]))
        honest(model, backend)

    monkeypatch.setattr(training, "compile_blocks", off_by_one)
    with pytest.raises(AssertionError, match="compiled: logps_differ is"):
        training.step(lab)


@pytest.mark.slow
@GRAD_HIDDEN
def test_layers_that_pytorch_gives_up_to_compile_fail(training, lab, monkeypatch):
    monkeypatch.setattr(sharding, "_GRAPHS", 1)
    monkeypatch.setattr(torch._dynamo.config, "cache_size_limit", 1)
    with pytest.raises(AssertionError, match=r"compiled: .*fail_on_recompile_limit_hit"):
        training.step(lab)


def test_a_second_call_goes_on_after_what_is_done(script, tmp_path):
    out = tmp_path / "out.jsonl"
    status, [line], _ = script("--tiny", "--only", "imports", "--out", str(out))
    assert (status, line["check"], line["status"]) == (0, "imports", "ok")
    assert line["figures"]["torch"] == torch.__version__
    # Too little time for any other: what is done is not done again, and the next is named.
    status, lines, complaint = script("--tiny", "--minutes", "0.01", "--out", str(out))
    assert (status, lines) == (0, [])
    assert "out of time before head" in complaint


def test_an_unknown_check_is_one_line_that_names_the_others(script):
    status, _, complaint = script("--only", "heads")
    assert status == 2
    assert "unknown check 'heads'; one of imports, head" in complaint.splitlines()[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_that_is_said_in_a_line(script, tmp_path):
    status, lines, complaint = script("--out", str(tmp_path / "out.jsonl"))
    assert (status, lines) == (2, [])
    assert complaint.splitlines()[-1].endswith("needs a CUDA device; --tiny runs anywhere")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["imports", *QUICK, *SLOW])
def test_a_check_passes_on_a_gpu(script, name, tmp_path):
    status, [line], _ = script("--only", name, "--out", str(tmp_path / "out.jsonl"))
    assert status == 0, line
