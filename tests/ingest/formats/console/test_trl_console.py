import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import console_logs
import pytest
from console_files import rates, read, values, without_validation, write
from console_logs import Step, plain, run
from hostile_logs import everything

from scalerl import InputError
from scalerl.ingest.formats.console.reader import FORMAT
from scalerl.ingest.load import load_run
from scalerl.ingest.vocabularies import CONSOLES as SETTINGS

EXAMPLE = Path(__file__).parents[4] / "examples" / "trl_callback.py"


def trl(steps, callback="ProgressCallback"):
    pytest.importorskip("transformers")
    return console_logs.trl(steps, callback)


@pytest.mark.parametrize("every", [1, 3, 5])
def test_the_console_of_trl_has_its_steps_from_the_bar(tmp_path, every):
    steps = run(12, every)
    record = load_run(write(tmp_path, plain(trl(steps))))
    assert {one.step: one.pass_rate for one in record.evals} == rates(steps, trl(steps))
    assert record.config["source"]["trainer"] == "trl"
    (warning,) = record.warnings
    assert "'eval_reward' is a held-out reward used as the pass rate" in warning


def test_the_console_of_trl_of_every_third_step(tmp_path):
    steps = [one for one in run(30, 6) if one.step % 3 == 0]
    log = read(tmp_path, plain(trl(steps)))
    assert list(values(log, "eval_reward")) == [0, 6, 12, 18, 24, 30]
    assert list(values(log, "reward")) == list(range(3, 31, 3))


def test_the_console_of_trl_resumed(tmp_path):
    before, after = (
        run(12),
        [replace(one, held_out=one.held_out and one.held_out - 0.1) for one in run(15, first=8)],
    )
    log = read(tmp_path, plain([*trl([*before, Step(15)])[:-1], *trl(after)]))
    assert values(log, "eval_reward") == pytest.approx(
        {0: 0.2, 3: 0.29, 6: 0.38, 9: 0.37, 12: 0.46, 15: 0.55}
    )
    assert "restarted at step 8" in log.notes[0]


def test_the_console_of_trl_without_bars_has_counts(tmp_path):
    steps = [one for one in run(30, 6) if one.step % 3 == 0]
    log = read(tmp_path, plain(trl(steps, "PrinterCallback")))
    assert list(values(log, "eval_reward")) == [0, 2, 4, 6, 8, 10]
    assert "rows of training are counted" in log.notes[0]
    steps = [one for one in run(30, 5) if one.step % 3 == 0 or one.held_out is not None]
    steps = [one if one.step % 3 == 0 else replace(one, reward=None) for one in steps]
    with pytest.raises(
        InputError, match="rows of training cannot be counted instead, as evaluations stand between them"
    ):
        FORMAT.read(write(tmp_path, plain(trl(steps, "PrinterCallback"))), everything)


def test_the_console_of_trl_with_ranks_before_its_rows_and_without_validation(tmp_path):
    text = plain(trl(without_validation(run()), "PrinterCallback")).replace("{'loss'", "[default0]:{'loss'")
    path = write(tmp_path, text)
    with pytest.raises(InputError, match="no metric is held out: 'reward' is a training reward") as error:
        load_run(path)
    assert f"set {SETTINGS['trl'].validation}" in str(error.value)


def test_rows_of_transformers_4_have_numbers(tmp_path):
    row = "{'loss': 1e-09, 'reward': 0.51234567, 'kl': nan, 'epoch': 0.12}"
    log = read(tmp_path, f"{row}\n 50%|#####     | 5/10 [00:05<00:05,  1.00s/it]\r\n")
    assert values(log, "reward") == {5: 0.51234567}


@pytest.mark.slow
@pytest.mark.parametrize("bars", [True, False])
def test_what_trl_itself_prints(tmp_path, bars):
    pytest.importorskip("trl")
    code = EXAMPLE.read_text()
    for old, new in (
        ('"disable_tqdm": True', f'"disable_tqdm": {not bars}, "logging_steps": 2'),
        ('"eval_steps": 2', '"eval_steps": 4'),
        ('"max_steps": 30', '"max_steps": 8'),
        ("callbacks=[callback],", ""),
    ):
        assert old in code
        code = code.replace(old, new)
    write(tmp_path, f"{code}\ntrainer.save_state()\n", "train.py")
    with (tmp_path / "run.log").open("w") as log:
        subprocess.run(
            [sys.executable, "-u", "train.py"], cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT, check=True
        )
    told = {one.step: one.pass_rate for one in load_run(tmp_path / "out" / "trainer_state.json").evals}
    found = {one.step * (1 if bars else 2): one.pass_rate for one in load_run(tmp_path / "run.log").evals}
    assert list(told) == [0, 4, 8]
    assert found == pytest.approx(told, rel=1e-3)  # of four digits
