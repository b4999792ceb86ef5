import math

import pytest
import torch

from scalerl.rl.loss import Cispo


def test_cispo_by_hand():
    # Two completions with advantages 2 and -0.5, cap 2. Ratios: .4/.2 = 2 (at the cap, not above), .9/.1 = 9
    # (capped at 2); .3/.6 = 0.5, .8/.2 = 4 (capped at 2).
    logp_NT = torch.tensor([[0.4, 0.9], [0.3, 0.8]], dtype=torch.float64).log()
    behaviour_NT = torch.tensor([[0.2, 0.1], [0.6, 0.2]], dtype=torch.float64).log()
    advantage_N = torch.tensor([2.0, -0.5], dtype=torch.float64)
    loss_NT = Cispo(max_ratio=2.0)(logp_NT, behaviour_NT, advantage_N)
    expected = [
        [-2 * 2 * math.log(0.4), -2 * 2 * math.log(0.9)],
        [0.5 * 0.5 * math.log(0.3), 2 * 0.5 * math.log(0.8)],
    ]
    torch.testing.assert_close(loss_NT, torch.tensor(expected, dtype=torch.float64))
    assert loss_NT[0, 0].item() == pytest.approx(3.6651629)  # 4 * 0.9162907
    assert loss_NT[1, 1].item() == pytest.approx(-0.2231436)


def test_a_capped_token_keeps_its_gradient():
    # d loss / d logp = -min(rho, cap) * A: at rho = 9 and cap 5 it is -5 A, where a clipped surrogate has 0.
    logp_NT = torch.tensor([[0.9, 0.5]], dtype=torch.float64).log().requires_grad_()
    behaviour_NT = torch.tensor([[0.1, 0.25]], dtype=torch.float64).log()
    Cispo(max_ratio=5.0)(logp_NT, behaviour_NT, torch.tensor([1.5], dtype=torch.float64)).sum().backward()
    torch.testing.assert_close(logp_NT.grad, torch.tensor([[-5 * 1.5, -2 * 1.5]], dtype=torch.float64))


def test_the_cap_is_on_the_ratio_itself():
    ratio = torch.tensor([0.0, 4.9, 5.0, 5.1, 6.0])
    assert Cispo(max_ratio=5.0).clipped(ratio).tolist() == [False, False, False, True, True]


@pytest.mark.parametrize("max_ratio", [0.0, -1.0, math.nan])
def test_a_cap_that_is_not_positive_is_refused(max_ratio):
    with pytest.raises(ValueError, match="cap on the ratio itself"):
        Cispo(max_ratio=max_ratio)
