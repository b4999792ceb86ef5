from random import Random

import pytest

from scalerl.rl.model.causal_lm import load_tokenizer
from scalerl.rl.tasks.chain import VOCABULARY, Chain, Demonstrations, solve
from scalerl.rl.types import Prompt

SMALL = Chain(k_max=4, heldout_per_length=20, train_per_length=30)


@pytest.mark.parametrize(
    ("text", "correct"),
    [
        ("+ 7 * 9 - 0 </think> 0", True),
        ("+7*9-0</think>0", True),  # as the tokenizer writes it
        ("</think> 0", True),  # a guess
        ("5 + ! </think> 0", True),  # interrupted
        ("+ 7 * 9 - 0 </think> 9", False),
        ("+ 7 * 9 - 0 0", False),  # the thinking never ends
        ("0", False),
        ("</think> 0 0", False),
        ("</think> 9 0", False),
        ("</think> 0 9", False),
        ("</think>", False),
        ("</think> 0 <eos> 9", False),
        ("</think> + 0", False),
        ("</think> - 9 </think> 0", False),  # more thinking, on the budget of the answer
        ("", False),
    ],
)
def test_the_verifier_wants_one_right_digit_after_the_thinking(text, correct):
    reward = Chain().verify(Prompt("chain/3/0", "3 + 4 * 7 - 9 = . .", "0"), text)
    assert (reward.value, reward.correct) == (1.0 if correct else -1.0, correct)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("3 + 4 * 7 - 9 = . .", [7, 9, 0]),  # 7; 49 -> 9; 0
        ("2 - 5 =", [7]),  # -3 -> 7
        ("9 * 9 * 9 + 8 =", [1, 9, 7]),  # 81 -> 1; 9; 17 -> 7
        ("0 - 9 - 9 * 3 - 0 = .", [1, 2, 6, 6]),
    ],
)
def test_chains_are_worked_out_from_left_to_right(text, values):
    assert solve(text) == values


def test_prompts_are_distinct_balanced_and_of_one_width():
    train, heldout = SMALL.prompts("train"), SMALL.prompts("heldout")
    texts = [prompt.text for prompt in train + heldout]
    assert len(set(texts)) == len({p.id for p in train + heldout}) == 4 * (20 + 30)
    assert {len(text.split()) for text in texts} == {SMALL.prompt_tokens} == {10}
    for k in range(1, 5):
        for split, n in ((train, 30), (heldout, 20)):
            stratum = [p for p in split if p.id.startswith(f"chain/{k}/")]
            assert len(stratum) == n
            assert {p.text.split().index("=") for p in stratum} == {2 * k + 1}
    assert all(prompt.answer == str(solve(prompt.text)[-1]) for prompt in train + heldout)


def test_short_chains_give_as_many_prompts_as_there_are():
    # k = 1: 10 values x (10 + 10 + 4) operations = 240; k = 2: 10 x 24 x 24 = 5760.
    task = Chain(k_max=1, heldout_per_length=100, train_per_length=1000)
    assert (len(task.prompts("heldout")), len(task.prompts("train"))) == (100, 140)
    task = Chain(k_max=2, heldout_per_length=10, train_per_length=6000)
    assert len(task.prompts("train")) == 230 + 5750


def test_held_out_prompts_are_in_no_training_split_and_in_no_demonstration():
    task = Chain(k_max=2, heldout_per_length=120, train_per_length=60)
    heldout = {prompt.text for prompt in task.prompts("heldout")}
    assert not heldout & {prompt.text for prompt in task.prompts("train")}
    assert task.heldout_texts == heldout
    rng = Random(0)
    shown = {Demonstrations(task, 8).sample(rng)[0] for _ in range(3000)}
    assert not heldout & shown
    assert sum(text.split()[3] == "=" for text in shown) > 100  # of the 120 at k = 1 that may be shown


def test_splits_depend_on_the_seed_alone():
    again = Chain(k_max=4, heldout_per_length=20, train_per_length=30)
    other = Chain(k_max=4, heldout_per_length=20, train_per_length=30, seed=2)
    for split in ("train", "heldout"):
        assert SMALL.prompts(split) == again.prompts(split)
        assert SMALL.prompts(split) != other.prompts(split)


def test_the_ceiling_by_hand():
    # 16 tokens hold 8 steps: 8 of 10 lengths are solved, the other 2 guessed: (8 + 0.2) / 10.
    assert Chain(k_max=10).ceiling(16) == pytest.approx(0.82)
    assert Chain(k_max=10).ceiling(17) == pytest.approx(0.82)
    assert Chain(k_max=10).ceiling(1) == pytest.approx(0.1)
    assert Chain(k_max=10).ceiling(20) == Chain(k_max=10).ceiling(99) == 1.0


def test_the_tokenizer_writes_what_it_read(llama_folder):
    tokenizer = load_tokenizer(llama_folder)
    ids = tokenizer(" ".join(VOCABULARY), add_special_tokens=False)["input_ids"]
    assert ids == list(range(len(VOCABULARY)))
    assert tokenizer.decode(ids) == "".join(VOCABULARY)
    assert tokenizer("3 + 4")["input_ids"] == [12, 6, 13]  # nothing is added
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<eos>", "<pad>")


def parts(completion):
    thinking, _, answer = completion.partition("</think>")
    return thinking.split(), answer.split()


def test_demonstrations_without_chances_are_perfect_where_the_budget_allows():
    task = Chain(k_max=6, heldout_per_length=5, train_per_length=5)
    perfect, rng = Demonstrations(task, 8, give_up=0, slip=0, ramble=0), Random(1)
    for _ in range(400):
        text, completion = perfect.sample(rng)
        values = solve(text)
        thinking, answer = parts(completion)
        assert answer == [str(values[-1]), "<eos>"]
        if len(values) < 4:  # within 8 tokens it ends by itself; at 8 it is interrupted
            assert thinking[-1] != "!"
        else:
            assert thinking.pop() == "!"
        assert thinking[1::2] == [str(v) for v in values[:4]]
        assert thinking[::2] == text.split()[1 : 1 + len(thinking) : 2]
        assert task.verify(Prompt("x", text, str(values[-1])), completion.removesuffix("<eos>")).correct


def test_each_chance_makes_its_own_kind_of_imperfection():
    task, n = Chain(k_max=6, heldout_per_length=5, train_per_length=5), 2000
    text = task.text(["3", "+", "4", "*", "7", "-", "9", "+", "1", "-", "2"])  # 5 operations: 7 9 0 1 9

    def drawn(**chances):
        chances = {"give_up": 0.0, "slip": 0.0, "ramble": 0.0, **chances}
        rng = Random(2)
        return [parts(Demonstrations(task, 16, **chances).complete(rng, text)) for _ in range(n)]

    # Giving up with probability h, h uniform in [0, 0.8]: no step at all with 0.4 on average.
    gave_up = drawn(give_up=0.4)
    assert sum(not thinking for thinking, _ in gave_up) / n == pytest.approx(0.4, abs=0.04)
    values = ["3", "7", "9", "0", "1", "9"]
    assert all(answer[0] == values[len(thinking) // 2] for thinking, answer in gave_up)
    # A slip at the first step: 0.1; and the chain goes on from it.
    slipped = drawn(slip=0.1)
    assert sum(thinking[1] != "7" for thinking, _ in slipped) / n == pytest.approx(0.1, abs=0.025)
    assert all(answer[0] == thinking[-1] for thinking, answer in slipped)
    # One more digit: 0.2; two more: half of that.
    rambled = [len(answer) - 2 for _, answer in drawn(ramble=0.2)]
    assert sum(more >= 1 for more in rambled) / n == pytest.approx(0.2, abs=0.035)
    assert sum(more >= 2 for more in rambled) / n == pytest.approx(0.1, abs=0.03)


@pytest.mark.parametrize(
    "bad", [{"k_max": 0}, {"k_max": 41}, {"heldout_per_length": 201}, {"train_per_length": 0}]
)
def test_a_chain_out_of_range_is_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Chain(**bad)
