"""Which process gets which GPU, and what is read of the machine."""

import os
import stat
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from scalerl.errors import InputError
from scalerl.rl.config.devices import Assignment, Gpu, HeldDevices, assign, visible_gpus
from scalerl.rl.config.engine import Vllm
from scalerl.rl.config.recipe import load_recipe
from scalerl.rl.config.settings import Local
from scalerl.rl.model.causal_lm import gpus_in_use
from scalerl.rl.workers.processes import Processes

GIB = 2**30


@pytest.fixture
def recipe():
    return load_recipe("demo")


def gpus(n):
    return [Gpu(str(i), 80 * GIB, 80 * GIB) for i in range(n)]


def local(recipe, generators):
    return replace(recipe, placement=Local(generators))


def test_every_process_has_a_device_of_its_own_where_there_are_enough(recipe):
    found = assign(local(recipe, 4), gpus(8), trainers=3)
    assert found == Assignment(("0", "1", "2"), ("3", "4", "5", "6"), "7")
    assert (found.held.generator, found.held.trainer, found.held.apart) == (1, 1, 1)


def test_evaluations_share_the_last_generators_where_none_is_left(recipe):
    found = assign(local(recipe, 4), gpus(8), trainers=4)
    assert (found.evaluator, found.held.apart) == ("7", 0)


def test_generators_share_what_the_trainer_leaves(recipe):
    found = assign(local(recipe, 3), gpus(3))
    assert found == Assignment(("0",), ("1", "2", "1"), "1")
    assert found.held.generator * 3 + found.held.trainer == pytest.approx(3)


def test_one_device_is_for_all(recipe):
    found = assign(local(recipe, 1), gpus(1))
    assert found == Assignment(("0",), ("0",), "0")
    assert (found.held.generator, found.held.trainer) == (0.5, 0.5)


def test_roles_that_take_turns_leave_a_second_device_to_evaluations(recipe):
    assert assign(recipe, gpus(2)) == Assignment(("0",), (), "1")
    assert assign(recipe, gpus(1)) == Assignment(("0",), (), "0")


def test_without_gpus_nothing_is_assigned(recipe):
    assert assign(local(recipe, 2), []) == Assignment()


def test_two_trainers_cannot_share_a_gpu(recipe):
    with pytest.raises(InputError, match="2 trainers need a GPU each, and there are 1"):
        assign(recipe, gpus(1), trainers=2)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine whose nvidia-smi lists three GPUs, and one whose memory it does not know."""
    program = tmp_path / "nvidia-smi"
    rows = [f"{i}, GPU-{i}{i}{i}a, 81559, {81000 - i}" for i in range(3)]
    rows += ["3, GPU-333a, [N/A], [N/A]"]
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in rows))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("SCALERL_GPUS", raising=False)


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["0", "1", "2"]),
        ("2,0", ["2", "0"]),
        ("GPU-11", ["GPU-11"]),
        ("", []),
        ("-1", []),
        ("7", []),
        ("1,7,0", ["1"]),  # CUDA sees none behind the first that is not there
        ("1, 0", ["1", "0"]),
    ],
)
def test_the_gpus_that_a_process_may_use_in_its_order(machine, monkeypatch, visible, names):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.name for gpu in visible_gpus()] == names


def test_memory_is_total_and_free(machine):
    assert visible_gpus()[2] == Gpu("2", 81559 * 2**20, 80998 * 2**20)


@pytest.fixture
def cuda(monkeypatch):
    """A function that has PyTorch see GPUs of these UUIDs and MiB, in its own order."""

    def see(*gpus):
        found = [SimpleNamespace(uuid=uuid, total_memory=mib * 2**20) for uuid, mib in gpus]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(found))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: found[i])

    return see


def test_gpus_that_differ_are_in_the_order_of_cuda_and_not_of_nvidia_smi(machine, cuda):
    cuda(("222a", 80995), ("000a", 80000), ("444a", 24000))  # the last one is younger than the driver's tools
    in_use = gpus_in_use()
    assert [gpu.name for gpu in in_use] == ["0", "1", "2"]
    assert [gpu.memory // 2**20 for gpu in in_use] == [80995, 80000, 24000]
    # What is free is known by the UUID; nvidia-smi counts some memory that CUDA does not have.
    assert [gpu.free // 2**20 for gpu in in_use] == [80995, 80000, 24000]


def test_what_others_have_taken_is_not_free(machine, cuda):
    cuda(("111a", 81559), ("222a", 81559))
    assert [gpu.free // 2**20 for gpu in gpus_in_use()] == [80999, 80998]


@pytest.mark.parametrize("visible", [None, "MIG-5f2c", "MIG-5f2c, MIG-77aa"])
def test_a_part_of_a_gpu_and_a_machine_without_nvidia_smi_have_gpus_too(monkeypatch, cuda, tmp_path, visible):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SCALERL_GPUS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus() == ()
    cuda(("5f2c", 9728))  # CUDA has one part at most, whatever is named
    assert gpus_in_use() == (Gpu("MIG-5f2c" if visible else "0", 9728 * 2**20, 9728 * 2**20),)
    cuda()
    assert gpus_in_use() == ()


def test_gpus_of_another_machine_can_be_assumed(machine, monkeypatch):
    monkeypatch.setenv("SCALERL_GPUS", "2x23.5")
    assert visible_gpus() == tuple(Gpu(str(i), round(23.5 * GIB), round(23.5 * GIB)) for i in range(2))
    monkeypatch.setenv("SCALERL_GPUS", "eight")
    with pytest.raises(InputError, match="like 8x80; found 'eight'"):
        visible_gpus()


def say_device(channel):
    """Send what the process sees."""
    channel.send("sees", os.environ.get("CUDA_VISIBLE_DEVICES"))


@pytest.mark.parametrize("device", ["3", None])
def test_a_process_sees_the_device_that_it_was_given(monkeypatch, device):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    child = Processes(devices=[device]).spawn("probe", 0, say_device)
    try:
        assert child.channel.poll(60)
        assert [(kind, value) for kind, value, _ in child.receive()] == [("sees", device or "3,4")]
    finally:
        child.kill()


def with_vllm(recipe, generators, trainers=1, **settings):
    return replace(recipe, placement=Local(generators, trainers), engine=Vllm(**settings))


@pytest.mark.parametrize(
    ("generators", "trainers", "settings", "found"),
    [
        (4, 4, {}, (("0", "1", "2", "3"), ("4", "5", "6", "7"))),
        (2, 3, {"tensor_parallel": 2}, (("0", "1", "2"), ("4,5", "6,7"))),
        (1, 4, {"urls": ("http://there:8000",)}, (("0", "1", "2", "3"), ())),
    ],
)
def test_workers_of_vllm_have_the_last_gpus_and_evaluate(recipe, generators, trainers, settings, found):
    wanted = with_vllm(recipe, generators, trainers, **settings)
    assert assign(wanted, gpus(8), trainers) == Assignment(*found)
    held = HeldDevices.of_vllm(wanted.engine, wanted.processes, shared=False)
    each = wanted.engine.tensor_parallel
    assert (held.generator, held.trainer, held.evaluator) == (each, 1, each * generators)


def test_a_single_gpu_is_shared_by_a_worker_of_vllm_and_the_trainer_alone(recipe):
    assert assign(with_vllm(recipe, 1), gpus(1)).shared
    assert not assign(with_vllm(recipe, 1), gpus(2)).shared
    for wanted in (with_vllm(recipe, 2), with_vllm(recipe, 1, tensor_parallel=2)):
        with pytest.raises(InputError, match=r"beside 1 trainer, take 3, and this machine has 1: lower gen"):
            assign(wanted, gpus(1))
    with pytest.raises(InputError, match=r'share one with engine\.transport "auto"'):
        assign(with_vllm(recipe, 1, transport="nccl"), gpus(1))
    with pytest.raises(InputError, match=r"8 workers .* beside 1 trainer, take 9, and this machine has 8"):
        assign(with_vllm(recipe, 8), gpus(8))


def test_vllm_takes_no_turns_with_the_trainer_in_one_process(recipe):
    with pytest.raises(ValueError, match=r'set placement\.kind to "local"'):
        replace(recipe, engine=Vllm())
