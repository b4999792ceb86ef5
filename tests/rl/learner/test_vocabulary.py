"""Log-probabilities and gradients in chunks against the whole softmax, and the products of low precision."""

import pytest
import torch
from torch.nn.functional import linear

from scalerl.rl.learner.score import chunked_log_probs
from scalerl.rl.model.causal_lm import logits_of, product


@pytest.mark.parametrize("chunk", [1, 5, 7, 100])
@pytest.mark.parametrize("biased", [False, True])
def test_log_probs_and_their_gradients_are_those_of_the_whole_softmax(chunk, biased):
    """In float64; several tokens are predicted at one place, and at one place none."""
    torch.manual_seed(0)
    hidden_RD, weight_VD = torch.randn(14, 6).double(), torch.randn(30, 6).double()
    bias_V = torch.randn(30).double() if biased else None
    row_W = torch.tensor([3, 0, 3, 3, 13, 7, 1, 2, 4, 5, 6, 8, 9, 10, 12])
    target_W, grad_W = torch.randint(30, (15,)), torch.randn(15).double()
    target_W[2] = target_W[0]  # the same token twice at one place
    inputs = [t.requires_grad_() for t in (hidden_RD, weight_VD, bias_V) if t is not None]
    logp_RV = torch.log_softmax(linear(hidden_RD, weight_VD, bias_V) / 0.7, -1)
    expected_W = logp_RV[row_W, target_W]
    expected = torch.autograd.grad(expected_W, inputs, grad_W)
    logp_W, entropy_W = chunked_log_probs(hidden_RD, weight_VD, bias_V, row_W, target_W, 0.7, chunk)
    assert logp_W._base is entropy_W._base is None  # no views, of which FSDP2 would warn
    assert logp_W.dtype == torch.float64
    torch.testing.assert_close(logp_W, expected_W, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy_W, -(logp_RV.exp() * logp_RV).sum(-1)[row_W], rtol=1e-12, atol=1e-12)
    for found, other in zip(torch.autograd.grad(logp_W, inputs, grad_W), expected, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-12, atol=1e-12)


def test_what_a_chunk_adds_is_not_lost_in_bfloat16():
    """1000 chunks that add 1/1000 each to a gradient of about 1, which bfloat16 would round away."""
    hidden_WD = torch.ones(1000, 1, dtype=torch.bfloat16)
    weight_VD = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    rows, targets = torch.arange(1000), torch.zeros(1000, dtype=torch.long)
    logp_W, _ = chunked_log_probs(hidden_WD, weight_VD, None, rows, targets, 1.0, 1)
    logp_W.sum().backward()
    assert weight_VD.grad.flatten().tolist() == [500, -500]  # half of each token


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_head_in_float32_multiplies_bfloat16_without_rounding(device):
    """Two million products are exact in float32, so that only their sums round."""
    torch.manual_seed(0)
    hidden_TD, weight_VD = (torch.randn(shape, device=device).bfloat16() for shape in [(64, 256), (128, 256)])
    bias_V = torch.randn(128, device=device).bfloat16()
    exact = linear(hidden_TD.double(), weight_VD.double(), bias_V.double())
    found = logits_of(hidden_TD, weight_VD, bias_V, True)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    rounded = logits_of(hidden_TD, weight_VD, bias_V, False)
    assert (rounded.double() - exact).abs().max() > 1e-2  # bfloat16 has 8 bits


@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_in_float32_is_multiplied_by_bfloat16_to_sixteen_bits(device):
    torch.manual_seed(0)
    grad_CV, weight_VD = torch.randn(64, 512, device=device), torch.randn(512, 32, device=device).bfloat16()
    exact = grad_CV.double() @ weight_VD.double()
    scale = grad_CV.abs().double() @ weight_VD.abs().double()
    assert ((product(grad_CV, weight_VD) - exact).abs() / scale).max() < 2**-16
    rounded = grad_CV.bfloat16().double() @ weight_VD.double()
    assert ((rounded - exact).abs() / scale).max() > 2**-14


@pytest.mark.gpu
def test_a_bfloat16_head_on_a_gpu_gives_the_gradients_of_a_copy_in_float32():
    torch.manual_seed(0)
    hidden_RD = torch.randn(50, 64, device="cuda").bfloat16().requires_grad_()
    weight_VD = torch.randn(200, 64, device="cuda").bfloat16().requires_grad_()
    row_W, target_W = torch.arange(50, device="cuda"), torch.randint(200, (50,), device="cuda")
    grad_W = torch.randn(50, device="cuda")
    logp_RV = torch.log_softmax(linear(hidden_RD.double(), weight_VD.double()) / 0.8, -1)
    expected = torch.autograd.grad(logp_RV[row_W, target_W], [hidden_RD, weight_VD], grad_W.double())
    logp_W, _ = chunked_log_probs(hidden_RD, weight_VD, None, row_W, target_W, 0.8, 16)
    torch.testing.assert_close(logp_W.double(), logp_RV[row_W, target_W], rtol=1e-5, atol=1e-4)
    for found, other in zip(
        torch.autograd.grad(logp_W, [hidden_RD, weight_VD], grad_W), expected, strict=True
    ):
        torch.testing.assert_close(found, other, rtol=2**-7, atol=1e-2)
