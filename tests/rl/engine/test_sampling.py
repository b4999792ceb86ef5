import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from scalerl.rl.algo.length import LengthRule, Marker, NoLengthControl
from scalerl.rl.engine.build import load_generator
from scalerl.rl.engine.sampling import stream_keys, uniform
from scalerl.rl.model.causal_lm import load_model, load_tokenizer
from scalerl.rl.tasks.chain import END, VOCABULARY
from scalerl.rl.verify.verifier import texts_of


def test_splitmix64_known_answers():
    # The published C code (Vigna, prng.di.unimi.it/splitmix64.c), seed 1234567: its n-th output is our number
    # at position n - 1, of which a float keeps the upper 53 bits.
    published = np.array(
        [
            6457827717110365317,
            3203168211198807973,
            9817491932198370423,
            4593380528125082431,
            16408922859458223821,
        ],
        dtype=np.uint64,
    )
    found = uniform(np.full(5, 1234567, dtype=np.uint64), np.arange(5))
    assert (found * 2.0**53).astype(np.uint64).tolist() == (published >> np.uint64(11)).tolist()


@pytest.mark.parametrize("along", ["positions", "streams"])
def test_numbers_are_uniform_and_uncorrelated(along):
    n = 64_000
    if along == "positions":
        u = uniform(np.repeat(stream_keys(0, "chain/1/2", 0, last=[3]), n), np.arange(n))
    else:
        u = uniform(stream_keys(0, "chain/1/2", 0, last=range(n)), np.zeros(n, dtype=int))
    counts = np.histogram(u, bins=64, range=(0, 1))[0]
    chi2 = ((counts - 1000) ** 2 / 1000).sum()
    assert abs(chi2 - 63) < 4 * np.sqrt(2 * 63)  # mean and sd of chi-square with 63 degrees of freedom
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 4 / np.sqrt(n)
    assert u.min() >= 0
    assert u.max() < 1


def test_streams_differ_in_every_name():
    names = [(0, "a", 1), (1, "a", 1), (0, "b", 1), (0, "a", 2), (0, "a", 11)]
    keys = [key for name in names for key in stream_keys(*name, last=[1, 2, 12]).tolist()]
    assert len(set(keys)) == 15  # no running together: 11 and 2, 1 and 12


def test_a_key_is_the_digest_of_its_name():
    digest = hashlib.blake2b(b"7\0chain/1/2\0003\0004", digest_size=8).digest()
    assert stream_keys(7, "chain/1/2", 3, last=[4]).tolist() == [int.from_bytes(digest, "little")]


def sample(generator, prompts, n_samples=3, epoch=0):
    for prompt in prompts:
        generator.submit(prompt, epoch, n_samples)
    groups = generator.collect(len(prompts))
    return {(r.prompt.id, r.sample): r.token_T.tolist() for group in groups for r in group}


def test_a_completion_does_not_depend_on_what_shares_its_batch(llama_folder, make_generator, uneven_prompts):
    alone = sample(make_generator(llama_folder, rows=1), uneven_prompts)
    assert len(alone) == 18
    assert len({tuple(tokens) for tokens in alone.values()}) == 18
    for rows in (3, 64):
        assert sample(make_generator(llama_folder, rows=rows), uneven_prompts) == alone
        assert sample(make_generator(llama_folder, rows=rows), uneven_prompts[::-1], 3) == alone
    some = sample(make_generator(llama_folder, rows=5), uneven_prompts[2:4])
    assert some == {key: alone[key] for key in some}
    assert sample(make_generator(llama_folder, seed=1), uneven_prompts) != alone
    assert sample(make_generator(llama_folder), uneven_prompts, epoch=1) != alone


def test_rows_are_refilled_while_others_are_in_flight(llama_folder, make_generator, uneven_prompts):
    generator = make_generator(llama_folder, rows=4)
    for prompt in uneven_prompts:
        generator.submit(prompt, 0, 8)
    rollouts = [r for group in generator.collect(len(uneven_prompts)) for r in group]
    lengths = [len(r.token_T) for r in rollouts]
    total, longest = sum(lengths), max(lengths)
    # Without a completion that waits, the last one ends at most `longest` ticks after the last refill.
    assert generator.counters.ticks <= total / 4 + longest
    assert generator.counters.tokens == sum(r.length for r in rollouts)


def test_groups_come_back_in_order_of_admission(llama_folder, make_generator, uneven_prompts):
    generator = make_generator(llama_folder, rows=3)
    places = [generator.submit(prompt, 0, 2) for prompt in uneven_prompts]
    assert places == list(range(6))
    found = [group for n in (1, 3, 2) for group in generator.collect(n)]
    assert [[r.prompt.id for r in group] for group in found] == [[p.id] * 2 for p in uneven_prompts]
    assert [[r.sample for r in group] for group in found] == [[0, 1]] * 6
    with pytest.raises(ValueError, match="only 0 groups are admitted, 1 were asked for"):
        generator.collect(1)


def test_sampled_frequencies_follow_the_model(save_model, make_generator, uneven_prompts):
    folder, n, temperature = save_model("llama", seed=1), 4000, 0.7
    marker = VOCABULARY.index("</think>")
    one_token = LengthRule(1, 1, Marker((marker,)), (marker,), (1, 1))
    prompt = uneven_prompts[2]
    generator = make_generator(folder, rows=500, temperature=temperature, length=one_token)
    generator.submit(prompt, 0, n)
    first = [int(r.token_T[0]) for r in generator.collect(1)[0]]
    model: Any = load_model(folder)
    ids = torch.tensor([generator.tokenizer(prompt.text, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        p_V = torch.softmax(model(input_ids=ids).logits[0, -1].double() / temperature, -1).numpy()
    assert 0.05 < p_V.max() < 0.95
    error_V = np.bincount(first, minlength=len(VOCABULARY)) / n - p_V
    assert (np.abs(error_V) < 4 * np.sqrt(p_V * (1 - p_V) / n) + 1 / n).all()


@pytest.mark.parametrize("cut", [{"top_p": 0.7}, {"top_k": 4}, {"top_p": 0.8, "top_k": 6}])
def test_tokens_are_of_the_nucleus_with_its_log_probabilities(
    save_model, make_generator, uneven_prompts, cut
):
    """Against the warpers of transformers, which its `generate` samples by."""
    folder, temperature = save_model("llama", seed=1), 0.7
    generator = make_generator(folder, rows=64, temperature=temperature, **cut)
    for prompt in uneven_prompts:
        generator.submit(prompt, 0, 8)
    model: Any = load_model(folder)
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(cut["top_k"])] if "top_k" in cut else []
    warpers += [TopPLogitsWarper(cut["top_p"])] if "top_p" in cut else []
    left_out = 0
    for rollout in (rollout for group in generator.collect(6) for rollout in group):
        ids = torch.from_numpy(np.concatenate([rollout.prompt_T, rollout.token_T]))[None]
        with torch.no_grad():
            scores_TV = model(input_ids=ids).logits[0, len(rollout.prompt_T) - 1 : -1]
        for warp in warpers:
            scores_TV = warp(ids, scores_TV)  # pyright: ignore[reportArgumentType]
        logp_TV = scores_TV.log_softmax(-1).numpy()
        expected_T, sampled_T = logp_TV[range(len(rollout.token_T)), rollout.token_T], rollout.sampled_T
        np.testing.assert_allclose(rollout.logp_T[sampled_T], expected_T[sampled_T], atol=2e-5)
        left_out += int(np.isinf(logp_TV).sum())
    assert left_out > 1000


@pytest.mark.parametrize("several", [True, False])
def test_the_end_tokens_of_generation_config_end_a_completion(
    save_model, tiny_recipe, uneven_prompts, several
):
    """As the tokenizer's does, whether there is one or a list; the verifier's text has none of them."""
    folder, end, more = save_model("llama"), VOCABULARY.index(END), VOCABULARY.index("7")
    written = Path(folder, "generation_config.json")
    values = json.loads(written.read_text()) | {"eos_token_id": [end, more] if several else more}
    written.write_text(json.dumps(values))
    context = replace(tiny_recipe.context, prompt=24)
    recipe = replace(tiny_recipe, model=folder, length=NoLengthControl(), context=context)
    generator = load_generator(recipe, folder, 0, 16)
    assert generator.sampling.end_tokens == (end, more)
    for prompt in uneven_prompts:
        generator.submit(prompt, 0, 20)
    last = []
    for rollout in (r for group in generator.collect(len(uneven_prompts)) for r in group):
        inner, token = rollout.token_T[:-1].tolist(), int(rollout.token_T[-1])
        assert not {end, more} & set(inner)
        assert rollout.truncated == (token not in (end, more))
        last.append(token)
    assert {end, more} <= set(last)
    texts = texts_of(
        load_tokenizer(folder), [(uneven_prompts[0], [np.array([9, 10, t])]) for t in (end, more, 11)]
    )
    assert texts == [["01"], ["01"], ["012"]]
