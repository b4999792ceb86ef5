"""The kernels of decoding against torch."""

import torch
from torch import nn

from scalerl.rl.kernels.fused import KernelStore, Shape, load_kernels
from scalerl.rl.model.cache_blocks import BLOCK


def kernels():
    found = load_kernels()
    assert found is not None
    return found


def test_rms_norm_and_swiglu_by_torch():
    torch.manual_seed(0)
    x, weight, out = torch.randn(5, 48), torch.rand(48), torch.empty(5, 48)
    kernels().rms_norm(x, weight, 1e-6, out, *x.shape)
    torch.testing.assert_close(out, nn.functional.rms_norm(x, (48,), weight, 1e-6), rtol=2e-6, atol=0)
    gate_up, out = torch.randn(5, 96), torch.empty(5, 48)
    gate_up[0, :8] = torch.tensor([-1000.0, -100.0, -88.0, -87.0, -20.0, 20.0, 100.0, 1000.0])
    kernels().swiglu(gate_up, out, *out.shape)
    wanted = (nn.functional.silu(gate_up[:, :48].double()) * gate_up[:, 48:].double()).float()
    torch.testing.assert_close(out, wanted, rtol=2e-6, atol=1e-35)


def attend(qkv, own, prompts, offsets):
    """Attention of tokens (A, 4 + 2 * 2 heads of 16) after what is in the stores (keys, values, blocks)."""
    shape = Shape(4, 2, 16, 16**-0.5, 1e-6)
    own_store, prompt_store = (
        KernelStore(k.data_ptr(), v.data_ptr(), t.data_ptr(), t.shape[1]) for k, v, t in (own, prompts)
    )
    rotation = (torch.ones(128, 16), torch.zeros(128, 16))  # positions rotate nothing
    out = torch.empty(len(qkv), 64)
    room = torch.empty(4, 2 * 2 * BLOCK)
    tensors = (qkv, None, None, *rotation, *offsets, room, out)
    kernels().attend(shape, prompt_store, own_store, *tensors, len(qkv))
    return out


def make_store(n):
    """Of n entries of two blocks each, which are anywhere."""
    table = torch.randperm(2 * n).view(n, 2)
    return torch.zeros(2 * n, BLOCK // 8, 2, 16, 8), torch.zeros(2 * n, BLOCK, 2, 16), table


def test_attention_by_torch_and_each_token_by_itself():
    torch.manual_seed(0)
    prompts, own = make_store(3), make_store(4)
    past = [BLOCK + 11, 2 * BLOCK, 1]
    for slot, n in enumerate(past):  # prompts go in as tokens, in order
        offsets = [torch.zeros(n, dtype=torch.int64)] * 2 + [torch.full((n,), slot), torch.arange(n)]
        attend(torch.randn(n, 128), prompts, prompts, offsets)
    prompt_A, slot_A = torch.tensor([0, 0, 1, 2]), torch.tensor([3, 1, 0, 2])
    prefix_A = torch.tensor(past)[prompt_A]
    alone = (own[0].clone(), own[1].clone(), own[2])
    for at in range(BLOCK + 10):
        qkv = 3 * torch.randn(4, 128)
        offsets = [prompt_A, prefix_A, slot_A, torch.full((4,), at)]
        found = attend(qkv, own, prompts, offsets)
        for a in range(4):
            one = slice(a, a + 1)
            by_itself = attend(qkv[one].clone(), alone, prompts, [offset[one].clone() for offset in offsets])
            assert torch.equal(by_itself, found[one])
            prompt, slot, n = prompt_A[a], slot_A[a], int(prefix_A[a])
            key_HTD = torch.cat([keys_of(prompts, prompt, n), keys_of(own, slot, at + 1)], dim=1)
            value_HTD = torch.cat([values_of(prompts, prompt, n), values_of(own, slot, at + 1)], dim=1)
            query = qkv[a, :64].view(2, 2, 16)  # two heads for each of keys and values
            wanted = nn.functional.scaled_dot_product_attention(query, key_HTD, value_HTD)
            torch.testing.assert_close(found[a], wanted.flatten(), rtol=1e-4, atol=2e-5)


def keys_of(store, entry, n):
    """Keys of an entry as (heads, positions, head_dim)."""
    keys, _, table = store
    return keys[table[entry]].flatten(0, 1).permute(1, 0, 3, 2).reshape(2, -1, 16)[:, :n]


def values_of(store, entry, n):
    """Values of an entry, in the same way."""
    _, values, table = store
    return values[table[entry]].flatten(0, 1)[:n].transpose(0, 1)
