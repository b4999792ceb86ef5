"""Records that are cut back to a checkpoint: nothing is lost, and nothing comes into lost.jsonl twice."""

import json
import shutil

import numpy as np
import pytest
from killed_at import DONE, KILLED, killed_at

from scalerl.errors import InputError
from scalerl.record.evaluation import EvalPoint
from scalerl.record.folder import RECORDS
from scalerl.record.reader import RunRecord
from scalerl.record.writer import RunWriter


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_step(writer, step):
    spent = {"device_seconds": {"train": 2.0 * step}, "flops": {"train": 10 * step}}
    writer.step({"step": step, **spent, "tokens": {"trained": step}}, {"step": step, "prompt": ["a"]})
    if step % 2 == 0:
        writer.evaluation(EvalPoint(step, 0.5), "set", ["a"], np.array([1]))


def cut_at_eight(path):
    """A run of 8 steps, and the lengths of its files at the third and the sixth."""
    writer, lengths = RunWriter(path, {"name": "run"}), {}
    for step in range(1, 9):
        write_step(writer, step)
        if step == 7:
            writer.alarm({"step": 7})  # a file that no checkpoint knows
        lengths[step] = writer.lengths()
    writer.close()
    return lengths[3], lengths[6]


def content(path):
    return {name: (path / name).read_bytes() for name in RECORDS if (path / name).exists()}


def check_lost(path, cuts):
    """`cuts` are the steps that each cut has cost, from the first of them on."""
    heads = [row for row in lines(path / "lost.jsonl") if "lost" in row]
    assert [head["lost"]["steps"] for head in heads] == [len(steps) for steps in cuts]
    rows = [row for row in lines(path / "lost.jsonl") if row.get("file") == "steps.jsonl"]
    assert [json.loads(row["line"])["step"] for row in rows] == [step for steps in cuts for step in steps]
    assert all(head["lost"]["flops"]["train"] == 10 * head["lost"]["steps"] for head in heads)


def test_a_cut_that_is_killed_at_any_moment_is_done_by_the_next_resume(tmp_path):
    _, lengths = cut_at_eight(tmp_path / "whole")
    whole = {name: data[: lengths.get(name, 0)] for name, data in content(tmp_path / "whole").items()}
    whole = {name: data for name, data in whole.items() if data}
    for step in range(1, 200):
        path = shutil.copytree(tmp_path / "whole", tmp_path / "run")
        status = killed_at(step, path, lambda path=path: RunWriter.resume(path, lengths))
        RunWriter.resume(path, lengths).close()
        assert content(path) == whole, step
        check_lost(path, [[7, 8]])
        assert not list(path.glob(".cut.part"))
        shutil.rmtree(path)
        if status == DONE:
            assert step > 15
            return
        assert status == KILLED
    pytest.fail("it did not come to its end")


def test_a_resume_from_an_older_checkpoint_after_a_killed_one_counts_every_step_once(tmp_path):
    older, lengths = cut_at_eight(tmp_path / "whole")
    for step in range(1, 200):
        path = shutil.copytree(tmp_path / "whole", tmp_path / "run")
        status = killed_at(step, path, lambda path=path: RunWriter.resume(path, lengths))
        RunWriter.resume(path, older).close()
        assert {name: len(data) for name, data in content(path).items()} == older
        lost = [row for row in lines(path / "lost.jsonl") if row.get("file") == "steps.jsonl"]
        assert sorted(json.loads(row["line"])["step"] for row in lost) == [4, 5, 6, 7, 8], step
        assert sum(row["lost"]["steps"] for row in RunRecord.read(path).lost()) == 5
        shutil.rmtree(path)
        if status == DONE:
            return
    pytest.fail("it did not come to its end")


def test_steps_that_are_run_and_lost_again_are_counted_again(tmp_path):
    path = tmp_path / "run"
    _, lengths = cut_at_eight(path)
    for _ in range(2):  # the same lines each time: nothing in them tells them apart
        writer = RunWriter.resume(path, lengths)
        for step in (7, 8):
            write_step(writer, step)
        writer.close()
    RunWriter.resume(path, lengths).close()
    check_lost(path, [[7, 8]] * 3)


FOREIGN = [
    b'{"step": 9}\n',
    b'{"foreign": 1}\n',
    b"[]\n",
    b"7\n",
    b'"text"\n',
    b"null\n",
    b"no json\n",
    b"\n",
    b"\xff\xfe broken\n",
    b'{"step": "x", "device_seconds": 3}\n',
    b'{"step": 9, "device_seconds": {"train": "x"}, "flops": {}, "tokens": {}}\n',
    b'{"step": true, "device_seconds": {}, "flops": {}, "tokens": {}}\n',
    b'{"step": 9, "device_seconds": {"train": 1%s}, "flops": {}, "tokens": {}}\n' % (b"0" * 400),
    b'{"step": NaN, "device_seconds": {}, "flops": {}, "tokens": {}}\n',
    b"[" * 5000 + b"\n",
    b'{"step": 9, "device',
]


@pytest.mark.parametrize("rows", [*FOREIGN, b"".join(FOREIGN)], ids=lambda rows: repr(rows[:16]))
def test_rows_of_somebody_else_are_cut_and_kept(tmp_path, rows):
    path = tmp_path / "run"
    _, lengths = cut_at_eight(path)
    with (path / "steps.jsonl").open("ab") as file:
        file.write(rows)
    RunWriter.resume(path, lengths).close()
    (head,) = RunRecord.read(path).lost()
    assert head["lost"]["steps"] == 2
    kept = [row["line"] for row in lines(path / "lost.jsonl") if row.get("file") == "steps.jsonl"][2:]
    assert "\n".join(kept).encode(errors="surrogateescape") == rows.removesuffix(b"\n")
    assert len(RunRecord.read(path).steps()) == 6
    check = RunWriter.resume(path, lengths)  # nothing is left to cut
    check.close()
    assert len(RunRecord.read(path).lost()) == 1


def test_a_prepared_cut_that_was_damaged_is_one_line_and_nothing_is_cut(tmp_path):
    path = tmp_path / "run"
    _, lengths = cut_at_eight(path)
    before = content(path)
    for text in ("", "{}\n", '{"cut": {"steps.jsonl": -1}}\n', '{"cut": {"../outside": 0}}\n', "no json"):
        (path / ".cut.part").write_text(text)
        with pytest.raises(InputError, match=r"\.cut\.part: damaged"):
            RunWriter.resume(path, lengths)
    assert content(path) == before
