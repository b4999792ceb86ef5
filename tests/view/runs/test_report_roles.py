"""The ledger, and who was busy when."""

from scalerl.view.runs.panels import step_panels
from scalerl.view.runs.roles import balances, ledger_rows, role_panels, role_rows


def step(n, generate=0.9, train=0.5, **ledger):
    """The n-th step of a run in which each step takes a second: two generators, one trainer."""
    return {
        "step": n,
        "device_seconds": {
            "generate": 2 * generate * n,
            "train": train * n,
            "idle": (3 - 2 * generate - train) * n,
        },
        "idle_seconds": {"generate": 2 * (1 - generate) * n, "train": (0.9 - train) * n},
        "wall_seconds": n,
        "tokens": {"generated": 1800 * n, "trained": 1000 * n},
        "queue": {"generating": 5, "generated": 1, "verified": 0},
        "ledger": {"admitted": 10 * n + 6, "trained": 8 * n, "zero_variance": 2 * n, "in_flight": 6} | ledger,
    }


def test_the_ledger_is_told_in_words_and_its_sums_are_checked():
    rows = dict(ledger_rows([step(1), step(2)]))
    assert rows["groups admitted"] == "26"
    assert rows["trained"] == "16"
    assert rows["left out: the rewards were all the same"] == "4"
    assert rows["in flight at the end"] == "6"
    assert rows["the sums"] == "balance at every step"
    assert "left out: verification failed" not in rows
    lost = dict(ledger_rows([step(1), step(2, in_flight=5)]))
    assert lost["the sums"] == "DO NOT BALANCE at 1 step"
    assert not balances(step(1, trained=9)["ledger"])
    assert ledger_rows([{"step": 1}]) == ledger_rows([]) == []


def test_what_was_run_again_is_told():
    rows = dict(ledger_rows([step(1)], [{"lost": {"steps": 3}}, {"lost": {"steps": 4}}]))
    assert rows["resumed"] == "2 times, running 7 steps again"


def test_each_role_has_its_busy_and_idle_time_and_its_speed():
    rows = dict(role_rows([step(1), step(10)]))
    assert rows["generators"] == "busy 18 s, idle 2 s (10 %); 1.0k tokens a second of work"
    assert (
        rows["trainer"]
        == "busy 5 s, idle 4 s (40 %), verifying and recording 1 s; 2.0k tokens a second of work"
    )
    assert role_rows([{"step": 1}]) == []


def test_weights_have_their_size_and_their_time():
    sync = {"bytes": 3_200_000, "seconds": 0.02, "update_seconds": 0.5}
    none = {"bytes": 0, "seconds": 0.0, "update_seconds": None}
    slower = sync | {"seconds": 0.04, "update_seconds": None}
    text = dict(role_rows([step(n) | {"weight_sync": s} for n, s in enumerate((sync, none, slower), 1)]))
    assert text["weights"] == (
        "3.20 MB a version, sent in 0.0300 s, at every generator after 0.500 s on average; "
        "0 s of the trainer's time"
    )
    assert "weights" not in dict(role_rows([step(1) | {"weight_sync": none}]))


def test_all_trainers_together_have_their_share_of_the_time():
    of_two = step(10)
    of_two["device_seconds"]["train"], of_two["idle_seconds"]["train"] = 10.0, 8.0
    of_two["device_seconds"]["idle"] = 40 - 18 - 10.0  # two trainers and two generators
    text = dict(role_rows([of_two]))["trainer"]
    assert text.startswith("busy 10 s, idle 8 s (40 %), verifying and recording 2 s; 1.0k tokens")
    # A GPU that only evaluates idles for as long, and is no trainer's.
    of_two["device_seconds"]["idle"] += 10
    of_two["idle_seconds"]["apart"] = 10.0
    assert dict(role_rows([of_two]))["trainer"] == text


def test_the_panels_show_both_roles_and_the_places_of_the_groups():
    busy, queue = step_panels([step(n) for n in range(1, 8)], panels=role_panels())
    last = {line["name"]: line["y"][-1] for panel in (busy, queue) for line in panel["lines"]}
    assert last == {"generators": 90, "trainer": 50, "generating": 5, "generated": 1, "verified": 0}
    assert step_panels([{"step": 1}], panels=role_panels()) == []


def test_a_role_is_busy_by_the_time_of_each_step():
    steps = [step(1), step(2, generate=0.5)]  # 1.8 of 2 seconds, and 0.2 of the next 2
    busy, _ = step_panels(steps, panels=role_panels())
    assert busy["lines"][0]["y"] == [None, 10]


def test_one_of_something_is_one():
    assert dict(ledger_rows([step(1)], [{"lost": {"steps": 1}}]))["resumed"] == "1 time, running 1 step again"
