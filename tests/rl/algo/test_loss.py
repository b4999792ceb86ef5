import math

import pytest
import torch

from scalerl.rl.algo.loss import Cispo, Dapo, Decoupled, Grpo, Gspo, Kl, Reinforce, check_cut


def losses(loss, ratio_NT, advantages, sampled_NT=None):
    """Values, clips and the gradient by the log-probabilities, at given ratios to a behaviour of .1."""
    behaviour_NT = torch.full_like(ratio_NT, 0.1).log()
    logp_NT = (behaviour_NT + ratio_NT.log()).requires_grad_()
    sampled_NT = torch.ones_like(ratio_NT) > 0 if sampled_NT is None else sampled_NT
    advantage_N = torch.tensor(advantages, dtype=torch.float64)
    value_NT, clipped_NT = loss(logp_NT, behaviour_NT, advantage_N, sampled_NT)
    (gradient_NT,) = torch.autograd.grad(value_NT.sum(), logp_NT)
    return value_NT.detach(), clipped_NT, gradient_NT


def test_cispo_by_hand():
    # Two completions with advantages 2 and -0.5, cap 2. Ratios: .4/.2 = 2 (at the cap, not above), .9/.1 = 9
    # (capped at 2); .3/.6 = 0.5, .8/.2 = 4 (capped at 2).
    logp_NT = torch.tensor([[0.4, 0.9], [0.3, 0.8]], dtype=torch.float64).log()
    behaviour_NT = torch.tensor([[0.2, 0.1], [0.6, 0.2]], dtype=torch.float64).log()
    advantage_N = torch.tensor([2.0, -0.5], dtype=torch.float64)
    loss_NT, clipped_NT = Cispo(max_ratio=2.0)(logp_NT, behaviour_NT, advantage_N, torch.ones(2, 2) > 0)
    assert clipped_NT.tolist() == [[False, True], [False, True]]
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
    advantage_N = torch.tensor([1.5], dtype=torch.float64)
    Cispo(max_ratio=5.0)(logp_NT, behaviour_NT, advantage_N, torch.ones(1, 2) > 0).value_NT.sum().backward()
    torch.testing.assert_close(logp_NT.grad, torch.tensor([[-5 * 1.5, -2 * 1.5]], dtype=torch.float64))


def test_the_cap_is_on_the_ratio_itself():
    ratio_NT = torch.tensor([[1e-9, 4.9, 5.0, 5.1, 6.0]], dtype=torch.float64)
    clipped_NT = losses(Cispo(max_ratio=5.0), ratio_NT, [1.0])[1]
    assert clipped_NT.tolist() == [[False, False, False, True, True]]


def test_cispo_weighs_the_rarest_token_by_its_own_ratio():
    # No lower clip: far below 1 the weight is still the ratio itself, and the gradient -rho A.
    ratio_NT = torch.tensor([[1e-6, 1e-3, 0.1]] * 2, dtype=torch.float64)
    _, clipped_NT, gradient_NT = losses(Cispo(), ratio_NT, [2.0, -3.0])
    torch.testing.assert_close(gradient_NT, ratio_NT * torch.tensor([[-2.0], [3.0]], dtype=torch.float64))
    assert not clipped_NT.any()


def test_decoupled_ppo_by_hand():
    # Behaviour .1, proximal .2, .1, .6 and .05: weights 2, 1, 6 (above 5: left out) and .5. Trained at .3,
    # .05, .6 and .06: ratios 1.5, .5, 1 and 1.2; with A = 2 the first is clipped, with A = -3 the second.
    behaviour_NT = torch.full((2, 4), 0.1, dtype=torch.float64).log()
    proximal_NT = torch.tensor([[0.2, 0.1, 0.6, 0.05]] * 2, dtype=torch.float64).log()
    logp_NT = torch.tensor([[0.3, 0.05, 0.6, 0.06]] * 2, dtype=torch.float64).log().requires_grad_()
    advantage_N = torch.tensor([2.0, -3.0], dtype=torch.float64)
    every = torch.ones(2, 4) > 0
    value_NT, clipped_NT = Decoupled()(logp_NT, behaviour_NT, advantage_N, every, proximal_NT)
    # -w min(r A, clip(r, .8, 1.2) A)
    expected = [[-2 * 1.2 * 2, -0.5 * 2, 0.0, -0.5 * 1.2 * 2], [2 * 1.5 * 3, 0.8 * 3, 0.0, 0.5 * 1.2 * 3]]
    torch.testing.assert_close(value_NT.detach(), torch.tensor(expected, dtype=torch.float64))
    assert clipped_NT.tolist() == [[True, False, True, False], [False, True, True, False]]
    (gradient_NT,) = torch.autograd.grad(value_NT.sum(), logp_NT)
    expected = [[0.0, -0.5 * 2, 0.0, -0.5 * 1.2 * 2], [2 * 1.5 * 3, 0.0, 0.0, 0.5 * 1.2 * 3]]
    torch.testing.assert_close(gradient_NT, torch.tensor(expected, dtype=torch.float64))


def test_where_the_policy_is_the_proximal_one_decoupled_ppo_has_the_gradient_of_cispo_below_the_cap():
    ratio_NT = torch.tensor([[0.01, 0.7, 1.0, 3.0, 9.0]] * 2, dtype=torch.float64)
    cispo_NT = losses(Cispo(max_ratio=5.0), ratio_NT, [2.0, -3.0])[2]
    decoupled_NT = losses(Decoupled(max_weight=5.0), ratio_NT, [2.0, -3.0])[2]
    torch.testing.assert_close(decoupled_NT[:, :4], cispo_NT[:, :4])
    assert not decoupled_NT[:, 4].any()  # which CISPO gives the weight 5


@pytest.mark.parametrize("max_ratio", [0.0, -1.0, math.nan])
def test_a_cap_that_is_not_positive_is_refused(max_ratio):
    with pytest.raises(ValueError, match="cap on the ratio itself"):
        Cispo(max_ratio=max_ratio)


@pytest.mark.parametrize(
    ("kind", "last", "beyond", "said"),
    [
        (Grpo, {"max_ratio": 1.0}, {"max_ratio": 0.9}, "max_ratio must be 1 or more"),
        (Dapo, {"min_ratio": 1.0}, {"min_ratio": 1.1}, r"min_ratio must be in \[0, 1\]"),
        (Gspo, {"min_ratio": 0.0}, {"min_ratio": -0.1}, r"min_ratio must be in \[0, 1\]"),
        (Cispo, {"max_ratio": 1e30}, {"max_ratio": 1e31}, "at most 1e30, or inf"),
        (Cispo, {"max_ratio": math.inf}, {"max_ratio": 0.0}, "max_ratio must be positive"),
        (Decoupled, {"max_weight": 1.0}, {"max_weight": 0.9}, "max_weight must be 1 or more"),
        (Decoupled, {"updates": 1}, {"updates": 0}, "updates must be at least 1"),
        (Kl, {"coefficient": 0.0}, {"coefficient": -0.1}, "coefficient must not be negative"),
        (
            Kl,
            {"coefficient": 1e30},
            {"coefficient": math.inf},
            "coefficient must not be negative, and finite",
        ),
    ],
)
def test_settings_are_taken_up_to_their_bounds(kind, last, beyond, said):
    kind(**last)
    with pytest.raises(ValueError, match=said):
        kind(**beyond)


def test_only_a_loss_with_a_lower_bound_refuses_a_small_top_p():
    check_cut(0.5, 0, Decoupled())  # its bounds are of the ratio to the proximal policy
    with pytest.raises(ValueError, match=r"ratios begin at 0.5, and loss.min_ratio \(0.8\) clips them"):
        check_cut(0.5, 0, Dapo())


@pytest.mark.parametrize(("loss", "high"), [(Grpo(), 1.2), (Dapo(), 1.26)])
def test_the_clipped_surrogate_by_hand(loss, high):
    # With A = 1 / 2 only the upper bound takes the gradient, with A = -3 only the lower one, .8.
    ratio_NT = torch.tensor([[0.5, 1.0, 1.1, 1.5]] * 2, dtype=torch.float64)
    value_NT, clipped_NT, gradient_NT = losses(loss, ratio_NT, [0.5, -3.0])
    expected = [[-0.25, -0.5, -0.55, -high / 2], [2.4, 3.0, 3.3, 4.5]]
    torch.testing.assert_close(value_NT, torch.tensor(expected, dtype=torch.float64))
    assert clipped_NT.tolist() == [[False, False, False, True], [True, False, False, False]]
    # d(rho A) / d logp = rho A where the token is free.
    expected = [[-0.25, -0.5, -0.55, 0.0], [0.0, 3.0, 3.3, 4.5]]
    torch.testing.assert_close(gradient_NT, torch.tensor(expected, dtype=torch.float64))


def test_dapos_upper_bound_lets_through_what_grpos_clips():
    ratio_NT = torch.tensor([[1.25]], dtype=torch.float64)
    assert losses(Grpo(), ratio_NT, [1.0])[1].item()
    assert not losses(Dapo(), ratio_NT, [1.0])[1].item()


def test_gspo_by_hand():
    # Three tokens of which the last was inserted: s = sqrt(1.21 * 0.81) = .99, inside [.9, 1.1], on both.
    ratio_NT = torch.tensor([[1.21, 0.81, 1.0]], dtype=torch.float64)
    sampled_NT = torch.tensor([[True, True, False]])
    wide = Gspo(min_ratio=0.9, max_ratio=1.1)
    value_NT, clipped_NT, gradient_NT = losses(wide, ratio_NT, [2.0], sampled_NT)
    torch.testing.assert_close(value_NT[:, :2], torch.full((1, 2), -1.98, dtype=torch.float64))
    assert not clipped_NT.any()
    # Each of three values is -2 s, and d s / d logp_t = s / 2 for the two sampled tokens.
    expected = torch.tensor([[-2.97, -2.97, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(gradient_NT, expected)
    # Without normalisation by length s is the product, .9801; beyond a bound that A pushes to, no gradient.
    product = Gspo(min_ratio=0.99, max_ratio=1.1, length_normalised=False)
    value_NT, clipped_NT, gradient_NT = losses(product, ratio_NT, [-1.0], sampled_NT)
    torch.testing.assert_close(value_NT[:, :2], torch.full((1, 2), 0.99, dtype=torch.float64))
    assert clipped_NT.all()
    assert not gradient_NT.any()


def test_gspo_clips_by_default_at_the_bounds_of_the_paper():
    # Offsets of 3e-3 below and 5e-3 above, on the ratio of the completion: just inside it is free, just
    # outside it loses its gradient, where the advantage pushes towards that bound.
    inside = torch.tensor([[0.9971], [1.0049]], dtype=torch.float64)
    outside = torch.tensor([[0.9969], [1.0051]], dtype=torch.float64)
    assert losses(Gspo(), inside, [-1.0, 1.0])[1].any(1).tolist() == [False, False]
    value_NT, clipped_NT, gradient_NT = losses(Gspo(), outside, [-1.0, 1.0])
    torch.testing.assert_close(value_NT, torch.tensor([[0.997], [-1.005]], dtype=torch.float64))
    assert clipped_NT.all()
    assert not gradient_NT.any()


def test_reinforce_weighs_a_completion_by_the_product_of_its_ratios():
    # 1.5 * 2 = 3 is capped at 2.5; .5 * 2 = 1 is free. What was inserted counts for nothing.
    ratio_NT = torch.tensor([[1.5, 2.0, 9.0], [0.5, 2.0, 1.0]], dtype=torch.float64)
    sampled_NT = torch.tensor([[True, True, False], [True, True, False]])
    _, clipped_NT, gradient_NT = losses(Reinforce(max_ratio=2.5), ratio_NT, [2.0, -3.0], sampled_NT)
    expected = torch.tensor([[-5.0, -5.0], [3.0, 3.0]], dtype=torch.float64)
    torch.testing.assert_close(gradient_NT[:, :2], expected)
    assert clipped_NT[:, 0].tolist() == [True, False]


@pytest.mark.parametrize(
    "loss", [Cispo(), Reinforce(), Grpo(), Dapo(), Decoupled(), Gspo()], ids=lambda loss: loss.kind
)
def test_on_policy_every_loss_has_the_policy_gradient(loss):
    # At a ratio of 1 the gradient is -A by each token; GSPO's mean ratio shares it out over the completion.
    _, clipped_NT, gradient_NT = losses(loss, torch.ones(2, 3, dtype=torch.float64), [2.0, -1.0])
    expected = torch.tensor([[-2.0] * 3, [1.0] * 3], dtype=torch.float64)
    torch.testing.assert_close(gradient_NT, expected)
    assert not clipped_NT.any()


def test_bounds_are_refused_where_they_look_like_offsets():
    with pytest.raises(ValueError, match="cap on the ratio itself"):
        Grpo(max_ratio=0.2)
    with pytest.raises(ValueError, match="it bounds the ratio itself"):
        Dapo(min_ratio=1.2)
    with pytest.raises(ValueError, match="cap on the ratio itself"):
        Gspo(min_ratio=0.9, max_ratio=5e-3)


def test_the_divergence_by_hand():
    logp_NT = torch.tensor([[0.5, 0.2]], dtype=torch.float64).log().requires_grad_()
    base_NT = torch.tensor([[0.25, 0.2]], dtype=torch.float64).log()
    d = math.log(0.5)  # log(.25 / .5)
    penalty_NT = Kl(coefficient=0.1)(logp_NT, base_NT)
    torch.testing.assert_close(penalty_NT, torch.tensor([[0.5 - d - 1, 0.0]], dtype=torch.float64))
    (gradient_NT,) = torch.autograd.grad(penalty_NT.sum(), logp_NT)
    torch.testing.assert_close(gradient_NT, torch.tensor([[1 - 0.5, 0.0]], dtype=torch.float64))
    penalty_NT = Kl(coefficient=0.1, estimator="k2")(logp_NT, base_NT)
    torch.testing.assert_close(penalty_NT, torch.tensor([[d * d / 2, 0.0]], dtype=torch.float64))
