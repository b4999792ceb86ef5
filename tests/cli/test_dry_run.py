"""`scalerl train --dry-run` with assumed devices: which process has which, and what does not fit."""

import json
import os

import pytest

from scalerl.cli.main import main
from scalerl.errors import InputError
from scalerl.rl.config.memory import CONTEXT

SHAPES = {
    "Qwen3-0.6B": (1024, 28, 16, 3072, True),
    "Qwen3-1.7B": (2048, 28, 16, 6144, True),
    "Qwen3-8B": (4096, 36, 32, 12288, False),
}
SHIPPED = {
    "scalerl_24gb": ("Qwen3-0.6B", "1x22.5"),
    "scalerl_80gb": ("Qwen3-1.7B", "1x79.6"),
    "scalerl_8x80gb": ("Qwen3-8B", "8x79.6"),
    # These say nothing of devices: --gpus 8 splits them.
    **dict.fromkeys(("scalerl", "deepseek_grpo", "magistral"), ("Qwen3-8B", "8x79.6")),
    **dict.fromkeys(("minimax_m1", "qwen25_dapo"), ("Qwen3-8B", "8x79.6")),
}


@pytest.fixture
def model(tmp_path):
    """Returns the folder of a model that has nothing but its config.json."""

    def make(name):
        hidden, layers, heads, inner, tied = SHAPES[name]
        config = {
            "model_type": "qwen3",
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": inner,
            "vocab_size": 151936,
            "tie_word_embeddings": tied,
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return make


def dry_run(capsys, *args):
    main(["train", *map(str, args), "--dry-run", "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("recipe", SHIPPED)
def test_recipes_fit_the_machines_that_they_are_for(recipe, model, monkeypatch, capsys):
    name, gpus = SHIPPED[recipe]
    how = (recipe, "--set", f"model={model(name)}", "--gpus", gpus[0])
    monkeypatch.setenv("SCALERL_GPUS", gpus)
    found = dry_run(capsys, *how)
    assert all(device["fits"] for device in found["devices"])
    assert all(device["processes"] for device in found["devices"])  # none is left over
    # What they are for is used: with three fifths of it they would not fit.
    small = f"{gpus[:2]}{0.6 * float(gpus[2:]):g}"
    monkeypatch.setenv("SCALERL_GPUS", small)
    assert main(["train", *how, "--dry-run"]) == 2


def test_the_small_recipes_fit_the_smallest_gpu(monkeypatch, capsys):
    monkeypatch.setenv("SCALERL_GPUS", "1x22.5")
    for recipe in ("demo", "smollm2", "smollm2_lora"):
        assert all(device["fits"] for device in dry_run(capsys, recipe)["devices"])


def test_a_recipe_that_needs_all_gpus_says_so_where_it_has_one(model, monkeypatch, capsys):
    monkeypatch.setenv("SCALERL_GPUS", "8x79.6")
    assert main(["train", "scalerl", "--set", f"model={model('Qwen3-8B')}", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "--gpus 8 splits the roles over all GPUs of this machine; --dry-run shows all terms" in said


def test_roles_and_terms_are_printed_with_the_recipe(model, monkeypatch, capsys):
    monkeypatch.setenv("SCALERL_GPUS", "8x80")
    main(["train", "scalerl_8x80gb", "--set", f"model={model('Qwen3-8B')}", "--dry-run"])
    out = capsys.readouterr().out
    assert "placement.trainers = 3" in out
    assert "loss.max_ratio = 5.0" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["GPU", "2", "trainer", "masters", "10.2"] in rows
    assert ["GPU", "7,", "vLLM's", "share", "vLLM", "server", "weights", "15.3"] in rows
    assert out.count("of 68.0 free: fits") == 5
    assert out.count("fits") == 8


def test_the_engine_is_told_where_vllm_is_there_and_not_taken(model, monkeypatch, capsys):
    monkeypatch.setenv("SCALERL_GPUS", "2x80")
    monkeypatch.setenv("SCALERL_VLLM_PYTHON", "/there/bin/python")
    how = ["train", "scalerl_80gb", "--set", f"model={model('Qwen3-1.7B')}", "--gpus", "2", "--dry-run"]
    main([*how, "--set", "engine.kind=auto"])
    said = capsys.readouterr().err
    assert "the built-in engine generates (engine.kind = auto)" in said
    assert "installed" not in said
    main(how)
    assert "generates" not in capsys.readouterr().err
    # It may be many times slower where vLLM is not there yet, too; the small models are not for it.
    monkeypatch.delenv("SCALERL_VLLM_PYTHON")
    main(["train", "deepseek_grpo", "--set", f"model={model('Qwen3-0.6B')}", "--dry-run"])
    said = capsys.readouterr().err
    assert "--set engine.kind=vllm --generators 1, once it is installed" in said
    main(["train", "demo", "--dry-run"])
    assert "generates" not in capsys.readouterr().err


def test_what_vllm_has_room_for_and_what_a_checkpoint_takes_is_told(model, monkeypatch, capsys):
    """By hand: 1.7 B weights of two bytes; 28 layers x 2 x 8 heads x 128 x 2 bytes a position."""
    monkeypatch.setenv("SCALERL_GPUS", "2x80")
    how = ["train", "scalerl_80gb", "--set", f"model={model('Qwen3-1.7B')}", "--gpus", "2", "--dry-run"]
    main([*how, "--set", "decode_slots=400", "--set", "engine.gpu_memory=0.5"])
    lines = capsys.readouterr().out.splitlines()
    layer = 2 * 2048**2 + 2 * 1024 * 2048 + 3 * 2048 * 6144 + 2 * 128 + 2 * 2048
    weights = 151936 * 2048 + 28 * layer + 2048
    room = (40 * 2**30 - 2 * weights) / (28 * 2 * 8 * 128 * 2)
    (said,) = [line for line in lines if line.startswith("KV cache of a vLLM server")]
    assert f"{room:,.0f} tokens at most, {room / 400:,.0f} for each of 400 decode slots, of 8,213 of" in said
    (said,) = [line for line in lines if line.startswith("a checkpoint")]
    assert (
        said
        == f"a checkpoint: about {14 * weights / 2**30:.1f} GiB on disk; checkpoint.keep = 2 of them stay"
    )


def test_gpus_are_split_by_hand_or_by_the_planner(model, monkeypatch, capsys):
    monkeypatch.setenv("SCALERL_GPUS", "8x80")
    how = ("scalerl_80gb", "--set", f"model={model('Qwen3-1.7B')}", "--set", "engine.kind=auto")
    by_hand = dry_run(capsys, *how, "--gpus", 8, "--generators", 5, "--trainers", 2)
    roles = [[role["role"] for process in d["processes"] for role in process] for d in by_hand["devices"]]
    assert roles == [["trainer"]] * 2 + [["generator"]] * 5 + [["evaluation"]]
    monkeypatch.setenv("SCALERL_GPUS", "8x80")
    placement = dry_run(capsys, *how, "--gpus", 4)["recipe"]["placement"]
    assert placement["generators"] + placement["trainers"] == 4
    assert (
        placement["generators"] >= placement["trainers"]
    )  # a token is longer in the making than in the step
    # A recipe that says it is divided again where it leaves some over, and else is as it says.
    for gpus, as_it_says in ((16, False), (8, True)):
        monkeypatch.setenv("SCALERL_GPUS", f"{gpus}x80")
        how = ("scalerl_8x80gb", "--set", f"model={model('Qwen3-8B')}", "--gpus", gpus)
        placement = dry_run(capsys, *how)["recipe"]["placement"]
        assert placement["generators"] + placement["trainers"] == gpus
        assert ((placement["generators"], placement["trainers"]) == (5, 3)) == as_it_says


@pytest.mark.parametrize("options", [[], ["--gpus", "2"]], ids=str)
def test_the_machine_is_asked_for_its_gpus_once(model, monkeypatch, tmp_path, capsys, options):
    program, asked = tmp_path / "nvidia-smi", tmp_path / "asked"
    rows = "".join(f"echo '{i}, GPU-{i}, 81559, 81000'\n" for i in range(2))
    program.write_text(f"#!/bin/sh\necho asked >> {asked}\n{rows}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv("SCALERL_GPUS", raising=False)
    main(["train", "scalerl_80gb", "--set", f"model={model('Qwen3-0.6B')}", *options, "--dry-run"])
    assert asked.read_text() == "asked\n"


def test_the_planner_gives_trainers_the_memory_that_they_need(model, monkeypatch, capsys):
    """16 bytes a weight of 8 billion are more than one GPU has, and more than two have beside activations."""
    monkeypatch.setenv("SCALERL_GPUS", "8x80")
    how = ("scalerl", "--set", f"model={model('Qwen3-8B')}")
    how += ("--set", "evaluation.decode_slots=2", "--set", "decode_slots=12")
    found = dry_run(capsys, *how, "--gpus", 8)
    assert found["recipe"]["placement"]["trainers"] >= 3
    assert all(device["fits"] for device in found["devices"])


def test_the_planner_leaves_a_gpu_to_evaluations_where_nothing_else_fits(model, monkeypatch, capsys):
    """Beside evaluations no generator fits, of whatever split of all eight; four and three trainers do."""
    how = ("scalerl", "--set", f"model={model('Qwen3-8B')}", "--gpus", 8)
    monkeypatch.setenv("SCALERL_GPUS", "8x80")
    found = dry_run(capsys, *how)
    placement = found["recipe"]["placement"]
    assert placement["generators"] + placement["trainers"] == 7
    assert all(device["fits"] for device in found["devices"])


def test_the_device_that_lacks_most_is_named(model, monkeypatch, capsys):
    monkeypatch.setenv("SCALERL_GPUS", "8x80")
    how = ["train", "scalerl", "--set", f"model={model('Qwen3-8B')}", "--gpus", "8", "--dry-run"]
    how += ["--set", "decode_slots=32", "--set", "evaluation.decode_slots=32"]
    assert main([*how, "--generators", "4", "--trainers", "4"]) == 2
    said = capsys.readouterr().err
    assert "GPU 7 has 80.0 GiB free" in said  # the generator that evaluates too; GPU 0 lacks less
    assert "so are" in said


def test_gpus_that_no_role_has_are_told(model, monkeypatch, capsys):
    monkeypatch.setenv("SCALERL_GPUS", "4x80")
    how = ["train", "scalerl_80gb", "--set", f"model={model('Qwen3-1.7B')}", "--dry-run"]
    main(how)
    said = capsys.readouterr()
    assert "GPUs 1, 2 are not used: --gpus 4 alone splits all of them between the roles" in said.err
    assert said.out.count("not used") == 2
    main([*how, "--gpus", "4"])
    assert "not used" not in "".join(capsys.readouterr())


def test_the_planner_counts_the_gpus_of_vllm_servers(model, monkeypatch, capsys):
    monkeypatch.setenv("SCALERL_GPUS", "12x80")
    how = ("scalerl_80gb", "--set", f"model={model('Qwen3-1.7B')}", "--set", "placement.kind=inline")
    how += ("--cluster", "ray", "--set", "cluster.address=local", "--gpus", 12)
    vllm = ("--set", "engine.kind=vllm", "--set", "engine.tensor_parallel=2")
    found = dry_run(capsys, *how, *vllm)
    cluster = found["recipe"]["cluster"]
    assert found["recipe"]["engine"]["tensor_parallel"] == 2
    # All, as servers evaluate too; one may be left over beside pairs.
    assert 2 * cluster["generators"] + cluster["trainers"] in (11, 12)
    assert cluster["learner"]["kind"] == ("fsdp2" if cluster["trainers"] > 1 else "one")
    monkeypatch.setenv("SCALERL_GPUS", "12x80")
    cluster = dry_run(capsys, *how)["recipe"]["cluster"]
    assert cluster["generators"] + cluster["trainers"] == 12  # the evaluation is beside a generator
    monkeypatch.setenv("SCALERL_GPUS", "12x80")
    assert main(["train", *map(str, (*how[:-1], 2)), *vllm, "--dry-run"]) == 2
    assert "a generator takes 2 and a trainer 1, and there are 2" in capsys.readouterr().err


def test_the_gpus_of_a_local_cluster_are_told_by_role(model, monkeypatch, capsys):
    monkeypatch.setenv("SCALERL_GPUS", "12x80")
    how = ("scalerl_80gb", "--set", f"model={model('Qwen3-1.7B')}", "--set", "placement.kind=inline")
    how += ("--cluster", "ray", "--generators", 8, "--trainers", 4, "--set", "cluster.address=local")
    how += ("--set", "engine.kind=auto")
    main(["train", *map(str, how), "--set", "evaluation.decode_slots=8", "--dry-run"])
    rows = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("GPU")]
    assert rows == ["GPU of each of 4 trainers", "GPU of each of 7 generators", "GPU of the last generator"]


def test_one_gpu_is_shared_with_vllm_and_no_plan_of_more_shares_it(model, monkeypatch, capsys):
    monkeypatch.setenv("SCALERL_GPUS", "1x80")
    how = ("scalerl_80gb", "--set", f"model={model('Qwen3-1.7B')}", "--set", "placement.kind=inline")
    how += ("--set", "cluster.address=local", "--set", "engine.kind=vllm")
    found = dry_run(capsys, *how, "--gpus", 1, "--set", "engine.gpu_memory=0.3")
    assert [device["name"] for device in found["devices"]] == [
        "of the trainer, beside vLLM",
        "of 1 vLLM server, 1 each",
    ]
    assert sum(device["free_bytes"] for device in found["devices"]) == 80 * 2**30 - CONTEXT
    plan = [
        "plan",
        *how,
        "--rates",
        "h100-8b",
        "--steps",
        "2",
        "--generators",
        "1",
        "--trainers",
        "1",
        "--json",
    ]
    assert main(plan) == 0
    trainer, server = json.loads(capsys.readouterr().out)["memory"]
    assert trainer["free_bytes"] == 80 * 2**30
    assert server["name"] == "of 1 vLLM server, 1 each"


def test_more_gpus_than_there_are_is_an_error(model, monkeypatch, capsys):
    monkeypatch.setenv("SCALERL_GPUS", "2x80")
    assert main(["train", "demo", "--gpus", "4", "--dry-run"]) == 2
    assert "--gpus 4: this machine has 2" in capsys.readouterr().err


def test_what_does_not_fit_is_refused_before_the_run(tmp_path, monkeypatch, small_base):
    from scalerl.rl import load_recipe, train

    monkeypatch.setenv("SCALERL_GPUS", "1x1")
    recipe = load_recipe("demo", [f"model={small_base}", "decode_slots=10000000"])
    with pytest.raises(InputError, match=r"memory: GPU 0 has 1\.0 GiB free"):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize(
    ("options", "generators", "trainers"), [(["--generators", "3"], 3, 1), (["--trainers", "2"], 1, 2)]
)
def test_options_of_devices_are_of_this_machine_without_a_cluster(options, generators, trainers, capsys):
    assert main(["train", "demo", *options, "--dry-run", "--json"]) == 0
    placement = json.loads(capsys.readouterr().out)["recipe"]["placement"]
    assert placement == {"kind": "local", "generators": generators, "trainers": trainers}


def test_a_plan_checks_the_memory_of_a_dry_run(model, monkeypatch, capsys):
    words = ["plan", "scalerl", "--rates", "h100-8b", "--steps", "2", "--set", f"model={model('Qwen3-8B')}"]

    def plan(*more):
        status = main([*words, *map(str, more)])
        return status, capsys.readouterr()

    monkeypatch.setenv("SCALERL_GPUS", "1x79.6")
    status, said = plan("--generators", 12, "--trainers", 4, "--json")
    assert status == 0
    trainer, generator, _ = json.loads(said.out)["memory"]
    assert trainer["fits"]
    assert generator["fits"]
    # A trainer alone has all masters and moments: more than a GPU has, whatever the generators do.
    status, said = plan("--generators", 12, "--trainers", 1)
    assert status == 2
    assert "memory" in said.out
    assert "GiB free" in said.err
    assert "the most is moments of the trainer" in said.err
    # Of the splits of few devices the fastest that fits is taken, though it is not the fastest.
    status, said = plan("--devices", 5, "--json")
    assert status == 0
    answer = json.loads(said.out)
    assert all(device["fits"] for device in answer["memory"])
    assert answer["plan"]["trainers"] > 1
    monkeypatch.setenv("SCALERL_GPUS", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    status, said = plan("--generators", 12, "--trainers", 1)
    assert status == 0
    assert "not checked: SCALERL_GPUS=1x80 checks against GPUs of 80 GiB" in said.out
