"""The packed forward pass against transformers' own: log-probabilities, entropies and gradients."""

import numpy as np
import pytest
import torch

from scalerl.rl.config.settings import Lora
from scalerl.rl.kernels import packed
from scalerl.rl.learner.score import Scorer
from scalerl.rl.model.causal_lm import checkpoint_activations, load_model
from scalerl.rl.model.lora import add_adapters

TEMPERATURE = 0.8


def completions(rng, groups=(4, 1, 3), prompts=(9, 1, 5), longest=20, vocab=19):
    """Right-padded sequences in groups that share a prompt; some tokens of completions are not wanted."""
    prompt_M, group_M = np.repeat(prompts, groups), np.repeat(np.arange(len(groups)), groups)
    length_M = prompt_M + rng.integers(1, longest + 1, len(prompt_M))
    length_M[0], length_M[-1] = prompt_M[0] + 1, prompt_M[-1] + longest  # nothing to read but the prompt
    token_MT = rng.integers(0, vocab, (len(prompt_M), length_M.max()))
    for group, (first, prompt) in enumerate(zip(np.cumsum(groups) - groups, prompts, strict=True)):
        token_MT[group_M == group, :prompt] = token_MT[first, :prompt]
    at_T = np.arange(token_MT.shape[1])
    own_MT = (at_T >= prompt_M[:, None]) & (at_T < length_M[:, None])
    wanted_MT = own_MT & (rng.random(token_MT.shape) < 0.8)
    wanted_MT[np.arange(len(length_M)), length_M - 1] = True
    token_MT[at_T >= length_M[:, None]] = 0
    return token_MT, wanted_MT[:, 1:], prompt_M, group_M, length_M


def expected(model, token_MT, wanted_MT, length_M):
    """Log-probabilities and entropies, sequence by sequence through the model's own forward pass."""
    logp, entropy = torch.zeros(wanted_MT.shape), torch.zeros(wanted_MT.shape)
    for m, length in enumerate(length_M):
        token_T = torch.from_numpy(token_MT[m, :length])
        logp_TV = torch.log_softmax(model(input_ids=token_T[None]).logits[0, :-1] / TEMPERATURE, -1)
        wanted_T = torch.from_numpy(wanted_MT[m, : length - 1])
        logp[m, : length - 1] = logp_TV.gather(1, token_T[1:, None])[:, 0] * wanted_T
        entropy[m, : length - 1] = -(logp_TV.exp() * logp_TV).sum(-1) * wanted_T
    return logp, entropy


def gradients(model, logp, weight):
    model.zero_grad()
    (logp * weight).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


CASES = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"num_key_value_heads": 4}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}}),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {}),
    ("qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
]


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "alone"])
@pytest.mark.parametrize(("architecture", "changes"), CASES)
def test_packed_log_probabilities_and_gradients_are_those_of_transformers(
    save_model, architecture, changes, shared, monkeypatch
):
    model = load_model(save_model(architecture, **changes))
    with torch.no_grad():  # biases and norms begin as 0 and 1, which would hide a mistake
        generator = torch.Generator().manual_seed(1)
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(0.3 * torch.randn(p.shape, generator=generator))
    token_MT, wanted_MT, prompt_M, group_M, length_M = completions(np.random.default_rng(0))
    weight = torch.from_numpy(np.random.default_rng(1).normal(size=wanted_MT.shape))
    logp, entropy = expected(model, token_MT, wanted_MT, length_M)
    gradient = gradients(model, logp, weight)

    score = Scorer(model, TEMPERATURE, fp32_logits=True, chunk=5)
    assert score.dense
    found, found_entropy = score(token_MT, wanted_MT, *((prompt_M, group_M) if shared else ()))
    assert logp.std() > 0.5  # far from uniform
    torch.testing.assert_close(found, logp, atol=1e-5, rtol=0)
    torch.testing.assert_close(found_entropy, entropy, atol=1e-5, rtol=0)
    logp_WV = torch.cat([logp_WV for (logp_WV,) in score.distributions(token_MT, wanted_MT, [True])])
    target_W = torch.from_numpy(token_MT[:, 1:][wanted_MT])
    torch.testing.assert_close(logp_WV.gather(1, target_W[:, None])[:, 0], logp[wanted_MT], atol=1e-5, rtol=0)
    found_gradient = gradients(model, found, weight)
    assert gradient.keys() == found_gradient.keys()
    scale = max(float(g.abs().max()) for g in gradient.values())
    for name, expected_gradient in gradient.items():
        error = float((found_gradient[name] - expected_gradient).abs().max())
        assert error < 1e-5 * scale, name


OTHERS = [
    ("gpt2", {}),
    ("qwen3_moe", {}),
    ("llama", {"hidden_size": 40, "intermediate_size": 44}),  # no whole number of vectors
    ("llama", {"hidden_act": "gelu"}),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}}),
    ("mistral", {"sliding_window": 8}),
]


@pytest.mark.parametrize(("architecture", "changes"), OTHERS)
def test_every_other_model_goes_through_its_own_modules(save_model, architecture, changes):
    model = load_model(save_model(architecture, **changes))
    token_MT, wanted_MT, prompt_M, group_M, length_M = completions(np.random.default_rng(0))
    score = Scorer(model, TEMPERATURE, fp32_logits=True)
    assert score.dense is None
    found, found_entropy = score(token_MT, wanted_MT, prompt_M, group_M)
    logp, entropy = expected(model, token_MT, wanted_MT, length_M)
    torch.testing.assert_close(found, logp, atol=1e-5, rtol=0)
    torch.testing.assert_close(found_entropy, entropy, atol=1e-5, rtol=0)


def test_what_was_done_to_a_model_decides_too(save_model, llama_folder, monkeypatch):
    def dense(model):
        return Scorer(model, 1.0, fp32_logits=True).dense

    assert dense(load_model(llama_folder))
    assert dense(add_adapters(load_model(llama_folder), Lora(rank=2), 0)) is None
    assert dense(load_model(llama_folder, torch.bfloat16)) is None
    model = load_model(llama_folder)
    score = Scorer(model, 1.0, fp32_logits=True)
    checkpoint_activations(model)
    assert score.dense is None
    monkeypatch.setattr(packed, "load_kernels", lambda: None)  # no C compiler
    assert dense(load_model(llama_folder)) is None
