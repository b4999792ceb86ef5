import gzip
import math
import os
import re
import warnings
import zipfile
from dataclasses import replace

import console_logs
import numpy as np
import pytest
from console_files import rates, read, values, without_validation, write
from console_logs import CONSOLES, NOISE, Part, by_ray, plain, run
from hostile_logs import everything
from read_logs import read_logs

from scalerl import InputError, limits
from scalerl.ingest.formats.console.dicts import parse_dict
from scalerl.ingest.formats.console.reader import FORMAT
from scalerl.ingest.formats.recognise import recognise
from scalerl.ingest.load import load_run
from scalerl.ingest.vocabularies import BY_TRAINER, CONSOLES as SETTINGS


@pytest.mark.parametrize("dress", [plain, by_ray])
@pytest.mark.parametrize("name", CONSOLES)
def test_the_console_of_every_trainer_is_read_to_the_last_digit(tmp_path, name, dress):
    write_it, trainer, metric = CONSOLES[name]
    steps = run()
    parts = list(write_it(steps))
    path = write(tmp_path, dress(parts))
    format = recognise(path)
    assert format is not None
    assert format.name == "console"
    record = load_run(path)
    assert record.config["source"] == {"path": str(path), "format": "console", "trainer": trainer}
    assert record.config["taken"]["pass rate"].startswith(f"{metric}, held-out ")
    assert {one.step: one.pass_rate for one in record.evals} == rates(steps, parts)
    (log,) = read_logs(FORMAT, path, everything)
    trained = {one.step: one.reward for one in steps if one.reward is not None}
    vocabulary = BY_TRAINER[trainer]
    reward = vocabulary.matches("train_reward", log.metrics)[0]
    assert values(log, reward) == trained


@pytest.mark.parametrize("name", CONSOLES)
def test_a_run_that_is_resumed_logs_its_steps_again(tmp_path, name):
    write_it, _, metric = CONSOLES[name]
    before, after = (
        run(12),
        [replace(one, held_out=one.held_out and one.held_out - 0.1) for one in run(15, first=8)],
    )
    parts = [*write_it(before), *write_it(after)]
    log = read(tmp_path, plain(parts))
    found = {step: rate for step, rate in rates(before, parts).items() if step < 8} | rates(after, parts)
    assert values(log, metric) == pytest.approx(found, abs=1e-9)
    assert any("the run was restarted at step 8" in note for note in log.notes)


@pytest.mark.parametrize("name", CONSOLES)
def test_a_console_without_validation_is_refused_with_the_setting(tmp_path, name):
    write_it, trainer, _ = CONSOLES[name]
    path = write(tmp_path, plain(list(write_it(without_validation(run())))))
    console = SETTINGS[trainer]
    hint = f"the console of {console.name}, without validation: set {console.validation}"
    with pytest.raises(InputError) as error:
        load_run(path)
    assert str(error.value).startswith(f"{path}: {hint}; no metric is held out: '")
    reward = str(error.value).rpartition("metric='")[2].partition("' fits it")[0]
    assert load_run(path, metric=reward).metric.kind == "training reward"
    warnings = load_run(write(tmp_path, plain(list(write_it(run()))))).warnings
    assert not any("without validation" in warning for warning in warnings)


def test_a_console_without_validation_and_reward_is_refused_with_the_setting(tmp_path):
    path = write(tmp_path, "(TaskRunner pid=7) step:1 - actor/entropy:0.3 - timing_s/step:9.5\n")
    with pytest.raises(InputError) as error:
        load_run(path)
    assert str(error.value) == (
        f"{path}: the console of verl, without validation: set trainer.test_freq; no metric here is a known "
        "pass rate or reward; metric= takes one of: actor/entropy, timing_s/step"
    )
    with pytest.raises(InputError, match="no metric 'x' with numbers"):  # what is asked for comes first
        load_run(path, metric="x")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "\x1b[36m(TaskRunner pid=7)\x1b[0m Size of train dataloader: 29, verl/trainer/ppo",
            "the console of verl, without rows of metrics: set trainer.logger='[\"console\"]'",
        ),
        (
            "2026-08-21 | INFO | skyrl.train.trainer:train:497 - Started: 'step'",
            "the console of SkyRL, without rows of metrics: set trainer.logger=console",
        ),
        (
            "INFO [prime_rl/trainer.py] a, b, c",
            "the console of prime-rl, without rows of metrics: no step has ended in it",
        ),
        (
            "Traceback (most recent call last), or anything: else",
            "no row of metrics in it, such as 'step:1 - ",
        ),
        (
            "[2024-12-14 13:28:05,293] [INFO] Setting ds_accelerator to cuda (auto detect)",
            "no row of metrics in it, such as 'step:1 - ",
        ),
    ],
)
def test_a_console_without_rows_is_no_table(tmp_path, line, message):
    for name in ("run.log", "slurm-1.out"):
        path = write(tmp_path, f"{line}\nand, more\n", name)
        with pytest.raises(InputError) as error:
            load_run(path)
        assert str(error.value).startswith(f"{path}: {message}")


def test_tables_and_binaries_are_no_consoles(tmp_path):
    table = "gpu_hours,pass_rate\n1,0.1\n2,0.2\n"
    assert not FORMAT.recognises(write(tmp_path, table, "x.log"))
    assert not FORMAT.recognises(write(tmp_path, '{"verl.trainer": 1}\n', "x.log"))
    assert not FORMAT.recognises(write(tmp_path, "step:1 - a:1\n", "x.csv"))
    assert not FORMAT.recognises(write(tmp_path, "step:1 - a:1\n".encode("utf-16"), "x.log"))
    assert not FORMAT.recognises(write(tmp_path, "", "x.log"))
    assert not FORMAT.recognises(write(tmp_path, gzip.compress(b"step:1 - a:1\n"), "x.log.gz"))
    assert not FORMAT.recognises(write(tmp_path, os.urandom(1000), "x.bin"))
    assert not FORMAT.recognises(tmp_path)
    path = write(tmp_path, "step:1 - a:1\n".encode("utf-16"), "x.log")
    with pytest.raises(InputError, match="UTF-16"):
        FORMAT.read(path, everything)


@pytest.mark.parametrize("name", ["run.log.gz", "run.log", "run.csv", "run.zip"])
def test_compressed_and_empty_files_are_told_so(tmp_path, name):
    path = write(tmp_path, "", name)
    with pytest.raises(InputError) as error:
        load_run(path)
    assert str(error.value) == f"{path}: the file is empty"
    if name.endswith(".zip"):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
            packed.writestr("run.log", VERL)
    else:
        path.write_bytes(gzip.compress(VERL.encode()))
    told = "compressed (zip): decompress it first (unzip FILE)"
    told = told if name.endswith(".zip") else "compressed (gzip): decompress it first (gunzip -c FILE > LOG)"
    for format in (None, "console", "jsonl"):
        with pytest.raises(InputError) as error:
            load_run(path, format=format)
        assert str(error.value) == f"{path}: {told}"


def test_a_run_in_a_file_of_any_run_has_the_name_of_its_folder(tmp_path, monkeypatch):
    for name, known in (("run.log", "seven"), ("Metrics.jsonl", "seven"), ("seven-b.log", "seven-b")):
        (tmp_path / "seven").mkdir(exist_ok=True)
        path = write(tmp_path / "seven", "step:1 - val-core/a/acc/mean@1:0.5\n", name)
        assert load_run(path, format="console").name == known
    monkeypatch.chdir(tmp_path / "seven")
    assert load_run("run.log").name == "seven"


def test_rows_of_a_second_trainer_are_noted(tmp_path):
    texts = [plain(list(CONSOLES[name][0](run()))) for name in ("verl", "skyrl")]
    path = write(tmp_path, "".join(texts))
    n = len(read(tmp_path, texts[0], "one.log").notes)
    (log,) = read_logs(FORMAT, path, everything)
    (note,) = log.notes[n:]
    assert re.search(r"holds rows of several trainers: \d+ of \w+, \d+ of \w+; those of one are read", note)
    assert load_run(path, trainer="skyrl").config["source"]["trainer"] == "skyrl"


def test_an_evaluation_in_a_damaged_cell_of_verl_is_left_out(tmp_path):
    name = "val-core/a/acc/mean@1"
    rows = [f"step:{n} - actor/entropy:0.3 - {name}:0.{n} - x:1\n" for n in range(1, 9)]
    rows[4] = rows[4].replace("0.5 -", "0.5Traceback (most recent call last): -")
    record = load_run(write(tmp_path, "".join(rows)))
    assert [one.step for one in record.evals] == [1, 2, 3, 4, 6, 7, 8]
    assert f"1 evaluation of '{name}' left out, not a number: step 5 (line 5)" in record.warnings


VERL = """\
(TaskRunner pid=71) {'actor_rollout_ref': {'actor': {'entropy_coeff': 0,
ray init kwargs: {'num_cpus': None}
\x1b[36m(TaskRunner pid=71)\x1b[0m step:0 - val-core/openai/gsm8k/reward/mean@1:np.float64(0.25)
Training Progress:   0%|          | 0/435 [00:00<?, ?it/s]\r(TaskRunner pid=71) step:1 - actor/entropy:0.3 - \
actor/pg_loss:nan - actor/lr:1e-06 - x:-2.5e-3 - n:np.int32(7)
(WorkerDict pid=72) WARNING: step: 5 of something
global_step:3 - actor/entropy:9
\x1b[36m(TaskRunner pid=71)\x1b[0m step:2 - actor/entropy:np.float64(0.2) - odd - y:True - \
timing_s/step:12.5 [repeated 2x across cluster] (Ray deduplicates logs by default.)
"""


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_cells_of_verl(tmp_path, mark, end):
    log = read(tmp_path, mark + VERL.replace("\n", end))
    assert log.notes == ()
    found = {name: values(log, name) for name in log.metrics}
    assert found == {
        "val-core/openai/gsm8k/reward/mean@1": {0: 0.25},
        "actor/entropy": {1: 0.3, 2: 0.2},
        "actor/lr": {1: 1e-06},
        "x": {1: -0.0025},
        "n": {1: 7},
        "timing_s/step": {2: 12.5},
    }


def test_names_of_verl_with_colons_and_cells_that_are_too_long(tmp_path):
    long = "c" * 5000 + ":1 - d:" + "1" * 5000
    log = read(
        tmp_path, f"step:1 - a:b/mean:0.5 - {long} - e:..1 - f:1.2.3 - g:.5 - h:-1 - i:1e999 - j:inf\n"
    )
    assert {name: values(log, name) for name in log.metrics} == {
        "a:b/mean": {1: 0.5},
        "g": {1: 0.5},
        "h": {1: -1},
    }


WORDS = "(main_task pid=7) Initial validation metrics: {'test_score/a':"


@pytest.mark.parametrize(
    ("rows", "steps"),
    [
        # As of December 2024: a row of the first validation, then step 0.
        (["step:0 - test_score/a:0.521", "step:0 - timing/gen:5.0", "step:9 - timing/gen:5.0"], [0, 10]),
        (["step:0 - val/test_score/a:0.521", "step:1 - timing_s/gen:5.0", "step:10"], [0, 10]),
        # Resumed from step 40, whose validation it makes again.
        (["step:40 - val/test_score/a:0.521", "step:50"], [40, 50]),
        # The words alone, as some of December 2024; with the row; and resumed, where the row is lost.
        ([f"{WORDS} 0.521}}", "step:0 - timing/gen:5.0", "step:9 - timing/gen:5.0"], [0, 10]),
        ([f'"{WORDS} np.float64(0.522)}}"', "step:0 - val/test_score/a:0.521", "step:10"], [0, 10]),
        ([f"{WORDS} 0.4}}", "step:41 - val/test_score/a:0.521", "step:50"], [41, 50]),
    ],
)
def test_the_first_validation_of_verl(tmp_path, rows, steps):
    log = read(tmp_path, "\n".join(rows) + " - val/test_score/a:0.546\n")
    assert values(log, "val/test_score/a") == dict(zip(steps, [0.521, 0.546], strict=True))
    assert not log.omitted


def test_rows_that_are_damaged_or_unfinished_are_noted(tmp_path):
    parts = list(console_logs.openrlhf(run()))
    texts = [part.text for part in parts]
    assert "'timing/make_experience'" in texts[3]
    texts[3] = texts[3].replace("'timing/make_experience'", "'timing/make_expe")
    log = read(tmp_path, "".join(texts))
    assert "1 row of metrics cannot be parsed, and left out; the first is in line 4" in log.notes[0]
    for name in CONSOLES:
        write_it, _, metric = CONSOLES[name]
        text = plain(list(write_it(run())))
        log = read(tmp_path, text + "Killed")
        assert not [note for note in log.notes if "unfinished" in note], name
        mark = {"nemo-rl": "0s\n  • generation", "open-instruct": "╰"}
        mark |= dict.fromkeys(("prime-rl", "prime-rl-2025"), " | LR")
        log = read(tmp_path, text[: text.rindex(mark.get(name, ":"))])
        assert [note for note in log.notes if "the last row is unfinished" in note], name
        assert metric in log.metrics


def test_times_of_loggers(tmp_path):
    log = read(tmp_path, plain(list(console_logs.skyrl(run(3)))))
    assert np.diff(log.metrics["reward/avg_raw_reward"].time_N).tolist() == [60, 60]
    log = read(tmp_path, "of 2023-11-14 22:13:20 step:1 - a:1\nmade 2023-99-14 22:13:20 step:2 - a:1\n")
    assert log.metrics["a"].time_N.tolist()[0] == 1.7e9
    assert math.isnan(log.metrics["a"].time_N[1])


def test_panels_of_open_instruct_are_not_given_a_step_of_another(tmp_path):
    parts = [part.text for part in console_logs.open_instruct(run(7, every=2))]
    assert "training_step: 4" in parts[3]
    parts[3] = parts[3].partition("\n")[2]  # the top of the panel of training is lost
    log = read(tmp_path, "".join(parts))
    assert list(values(log, "eval/pass_at_1")) == [2, 6]
    assert "open-instruct prints two decimals" in log.notes[0]


def test_epochs_of_nemo_rl_of_which_the_first_are_missing(tmp_path):
    steps = [one for one in run(14) if one.step > 7]
    log = read(
        tmp_path, "\n" + "=" * 25 + " Epoch 2/9 " + "=" * 25 + plain(list(console_logs.nemo_rl(steps)))
    )
    assert list(values(log, "train/reward")) == [one.step for one in steps]


def test_evaluations_of_slime_in_every_rollout(tmp_path):
    log = read(tmp_path, plain(list(console_logs.slime(run(3, every=1)))))
    assert values(log, "eval/aime") == {0: 0.2, 1: 0.23, 2: 0.26, 3: 0.29}
    assert values(log, "train/pg_clipfrac") == {1: 0.01, 2: 0.01, 3: 0.01}  # of the last update
    assert not any("-truncated" in name for name in load_run(tmp_path / "run.log").config["taken"])


def test_damaged_numbers_are_no_warnings_of_python():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert parse_dict("{'reward': 0.5in (1,), 'epoch': 0.1}", "run.log") is None
    assert not found


def test_lines_that_are_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "ROW", replace(limits.ROW, most=200))
    long = "x" * 1000 + " step:7 - a:1\n"
    log = read(tmp_path, f"{long}step:8 - a:1\nstep:9 - {long}")
    assert values(log, "a") == {8: 1}
    monkeypatch.setattr(limits, "KEYS", replace(limits.KEYS, most=5))
    path = write(tmp_path, "step:8 - " + " - ".join(f"a{n}:1" for n in range(9)) + "\n")
    assert FORMAT.recognises(path)
    with pytest.raises(InputError, match=f"{path}.*9 values in one row, and the limit is 5"):
        FORMAT.read(path, everything)


@pytest.mark.parametrize(
    "inside", ["-" * 10**5, "[" * 10**5, "{" * 10**5, "1+" * 10**5, "9" * 10**5, "not " * 10**4]
)
def test_dicts_that_are_bombs(tmp_path, inside):
    parts = list(console_logs.openrlhf(run()))
    bomb = Part(f"Global step 5: {{'a': {inside}}}\n")
    log = read(tmp_path, plain([*parts[:5], bomb, *parts[5:]]))
    assert values(log, "eval_math_pass1") == rates(run(), parts)
    assert "1 row of metrics cannot be parsed" in log.notes[0]


def test_many_processes_with_an_open_row(tmp_path):
    text = "".join(f"(Task pid={n}) Step {n}: \n(Task pid={n}) {{'a': '1.0',\n" for n in range(3000))
    log = read(tmp_path, plain(list(console_logs.skyrl(run()))) + text + NOISE[0])
    assert values(log, "eval/all/avg_score")[12] == 0.56
