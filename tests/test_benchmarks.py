"""Benchmarks run at their smallest, and print tables of sound numbers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def rows_of(script, *arguments):
    """The rows of the tables that a benchmark prints, as lists of cells."""
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    table = [line.strip("| ").split("|") for line in done.stdout.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in table[2:]]


@pytest.mark.slow
def test_the_mismatch_of_a_16_bit_model_is_there_and_an_fp32_head_on_both_sides_lessens_it():
    rows = {row[0]: [float(cell) for cell in row[1:]] for row in rows_of("mismatch.py", "--tiny")}
    assert list(rows) == ["both", "generator", "trainer", "neither"]
    for tokens, entropy, mean, high, largest, size in rows.values():
        assert tokens == 8 * 16
        assert entropy > 0.5
        assert 1e-5 < mean < high <= largest < 1
        assert 0.9 < size < 1
    assert rows["both"][2] < min(rows[name][2] for name in rows if name != "both")


@pytest.mark.slow
def test_a_chunked_loss_needs_less_memory_than_a_whole_one():
    sizes = ["--tokens", "256", "--hidden", "32", "--vocabulary", "40000", "--chunk", "32"]
    whole, chunked, ratio = rows_of("vocabulary_loss.py", *sizes)
    assert float(whole[1]) > 2 * 256 * 40_000 * 4 / 2**20  # the logits, and what is made of them
    assert 0.02 < float(ratio[1]) < 0.6
    assert float(chunked[2]) > 0


@pytest.mark.slow
def test_pruners_are_measured_on_the_same_studies():
    rows = rows_of("sweep.py", "--studies", "1", "--jobs", "1")
    budgets = {row[0]: float(row[1].split()[0]) for row in rows if "±" in row[1]}  # of the second order
    assert budgets.pop("none") == 1.0
    assert all(0.1 < budget <= 1.0 for budget in budgets.values())
    for name, budget in budgets.items():
        if name.startswith("forecast"):
            assert budgets[f"early {name}"] <= budget
    assert budgets["ASHA, factor 4, from 1/16"] < budgets["ASHA, factor 4, from 1/2"]
    frontier = [row for row in rows if row[0] == "early forecast"]
    assert len(frontier) == 2
    assert all(0 < float(cell) <= 1 for row in frontier for cell in row[1:])


def test_a_small_bank_is_scored_by_eleven_methods():
    pytest.importorskip("scipy")
    command = [sys.executable, str(BENCHMARKS / "bank.py"), "--runs", "3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    part = done.stdout.partition("first 3/4 of the compute")[2].splitlines()
    rows = {line[:30].strip(): line[30:].split() for line in part[3:14]}
    assert len(rows) == 11
    for runs, error, inside, width, score, *_ in rows.values():
        assert runs in ("2/3", "3/3")
        assert 0 <= float(error) < 1
        assert 0 <= float(inside) <= 1
        assert 0 < float(width) <= float(score) + 1e-4


def test_shapes_are_forecast_and_what_was_asked_is_judged():
    command = [sys.executable, str(BENCHMARKS / "coverage.py"), "--runs", "2", "--jobs", "1", "--shapes"]
    done = subprocess.run([*command, "many", "two-phase"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cells, _, rest = done.stdout.partition("\neach group pooled\n")
    rows = {line[:32].strip(): line[32:].split() for line in cells.splitlines()[1:]}
    assert len(rows) == 3 * (1 + 4)
    pooled = {line[:32].strip(): line[32:].split() for line in rest.splitlines()[:6]}
    for row in rows.values():
        answered = int(row[1])
        assert row[0] == "2"
        assert {row[2], row[3]} <= {f"{held / answered:.3f}" for held in range(answered + 1)}
        assert float(row[5]) > 0
    own = [rows[f"400 evals, at {at}"] for at in ("0.25", "0.5", "0.75")]
    assert all(row[16] == "0" for row in own)  # a single rise has no change to be seen
    assert [row[:8] for row in own] == [pooled[f"many, at {at}"][:8] for at in ("0.25", "0.5", "0.75")]
    assert rows["burst, then slow, at 0.25"][16] == "2"
    assert rows["learning rate up, at 0.25"][16] == "0"  # it changes later
    assert "one rise: curve at least 0.93: " in rest
    assert "change seen: reported, suspected or held at least 0.9: " in rest
    assert "two speeds" not in rest


def test_learning_curves_of_lcdb_are_read_and_forecast(tmp_path):
    pytest.importorskip("scipy")
    folder, info = tmp_path / "lcdb", tmp_path / "lcdb-0.1.0.dist-info"
    for place in (folder, info):
        place.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lcdb\nVersion: 0.1.0\n")
    (folder / "datasets.csv").write_text("openmlid,Name\n44,spambase\n")
    rows = ["openmlid,learner,size_train,size_test,outer_seed,inner_seed,traintime,score_train,score_valid"]
    sizes = [round(16 * 2 ** (i / 2)) for i in range(14)]
    for place, (learner, n) in enumerate([("sklearn.a.Rises", 14), ("sklearn.a.Short", 9), ("Constant", 14)]):
        for size in sizes[:n]:
            mean = 0.6 if learner == "Constant" else 0.9 - (10 + place) / (20 + size)
            for split, noise in enumerate((-0.1, 0.1)):  # of which the mean has none
                rows.append(f"44,{learner},{size},100,{split},0,0.1,1.0,{mean + noise}")
    (folder / "database-accuracy.csv").write_text("\n".join(rows))
    command = [sys.executable, str(BENCHMARKS / "lcdb.py"), "--jobs", "1", "--each"]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 of 1 curves")  # one is too short, one constant
    end = 0.9 - 10 / (20 + sizes[-1])
    assert "| Rises on spambase (44) | 7 of 14 | 0." in done.stdout
    assert done.stdout.rstrip().endswith(f"| {end:.3f} |")
    table = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| MMF4")]
    assert float(table[0][5].strip(" |")) < 0.002  # MMF4 has this curve exactly


def test_the_sandbox_verifies_more_programs_than_are_asked():
    rows = rows_of("sandbox.py", "--programs", "2")
    assert rows[0][0] == "bare Python, no sandbox"
    for name, milliseconds, bare, minute, _ in rows[1:]:
        assert name.startswith(("bwrap: ", "namespaces: "))
        assert float(milliseconds) > 1
        assert float(bare) > 1
        assert float(minute.replace(",", "")) == pytest.approx(120e3 / float(milliseconds), rel=0.1)
