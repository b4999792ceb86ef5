"""W&B's own client, and the process that it starts, against a server on this machine."""

import math
import threading
from base64 import b64encode

import pytest
import wandb
from wandb_files import keep_wandb_home
from wandb_server import KEY, Stored, WandbServer
from watching import follower

from scalerl import InputError, load_run
from scalerl.cli.main import main
from scalerl.ingest.load import read_source
from scalerl.ingest.options import ReadOptions
from scalerl.ingest.trackers import named, wandb as reader

START = 1_700_000_000.5


def rows(n, every=5, width=1, more=()):
    """Rows of training, and every so often an evaluation; evaluations have rows of their own."""
    found = []
    for s in range(n):
        time = {"_timestamp": START + 60 * s, "_runtime": 60.0 * s}
        at = 2 * s * width
        found.append({"_step": at, **time, "train/reward": s / n, "loss": 1 - s / n, **dict(more)})
        if s % every == 0:
            found.append({"_step": at + 1, **time, "eval/accuracy": 0.2 + s / (2 * n)})
    return found


@pytest.fixture(scope="module")
def _client(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        keep_wandb_home(patch, home)
        patch.setenv("WANDB_DIR", str(home))
        patch.setenv("WANDB_ERROR_REPORTING", "false")
        yield
        wandb.teardown()


@pytest.fixture
def serve(_client, monkeypatch):
    """Starts a server with some runs, which W&B's settings lead to."""
    servers = []

    def start(*runs):
        servers.append(WandbServer(*runs))
        monkeypatch.setenv("WANDB_BASE_URL", servers[-1].url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.mark.parametrize("exported", [0, 40, 1000])
def test_a_run_of_rows_that_are_exported_and_of_those_that_are_not(serve, exported):
    made = rows(100, more={f"system/{n}": 1.0 for n in range(10)})
    config = {"n_gpus": 8, "model": {"name": "q"}, "_wandb": {"x": 1}}
    server = serve(Stored("abc123", "my run", made, config=config, exported=min(exported, len(made))))
    by_id, by_name = load_run("wandb:team/rl/abc123"), load_run("wandb:team/rl/my run")
    assert repr(by_id.evals) == repr(by_name.evals)
    assert by_id.config["name"] == "my run"
    assert by_id.config["trainer_config"] == {"n_gpus": 8, "model.name": "q"}
    assert [one.step for one in by_id.evals] == [row["_step"] for row in made if "eval/accuracy" in row]
    expected = [row["eval/accuracy"] for row in made if "eval/accuracy" in row]
    assert [one.pass_rate for one in by_id.evals] == pytest.approx(expected)
    assert by_id.evals[0].time == START
    assert by_id.logged_axes() == ("gpu_hours", "steps")
    (imported,) = read_source("wandb:team/rl/abc123").runs
    assert sum("reward_mean" in row for row in imported.steps()) == 100
    asked = server.scanned()
    assert not any("system" in key for keys in asked for key in keys)
    assert all("eval/accuracy" not in keys or len(keys) == 1 for keys in asked)
    assert load_run("wandb:team/rl/runs/abc123").config["name"] == "my run"  # as in the address of its page


def test_the_key_is_sent_to_the_server_and_nowhere_else(serve, capsys, tmp_path):
    server = serve(Stored("a", "a", rows(20)))
    main(["ingest", "wandb:team/rl/a", "-o", str(tmp_path / "run")])
    assert server.keys == {"Basic " + b64encode(f"api:{KEY}".encode()).decode()}
    said = capsys.readouterr()
    assert KEY not in said.out + said.err
    assert "W&B" not in said.err  # whose client prints
    assert all(KEY.encode() not in file.read_bytes() for file in tmp_path.rglob("*.json*"))


def test_the_runs_of_a_group_and_of_a_project(serve):
    made = [Stored(f"id{n}", f"seed {n % 3}", rows(20), group="g" if n < 4 else "h") for n in range(60)]
    made[1].rows = []
    serve(*made)
    found = read_source("wandb:team/rl?group=g")
    assert [one.config["name"] for one in found.runs] == ["seed 0 id0", "seed 2", "seed 0 id3"]
    assert [one.run for one in found.unread] == ["seed 1"]
    assert "no metric here is a known pass rate" in found.unread[0].reason
    assert len(read_source("wandb:team/rl").runs) == 59  # of two pages
    one = read_source("wandb:team/rl?group=g", ReadOptions(run="seed 2"))
    assert [run.config["name"] for run in one.runs] == ["seed 2"]


def test_metrics_in_as_many_rows_that_are_not_the_same_rows(serve):
    """W&B sends no row that has both: each is asked for by itself."""
    made = [
        {"_step": s, "_timestamp": START + s, ("eval/accuracy" if s % 2 else "train/reward"): 0.5}
        for s in range(40)
    ]
    server = serve(Stored("a", "a", made))
    (run,) = read_source("wandb:team/rl/a").runs
    assert len(run.evals) == sum("reward_mean" in row for row in run.steps()) == 20
    assert sorted(map(len, server.scanned())) == [1, 1, 2]
    assert "left_out" not in run.config


def test_a_run_with_thousands_of_metrics_is_asked_for_a_few(serve):
    many = {f"gradients/layer.{n}": 0.5 for n in range(5000)}
    server = serve(Stored("a", "a", rows(10, every=1, more=many)))
    (run,) = read_source("wandb:team/rl/a").runs
    assert len(run.evals) == 10
    assert {key for keys in server.scanned() for key in keys} == {"train/reward", "loss", "eval/accuracy"}


def test_rows_of_several_pages_and_of_wide_steps(serve):
    server = serve(Stored("a", "a", rows(1500)), Stored("b", "b", rows(1500, width=4096)))
    for id in "ab":
        server.asked.clear()
        assert len(load_run(f"wandb:team/rl/{id}").evals) == 300
        assert len(server.scanned()) <= 10
    assert load_run("wandb:team/rl/b").evals[-1].step == 1495 * 2 * 4096 + 1


def test_fewer_values_than_the_server_counts_are_a_warning(serve):
    serve(Stored("a", "a", rows(20), counts={"eval/accuracy": 6}))
    (warning,) = [one for one in load_run("wandb:team/rl/a").warnings if "counts" in one]
    assert warning == "W&B counts 6 values of 'eval/accuracy', and sent 4"


def test_the_steps_of_the_trainer_go_before_the_count_of_calls(serve):
    made = rows(20)
    for row in made:
        row["train/global_step"] = 10 * (row["_step"] // 2)
    serve(Stored("a", "a", made))
    found = load_run("wandb:team/rl/a")
    assert [one.step for one in found.evals] == [0, 50, 100, 150]
    assert any("the step is 'train/global_step'" in one for one in found.warnings)


def test_values_that_are_no_numbers_are_left_out_by_name(serve):
    made = rows(20)
    made[1]["eval/accuracy"], made[7]["eval/accuracy"] = "NaN", "Infinity"
    serve(Stored("a", "a", made))
    (run,) = read_source("wandb:team/rl/a").runs
    assert len(run.evals) == 2
    assert run.config["left_out"]["reasons"] == {"NaN": 1, "infinite": 1}


def test_a_run_with_a_summary_alone(serve):
    serve(Stored("a", "a", [], summary={"eval": {"accuracy": 0.5}, "eval/accuracy": 0.5, "_step": 7}))
    found = load_run("wandb:team/rl/a")
    assert [(one.step, one.pass_rate) for one in found.evals] == [(7, 0.5)]
    assert any("only a summary" in one for one in found.warnings)
    assert math.isnan(found.evals[0].time)


def test_errors(serve, monkeypatch):
    server = serve(Stored("x1", "same", rows(5)), Stored("x2", "same", rows(5)))

    def refusal(name="wandb:team/rl/x1"):
        with pytest.raises(InputError) as error:
            load_run(name)
        assert str(error.value).startswith(f"{name}: ")
        assert "\n" not in str(error.value)
        assert KEY not in str(error.value)
        return str(error.value)

    assert "2 runs have this name; choose one by its ID: wandb:team/rl/x1, wandb:team/rl/x2" in refusal(
        "wandb:team/rl/same"
    )
    assert "no run 'none' in the project; there are same, same" in refusal("wandb:team/rl/none")
    assert "no run in the group 'none'" in refusal("wandb:team/rl?group=none")
    assert "Could not find project other" in refusal("wandb:team/other/x")
    monkeypatch.setattr(reader, "_SECONDS", 2)
    server.status = 401
    assert "returned error 401" in refusal()
    server.status = 503
    assert f"{server.url} gave no answer within 2 s, or errors" in refusal()
    server.status = 200
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    assert "http://127.0.0.1:9 gave no answer within 2 s" in refusal()
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", "short")
    assert "WANDB_API_KEY invalid" in refusal()
    monkeypatch.delenv("WANDB_API_KEY")
    assert f"no key for {server.url}; set WANDB_API_KEY, or run: wandb login" in refusal()


def test_a_server_that_stops_in_the_middle(serve, monkeypatch):
    """W&B's client waits for its own process without limit."""
    server = serve(Stored("a", "a", rows(20)))
    monkeypatch.setattr(named, "ANSWER_SECONDS", 2.0)
    answer = server.answer

    def stops(query, variables):
        server.hangs = "SampledHistoryPage" in query
        while server.hangs:
            threading.Event().wait(0.05)
        return answer(query, variables)

    server.answer = stops
    with pytest.raises(InputError, match="no answer within 2 s"):
        load_run("wandb:team/rl/a")
    server.hangs = False


def test_a_query_that_is_not_of_the_schema_is_refused():
    server = WandbServer()
    try:
        for query in (
            "query A { viewer { id nonsense } }",
            'query A { project(name: "rl", owner: "x") { internalId } }',
            "query A { viewer }",
        ):
            with pytest.raises(Exception, match=r"Cannot query|Unknown argument|wrong selection"):
                server.answer(query, {})
        assert server.answer("query A { viewer { id } }", {}) == {"data": {"viewer": {"id": "u"}}}
    finally:
        server.close()


def test_watch_reads_it_again(serve):
    made = rows(100)
    server = serve(Stored("a", "a", made[:60]))
    followed = follower("wandb:team/rl/a")
    assert followed.look()
    before = len(followed.run.points)
    server.runs[0].rows = made
    assert followed.look()
    assert len(followed.run.points) > before
    server.status = 401
    before = followed.run
    assert not followed.look()  # what was read last stays
    assert followed.run is before
    assert "returned error 401" in followed.problem
