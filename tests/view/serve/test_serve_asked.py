"""What is asked of the runs: a budget on its own axis, a target, a level."""

import pytest
from growing import Growing
from serve_client import serving, settled

from scalerl.cli.main import main
from scalerl.view.facts.standing import StandingQuery

HOURS = {"kind": "gpu_hours", "amount": 0.2}


def ids(rows):
    return ",".join(row["id"] for row in rows.values())


def test_a_budget_is_one_on_its_own_axis_alone(runs):
    Growing(runs / "hours", 12, 3, budget=HOURS)
    asked = StandingQuery(target=0.58, budget=900.0, axis="steps")
    with serving(runs, asked) as client:
        rows = settled(client)
        assert {(row["axis"], row["end"]) for row in rows.values()} == {("steps", 900)}
        assert all(row["target"]["verdict"] for row in rows.values())
        on_steps = client.get(f"/api/overlay?runs={ids(rows)}").json()
        assert (on_steps["axis"], on_steps["budget"]) == ("steps", 900)
        on_tokens = client.get(f"/api/overlay?runs={ids(rows)}&axis=tokens").json()
        assert (on_tokens["axis"], on_tokens["budget"]) == ("tokens", None)


def test_where_the_axis_of_the_budget_was_not_logged_no_verdict_is_given(runs):
    Growing(runs / "hours", 12, 3, budget=HOURS)
    with serving(runs, StandingQuery(target=0.58, budget=900.0, axis="samples")) as client:
        row = settled(client)["hours"]
    assert (row["axis"], row["share"], row["eta"], row["target"]) == ("gpu_hours", None, None, None)
    assert row["end"] == pytest.approx(2 * row["compute"])


def test_a_budget_is_asked_for_with_its_axis(runs, capsys):
    assert main(["serve", str(runs), "--budget", "900"]) == 2
    axes = "gpu_hours, flops, tokens, tokens_processed, samples, steps"
    needs = f"--budget needs its axis: name one with --x ({axes}), or with it: '1200 steps'"
    assert capsys.readouterr().err == f"scalerl: {needs}\n"
    assert main(["serve", str(runs), "--x", "samples", "--budget", "900 steps"]) == 2
    assert "compute is on the axis samples here" in capsys.readouterr().err
    assert main(["serve", str(runs), "--x", "dollars"]) == 2
    err = capsys.readouterr().err
    assert err == f"scalerl: --x dollars: no compute axis of runs; choose one of {axes}\n"


def test_every_curve_ends_at_its_own_budget(runs):
    Growing(runs / "longer", 12, 3, budget={"kind": "steps", "amount": 3000})
    with serving(runs) as client:
        rows = settled(client)
        data = client.get(f"/api/overlay?runs={rows['a/a-0']['id']},{rows['longer']['id']}").json()
    assert data["budget"] is None
    ends = {run["name"]: run["fit"]["curve"]["compute"][-1] for run in data["runs"]}
    assert ends == {"a-0": 1200, "longer": 3000}


def test_a_comparison_is_asked_what_the_server_is(runs):
    asked = StandingQuery(target=0.5, budget=900.0, level=0.8, axis="steps")
    with serving(runs, asked) as client, serving(runs) as plain:
        rows = settled(client)
        found = client.get(f"/api/compare?runs={ids(rows)}").json()["result"]
        settled(plain)
        before = plain.get(f"/api/compare?runs={ids(rows)}").json()["result"]
        on_tokens = client.get(f"/api/compare?runs={ids(rows)}&axis=tokens").json()["result"]
    assert (found["level"], before["level"], on_tokens["level"]) == (0.8, 0.95, 0.8)
    quantities = [set(one["pairs"][0]["differences"]) for one in (found, on_tokens)]
    assert quantities[0] - quantities[1] == {"pass_rate"}
    assert "compute_to_target" in quantities[1]
