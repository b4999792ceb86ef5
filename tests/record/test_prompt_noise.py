from dataclasses import replace

import numpy as np
import pytest

from scalerl.curve import fit
from scalerl.record.evaluation import DeviceSeconds, EvalPoint, mean_p_1mp
from scalerl.record.prompts import FILE, noise_between
from scalerl.record.reader import RunRecord
from scalerl.record.writer import RunWriter
from scalerl.view.facts.fit_rows import fit_rows

N, P, K = 16, 400, 4


def write(path, correct_NP, k=K, prompt_sets=None):
    """Write a run with the successes of every prompt, shape (N, P), at steps 0, 10, 20, ..."""
    writer = RunWriter(path, {})
    ids = [f"p/{i}" for i in range(correct_NP.shape[1])]
    for i, correct_P in enumerate(correct_NP):
        point = EvalPoint(
            step=10 * i,
            pass_rate=float(correct_P.mean() / k),
            device_seconds=DeviceSeconds(generate=3600.0 * i, train=0.0, idle=0.0),
            n_prompts=len(ids),
            n_samples=k,
            mean_p_1mp=mean_p_1mp(correct_P, k),
        )
        writer.evaluation(point, prompt_sets[i] if prompt_sets else "set", ids, correct_P)
    return RunRecord.read(path)


def successes(shared, k=K, seed=0):
    """Successes by a rising p, (N, P): by the same draws at every evaluation, or by new ones."""
    rng = np.random.default_rng(seed)
    ease_P = rng.normal(0, 2, P)
    p_NP = 1 / (1 + np.exp(-(ease_P + np.linspace(0, 1, N)[:, None])))
    draws = rng.uniform(size=(1 if shared else N, P, k))
    return (draws < p_NP[:, :, None]).sum(axis=2)


def test_noise_between_by_hand(tmp_path):
    # Step 0 is left out. From step 10 to 20, 50 of 200 prompts gain both of 2 samples: the difference is 1 or
    # 0, its variance .25 x .75 x 200 / 199, over 200 prompts and 2 evaluations.
    first = np.repeat([0, 2], 100)
    after = np.where(np.arange(200) < 50, 2, first)
    record = write(tmp_path / "run", np.stack([1 - first // 2, first, after]), k=2)
    assert noise_between(record) == pytest.approx(np.sqrt(0.1875 * 200 / 199 / 200 / 2))


def test_shared_draws_leave_little_of_the_noise(tmp_path):
    shared, anew = write(tmp_path / "shared", successes(True)), write(tmp_path / "anew", successes(False))
    assert noise_between(shared) < 0.4 * shared.evals[0].noise_sd
    # Drawn anew, prompts differ as much as their number of samples says.
    assert noise_between(anew) == pytest.approx(anew.evals[0].noise_sd, rel=0.1)


def test_noise_between_is_the_scatter_of_the_pass_rate(tmp_path):
    """The truth is by many runs that differ in their draws: the sd of the change that prompts share alone."""
    runs = [successes(True, seed=seed).mean(axis=1) / K for seed in range(300)]
    changes = np.diff(np.array(runs), axis=1)[:, 1:]
    truth = float(np.sqrt(changes.var(axis=0).mean() / 2))
    assert noise_between(write(tmp_path / "run", successes(True))) == pytest.approx(truth, rel=0.1)


def test_a_fit_at_one_sample_a_prompt_takes_it_and_says_so(tmp_path):
    record = write(tmp_path / "run", successes(True, k=1), k=1)
    assert np.isnan(record.evals[0].noise_sd)
    result = fit(record)
    assert result.noise.floor == pytest.approx(noise_between(record))
    assert result.to_json()["noise"]["floor_from"] == "prompts"
    assert "measured by prompt" in dict(fit_rows(result))["noise sd"]
    assert not [text for text in result.warnings if "one sample" in text]
    (tmp_path / "run" / FILE).unlink()
    without = fit(record)
    assert without.noise.floor_from is None
    assert [text for text in without.warnings if "one sample" in text]


def test_the_number_of_samples_goes_first(tmp_path):
    """What all evaluations share is no scatter, but moves the ceiling: the narrower noise is not taken."""
    result = fit(write(tmp_path / "run", successes(True)))
    assert result.noise.floor_from == "samples"
    assert result.noise.floor > 0.004


def test_only_neighbours_on_the_same_prompts_count(tmp_path):
    correct_NP = successes(True)
    sets = [f"set {i}" for i in range(N)]
    assert noise_between(write(tmp_path / "apart", correct_NP, prompt_sets=sets)) is None
    few = write(tmp_path / "few", correct_NP[:3, :50])
    assert noise_between(few) is None


def test_later_evaluations_are_not_used(tmp_path):
    record = write(tmp_path / "run", successes(True))
    cut = replace(record, evals=record.evals[:9], lines=record.lines[:9])
    alone = write(tmp_path / "alone", successes(True)[:9])
    assert noise_between(cut) == noise_between(alone)


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 20, "prompt_set": "set", "n": 4, "id": ["a"], "cor',
        '{"step": 20, "prompt_set": "set", "n": 0, "id": ["a", "b"], "correct": [0, 0]}',
        '{"step": 20, "prompt_set": "set", "n": 4, "id": ["a", "b"], "correct": [5, 0]}',
        '{"step": 20, "prompt_set": "set", "n": 4, "id": ["a", "b"], "correct": [NaN, "x"]}',
        '{"step": [], "prompt_set": {}, "n": "4", "id": 3, "correct": null}',
        "[" * 100_000,
        "[]",
        "null",
    ],
)
def test_lines_that_say_nothing_are_passed_over(tmp_path, line):
    record = write(tmp_path / "run", successes(True))
    before = noise_between(record)
    path = tmp_path / "run" / FILE
    path.write_text(f"{line}\n{path.read_text()}")
    assert noise_between(record) == before
