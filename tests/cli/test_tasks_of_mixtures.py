"""What `fit` and `compare` print of the tasks of a mixture, beside the run as a whole."""

import json
import re

import pytest
from mixed_runs import write_mixed

from scalerl.cli.main import main


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two recipes: the second takes twice as long to learn the hard task."""
    folder = tmp_path_factory.mktemp("runs")
    return [str(write_mixed(folder / "fast")), str(write_mixed(folder / "slow", 2, 40.0, 3e-5))]


def test_fit_prints_a_line_for_each_task(folders, capsys):
    assert main(["fit", folders[0], "--at", "2x"]) == 0
    text = capsys.readouterr().out
    lines = re.findall(r"^task (\w+) +last (\S+)   ceiling A (\S+) .*at 1.44 TFLOP: (\S+) \[", text, re.M)
    assert [name for name, *_ in lines] == ["hard", "easy"]
    assert [float(rate) for rate in lines[0][1:]] == pytest.approx([0.8, 0.8, 0.8], abs=0.03)
    assert main(["fit", folders[0], "--at", "2x", "--json"]) == 0
    both = json.loads(capsys.readouterr().out)["tasks"]
    assert main(["fit", folders[0], "--at", "2x", "--json", "--y", "pass_rate/hard"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert both["hard"] == alone
    assert "tasks" not in alone


def test_a_start_that_is_given_is_that_of_the_whole(folders, capsys):
    assert main(["fit", folders[0], "--r0", "0.5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["r0"]["source"] == "given"
    assert found["tasks"]["hard"]["r0"]["source"] == "measured"


def test_compare_prints_the_difference_for_each_task(folders, capsys):
    assert main(["compare", *folders]) == 0
    assert re.findall(
        r"^task (\w+) +[+-]\S+ \+- \S+ over 300 prompts, paired", capsys.readouterr().out, re.M
    ) == [
        "hard",
        "easy",
    ]
