import json

import pytest

from scalerl import InputError, read_table

RATES = [0.1, 0.2, 0.3]


def table(tmp_path, value, indent=2, **options):
    path = tmp_path / "evals.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value, indent=indent))
    return read_table(path, **options)


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize(
    "value",
    [
        [{"steps": 10 * (i + 1), "pass_rate": rate} for i, rate in enumerate(RATES)],
        {"history": [{"steps": 10 * (i + 1), "pass_rate": rate} for i, rate in enumerate(RATES)], "seed": 3},
        {"steps": [10, 20, 30], "pass_rate": RATES, "name": "a"},
    ],
    ids=["array", "rows in an object", "columns"],
)
def test_rows(tmp_path, value, indent):
    points = table(tmp_path, value, indent)
    assert points.compute_N.tolist() == [10, 20, 30]
    assert points.pass_rate_N.tolist() == RATES


@pytest.mark.parametrize("key", ["step-{:06}", "checkpoint-{}", "{}"])
@pytest.mark.parametrize("indent", [None, 2])
def test_objects_by_step(tmp_path, key, indent):
    value = {"base": {"gsm8k": {"acc": 0.05}}}
    value |= {key.format(10 * (i + 1)): {"gsm8k": {"acc": rate}} for i, rate in enumerate(RATES)}
    points = table(tmp_path, value, indent, x="step", y="gsm8k.acc")
    assert points.compute_N.tolist() == [10, 20, 30]
    assert points.pass_rate_N.tolist() == RATES
    assert any("left out, as no step is in its name: base" in one for one in points.warnings)


def test_single_row_of_json_lines(tmp_path):
    points = table(tmp_path, '{"gpu_hours": 1, "pass_rate": 0.5}')
    assert points.pass_rate_N.tolist() == [0.5]
    assert points.warnings == ()


@pytest.mark.parametrize(
    ("value", "why"),
    [
        # The prompts of a single evaluation.
        ({"accuracy": 0.5, "per_prompt": [{"id": i, "correct": True} for i in range(4)]}, "without rows"),
        (
            {"hidden_size": 64, "layers": [1, 2]},
            r"a JSON object \(hidden_size, layers\) without rows; expected",
        ),
        (
            {"train": [{"step": 1, "pass_rate": 0.5}], "eval": [{"step": 1, "pass_rate": 0.5}]},
            "rows under train, eval: write those that are meant to a file",
        ),
        ('{\n  "steps": [1, 2],\n  "pass_rate": [0.5, 0.6\n}', "not JSON"),
    ],
)
def test_what_has_no_rows(tmp_path, value, why):
    with pytest.raises(InputError, match=why):
        table(tmp_path, value)
