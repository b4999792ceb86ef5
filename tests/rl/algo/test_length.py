import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from scalerl.errors import InputError
from scalerl.rl.algo.length import (
    ForcedInterruption,
    LengthPenalty,
    LengthRule,
    LengthState,
    Marker,
    NoLengthControl,
)
from scalerl.rl.loop.pipeline import make_group
from scalerl.rl.model.causal_lm import load_tokenizer
from scalerl.rl.tasks.chain import VOCABULARY, Chain
from scalerl.rl.types import Limits, Reward
from scalerl.rl.verify.verifier import PoolVerifier

END, CLOSE, UP, DIGIT = (VOCABULARY.index(word) for word in ("<eos>", "</think>", "!", "0"))
PHRASE = (UP, UP, CLOSE)
MARKER = Marker((CLOSE,))


def follow(rule, tokens, interrupt_at):
    """Feed what a model would say to one slot; returns the completion, what was inserted, and truncation."""
    state = LengthState(rule, 1)
    state.start(0, interrupt_at)
    said, out, inserted = iter(tokens), [], []
    while True:
        forced = int(state.forced_token()[0])
        out.append(forced if forced >= 0 else next(said))
        inserted.append(forced >= 0)
        done, truncated = state.advance(np.array([out[-1]]), [END])
        if done[0]:
            return out, inserted, bool(truncated[0])


RULE = LengthRule(6, 3, MARKER, PHRASE, (3, 6))


def test_thinking_is_interrupted_at_its_length_and_the_answer_follows_the_phrase():
    out, inserted, truncated = follow(RULE, [DIGIT] * 5 + [END], interrupt_at=4)
    assert out == [DIGIT] * 4 + [*PHRASE] + [DIGIT, END]
    assert inserted == [False] * 4 + [True] * 3 + [False] * 2
    assert not truncated


def test_thinking_that_ends_by_itself_is_not_interrupted():
    # Its last possible token may be the one that ends it; so may the first.
    for thought in (1, 4):
        thinking = [DIGIT] * (thought - 1) + [CLOSE]
        out, inserted, truncated = follow(RULE, [*thinking, DIGIT, END], interrupt_at=4)
        assert out == [*thinking, DIGIT, END]
        assert not any(inserted)
        assert not truncated


def test_a_completion_that_ends_while_thinking_is_neither_interrupted_nor_truncated():
    for n in (0, 3):  # n = 3: the end token is where the interruption would begin
        out, inserted, truncated = follow(RULE, [DIGIT] * n + [END], interrupt_at=4)
        assert out == [DIGIT] * n + [END]
        assert not any(inserted)
        assert not truncated


@pytest.mark.parametrize("interrupted", [True, False])
def test_an_answer_that_overruns_its_budget_is_truncated(interrupted):
    thinking = [DIGIT] * 4 if interrupted else [DIGIT, CLOSE]
    start = len(thinking) + (len(PHRASE) if interrupted else 0)
    out, _, truncated = follow(RULE, [*thinking, DIGIT, DIGIT, END], interrupt_at=4)
    assert (len(out) - start, truncated) == (3, False)  # the end token is the last that fits
    out, _, truncated = follow(RULE, [*thinking, DIGIT, DIGIT, DIGIT, END], interrupt_at=4)
    assert (len(out) - start, truncated) == (3, True)


def test_the_longest_completion_fits_the_slots():
    out, _, truncated = follow(RULE, [DIGIT] * 99, interrupt_at=6)
    assert truncated
    assert len(out) == RULE.max_tokens == 6 + 3 + 3


def test_without_length_control_thinking_and_answer_share_one_budget():
    rule = LengthRule(6, 3, MARKER)
    assert rule.max_tokens == 9
    for thought in (0, 2, 8, 9):  # wherever the thinking ends, if it ends
        tokens = [DIGIT] * thought + [CLOSE] + [DIGIT] * 9
        out, inserted, truncated = follow(rule, tokens, int(rule.draw(np.array([0.999]))[0]))
        assert (len(out), truncated, any(inserted)) == (9, True, False)
    assert follow(rule, [DIGIT] * 8 + [END], int(rule.draw(np.array([0.0]))[0]))[2] is False


def test_interruption_lengths_are_uniform_from_low_to_high_inclusive():
    rule = LengthRule(12, 4, MARKER, PHRASE, (10, 12))
    drawn = rule.draw((np.arange(300) + 0.5) / 300)
    assert np.unique(drawn, return_counts=True)[0].tolist() == [10, 11, 12]
    assert np.unique(drawn, return_counts=True)[1].tolist() == [100, 100, 100]
    assert rule.draw(np.array([0.0, 1 - 2**-53])).tolist() == [10, 12]


def test_a_generator_interrupts_as_the_rule_says(save_model, make_generator, uneven_prompts):
    rule = LengthRule(9, 4, MARKER, PHRASE, (5, 9))
    generator = make_generator(save_model("llama", seed=3), rows=8, length=rule)
    for prompt in uneven_prompts:
        generator.submit(prompt, 0, 50)
    rollouts = [r for group in generator.collect(6) for r in group]
    interrupted = [r for r in rollouts if r.interrupted]
    by_themselves = [r for r in rollouts if not r.interrupted]
    assert len(interrupted) > 50
    assert len(by_themselves) > 50
    assert any(r.truncated for r in interrupted)
    assert any(not r.truncated for r in interrupted)
    lengths = []
    for r in interrupted:
        place = np.flatnonzero(~r.sampled_T)
        lengths.append(int(place[0]))
        assert place.tolist() == [place[0], place[0] + 1, place[0] + 2]  # the phrase, once, in one piece
        assert tuple(r.token_T[place]) == PHRASE
        assert not r.logp_T[place].any()
        assert (r.logp_T[r.sampled_T] < 0).all()
        assert r.length == len(r.token_T) - 3
        answer = r.token_T[place[-1] + 1 :]
        assert 1 <= len(answer) <= 4
        assert r.truncated == (answer[-1] != END)
    assert sorted(set(lengths)) == [5, 6, 7, 8, 9]
    for r in by_themselves:
        assert r.sampled_T.all()
        assert END in r.token_T[:9] or CLOSE in r.token_T[:9]


def test_a_truncated_completion_has_failed_whatever_it_says(make_rollout, llama_folder):
    right = tuple(VOCABULARY.index(word) for word in ["+", "7", "</think>", "7", "<eos>"])
    verifier = PoolVerifier(Chain(), load_tokenizer(llama_folder), Limits(workers=1))
    group = [make_rollout(5, token_T=right), make_rollout(5, token_T=right, truncated=True)]
    assert verifier.verify([group]) == [[Reward(1.0, True), Reward(-1.0, False)]]
    verifier.close()


def test_the_rule_finds_its_tokens_or_says_what_is_wrong(llama_folder):
    tokenizer = load_tokenizer(llama_folder)
    choice = ForcedInterruption(low=2, high=6, phrase="! ! </think>")
    assert LengthRule.resolve(choice, tokenizer, 6, 3, "</think>") == LengthRule(6, 3, MARKER, PHRASE, (2, 6))
    assert LengthRule.resolve(NoLengthControl(), tokenizer, 6, 3, "</think>") == LengthRule(6, 3, MARKER)
    with pytest.raises(InputError, match="end_of_thinking: this tokenizer cannot write '</done>'"):
        LengthRule.resolve(NoLengthControl(), tokenizer, 6, 3, "</done>")


def test_the_length_penalty_by_hand():
    # From 14 - 2 = 12 tokens on, half at 13, all of it from 14 on; a wrong answer pays nothing.
    rule = LengthPenalty(max_length=14, cache=2)
    assert [rule.penalty(n, True) for n in (1, 12, 13, 14, 20)] == [0, 0, -0.5, -1, -1]
    assert rule.penalty(20, False) == 0


def test_lengths_that_are_not_given_are_those_of_the_context():
    assert ForcedInterruption().within(12288, 2048) == ForcedInterruption(low=10240, high=12288)
    assert ForcedInterruption(low=3).within(6, 1).bounds(6) == (3, 6)
    assert ForcedInterruption(high=3).within(6, 1) == ForcedInterruption(low=2, high=3)
    assert ForcedInterruption().within(1, 1) == ForcedInterruption(low=1, high=1)
    assert LengthPenalty().within(12288, 2048) == LengthPenalty(max_length=14336, cache=2048)
    assert LengthPenalty(max_length=4).within(9, 9) == LengthPenalty(max_length=4, cache=1)
    with pytest.raises(ValueError, match=r"length.high: 7 exceeds context.thinking \(6\)"):
        ForcedInterruption(low=2, high=7).within(6, 1)
    with pytest.raises(ValueError, match=r"length.low: 7 exceeds context.thinking \(6\)"):
        ForcedInterruption(low=7).within(6, 1)
    with pytest.raises(ValueError, match="of no context yet"):
        LengthPenalty().penalty(3, True)


def test_the_penalty_is_taken_from_the_reward_and_not_from_what_is_correct(make_rollout):
    rollouts = [make_rollout(3), make_rollout(13)]
    group = make_group(rollouts, [Reward(1.0, True)] * 2, LengthPenalty(max_length=14, cache=2))
    assert group.reward_G.tolist() == [1.0, 0.5]
    assert group.correct_G.all()


@pytest.fixture(scope="module")
def bpe():
    """A byte-level BPE that writes `</think>` in several tokens, the last of which may be merged onwards."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(["a</think>\n\nb"] * 9 + ["think of >\n\n then </ and k>"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_an_end_of_thinking_of_several_tokens_is_found_however_it_is_written(bpe):
    rule = LengthRule.resolve(NoLengthControl(), bpe, 40, 3, "</think>")
    assert len(rule.end_of_thinking.tokens) > 1
    for text in ("a b</think> 4", "a b</think>\n\n4", "k></think>4"):
        closed = []
        state = LengthState(rule, 1)
        state.start(0, 99)
        tokens = bpe(text)["input_ids"]
        for token in tokens:
            state.advance(np.array([token]), [-2])
            closed.append(not state._thinking_S[0])
        first = closed.index(True)
        assert "</think>" in bpe.decode(tokens[: first + 1])
        assert "</think>" not in bpe.decode(tokens[:first])
        assert all(closed[first:])


def test_an_end_of_thinking_of_which_a_character_is_several_tokens_is_refused(bpe):
    for text in ("\u25c1/think\u25b7", "\u25b7"):
        with pytest.raises(InputError, match="splits a character"):
            LengthRule.resolve(NoLengthControl(), bpe, 40, 3, text)


def test_a_phrase_of_several_tokens_ends_the_thinking(bpe):
    choice = ForcedInterruption(low=4, high=4, phrase="Time is up. </think>")
    rule = LengthRule.resolve(choice, bpe, 6, 2, "</think>")
    state = LengthState(rule, 1)
    state.start(0, 4)
    letter, out = bpe("a")["input_ids"][0], []
    while True:
        forced = int(state.forced_token()[0])
        out.append(forced if forced >= 0 else letter)
        done, truncated = state.advance(np.array(out[-1:]), [-2])
        if done[0]:
            break
    assert bpe.decode(out) == "aaaaTime is up. </think>aa"
    assert truncated[0]
