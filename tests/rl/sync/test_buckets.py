"""Tensors packed into bytes and back."""

import torch

from scalerl.rl.sync.buckets import in_buckets, packed, size_of, views

WEIGHTS = {
    "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b": torch.arange(5, dtype=torch.bfloat16),
    "c": torch.arange(6, dtype=torch.float16).reshape(2, 3).T,  # not contiguous
    "d": torch.tensor(7.0),
}


def test_a_bucket_comes_back_bit_for_bit_in_its_own_dtypes():
    plan, flat = packed(WEIGHTS)
    assert [(spec.name, spec.shape, spec.dtype) for spec in plan] == [
        ("a", (3, 4), "float32"),
        ("b", (5,), "bfloat16"),
        ("c", (3, 2), "float16"),
        ("d", (), "float32"),
    ]
    assert len(flat) == size_of(plan) == 4 * 64
    found = views(plan, flat.clone())
    for name, weight in WEIGHTS.items():
        assert found[name].dtype == weight.dtype
        assert torch.equal(found[name], weight)


def test_buckets_are_no_larger_than_asked_for_but_a_larger_tensor_is_alone():
    weights = [(str(i), torch.zeros(n, dtype=torch.bfloat16)) for i, n in enumerate((100, 100, 100, 900, 10))]
    buckets = in_buckets(weights, 400 / 2**20)
    assert [list(bucket) for bucket in buckets] == [["0", "1"], ["2"], ["3"], ["4"]]
