"""`fit --prior-from` and `--prior`: what the prior is learnt from, and what is printed under it."""

import json

import numpy as np
import pytest

from scalerl.cli.main import main
from scalerl.curve import LOG_LOGISTIC, Curve, fit
from scalerl.ingest.formats.table import read_table


def write(path, seed, A=0.61, B=1.9, spoilt=0.0, n=26, top=10_000.0):
    """A run whose first 1,500 GPU-hours lie `spoilt` too high."""
    compute_N = np.linspace(0, top, n)
    y_N = Curve(LOG_LOGISTIC, A, B, 2500.0, 0.3)(compute_N) + np.random.default_rng(seed).normal(0, 0.005, n)
    y_N += np.where(compute_N < 1500, spoilt, 0.0)
    rows = [f"{c:g},{y:.4f}" for c, y in zip(compute_N, y_N, strict=True)]
    path.write_text("\n".join(["gpu_hours,pass_rate", *rows]))
    return str(path)


def campaign(folder, spoilt):
    """A run, and six siblings of it, the start of them all spoilt."""
    return [write(folder / f"run-{i}.csv", i, B=1.7 + 0.06 * i, spoilt=spoilt) for i in range(7)]


def printed(capsys, *words):
    assert main(words) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("spoilt", "words", "options"),
    [
        (0.05, ["--min-compute", "1500", "--r0", "free"], {"min_compute": 1500.0, "r0": "free"}),
        (0.0, ["--r0", ".31"], {"r0": 0.31}),
    ],
)
def test_siblings_are_fitted_as_the_run_is(tmp_path, capsys, spoilt, words, options):
    own, *siblings = campaign(tmp_path, spoilt)
    answer = json.loads(printed(capsys, "fit", own, *words, "--json", "--prior-from", *siblings))
    alike = [fit(read_table(path), **options) for path in siblings]
    expected = fit(read_table(own), prior_from=alike, **options).campaign
    assert expected is not None
    assert answer["campaign"]["median"] == json.loads(json.dumps(expected.to_json()))["median"]


def test_siblings_keep_their_end(tmp_path, capsys):
    own, *siblings = campaign(tmp_path, spoilt=0.02)
    words = ["--max-compute", "4000", "--min-compute", "1500"]
    answer = json.loads(printed(capsys, "fit", own, *words, "--json", "--prior-from", *siblings))
    whole = [fit(read_table(path), min_compute=1500) for path in siblings]
    expected = fit(read_table(own), min_compute=1500, max_compute=4000, prior_from=whole).campaign
    assert expected is not None
    assert answer["campaign"]["median"]["A"] == pytest.approx(expected.median.A, rel=1e-12)


def test_the_answer_under_the_prior_says_whether_its_ceiling_is_identified(tmp_path, capsys):
    """A run to 1.5 C_mid: too early by itself, and with siblings that all know their ceiling."""
    own, *siblings = campaign(tmp_path, spoilt=0.0)
    words = ["fit", own, "--max-compute", "3600", "--prior-from", *siblings]
    answer = json.loads(printed(capsys, *words, "--json"))
    informed = answer["campaign"]
    assert informed["why"] != answer["why"]
    flat, _, block = printed(capsys, *words).partition("prior  ")
    rows = [line.split("  ", 1) for line in block.partition("\n\n")[0].splitlines()]
    shown = {label: text.strip() for label, text in rows[1:]}
    low, high = informed["intervals"]["A"]
    assert shown["ceiling A"] == f"{informed['median']['A']:.3f}   95 % [{low:.3f}, {high:.3f}]"
    assert shown["ceiling identified"] == f"{'yes' if informed['identified'] else 'no'}: {informed['why']}"
    assert f"no: {answer['why']}" in flat


def test_the_ceiling_of_a_misfit_is_withheld_under_the_prior_too(tmp_path, capsys):
    own, *siblings = campaign(tmp_path, spoilt=0.0)
    jump = write(tmp_path / "jump.csv", 9, spoilt=0.15)
    block = printed(capsys, "fit", jump, "--prior-from", own, *siblings).partition("prior  ")[2]
    assert [line.split()[-1] for line in block.splitlines() if line.startswith("ceiling A")] == ["withheld"]


def test_no_row_of_a_misfit_has_a_ceiling(tmp_path, capsys):
    jump = write(tmp_path / "jump.csv", 9, spoilt=0.15)
    text = printed(capsys, "fit", jump)
    assert "least squares (paper)  A withheld  B " in text
    assert "other minima" not in text
    assert "least squares (paper)  A withheld  B " in str(fit(read_table(jump)))


def test_either_prior_can_be_asked_for(tmp_path, capsys):
    own = write(tmp_path / "own.csv", 3, top=4_000.0)
    answers = [
        json.loads(printed(capsys, "fit", own, "--json", *words)) for words in ([], ["--prior", "flat"])
    ]
    assert [answer["prior"] for answer in answers] == ["default", "flat"]
    for answer, prior in zip(answers, ("default", "flat"), strict=True):
        assert answer["intervals"]["A"] == list(fit(read_table(own), prior=prior).intervals.A)
    tests = [
        json.loads(printed(capsys, "backtest", own, "--at", "0.8", "--json", "--prior", prior))
        for prior in ("default", "flat")
    ]
    assert tests[0]["pooled"] != tests[1]["pooled"]
