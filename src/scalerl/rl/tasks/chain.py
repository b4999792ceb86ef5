"""`chain`: left-to-right arithmetic modulo 10, the task of the demonstration.

    prompt     3 + 4 * 7 - 9 = . . . .     padded with dots to one width
    thinking   + 7 * 9 - 0           one `op value` pair per step
    answer     </think> 0 <eos>

A chain of k operations needs 2 k thinking tokens, so a thinking budget of 16 tokens allows 8 operations. With
lengths up to 8, and some far above 8, the budget sets a ceiling on the pass rate that is known before
training. Multipliers are coprime to 10, so every operation is a bijection, every value is equally likely, and
a guess is right exactly one time in ten.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Literal

from scalerl.rl.tasks.task import Task
from scalerl.rl.types import Prompt, Reward, Split

END_OF_THINKING = "</think>"
END = "<eos>"
PAD = "<pad>"
TIME_IS_UP = "!"
FILLER = "."
INTERRUPTION = f"{TIME_IS_UP} {END_OF_THINKING}"
DIGITS = "0123456789"
VOCABULARY = [PAD, END, END_OF_THINKING, TIME_IS_UP, FILLER, "=", "+", "-", "*", *DIGITS]

OPERANDS = {"+": DIGITS, "-": DIGITS, "*": "1379"}


def apply(op: str, x: int, b: int) -> int:
    """Apply one operation modulo 10."""
    return {"+": x + b, "-": x - b, "*": x * b}[op] % 10


@dataclass(frozen=True)
class Chain(Task):
    """Chains of 1..`k_max` operations, `train_per_length` and `heldout_per_length` distinct prompts of each.

    Short chains have few distinct prompts (k = 1: 240, k = 2: 5760), so fewer than `train_per_length` may
    remain for training. Held-out prompts are drawn first and never appear in the training split or in
    demonstrations.
    """

    k_max: int = 10
    skip: tuple[int, ...] = ()
    """Lengths to leave out: those just above a thinking budget. A model learns to compute one or two
    operations without writing them down, so with these lengths the budget would not set the ceiling."""
    heldout_per_length: int = 100
    train_per_length: int = 240
    seed: int = 1
    kind: Literal["chain"] = "chain"

    def __post_init__(self) -> None:
        if not 1 <= self.k_max <= 40:
            raise ValueError("k_max must be between 1 and 40")
        if not self.lengths:
            raise ValueError("skip leaves no length")
        if not 1 <= self.heldout_per_length <= 200:
            raise ValueError("heldout_per_length must be between 1 and 200 (k = 1 has 240 prompts in all)")
        if not 1 <= self.train_per_length <= 100_000 or self.seed < 0:
            raise ValueError("train_per_length must be between 1 and 100,000, and seed not negative")

    @property
    def lengths(self) -> tuple[int, ...]:
        """The chain lengths, each equally frequent."""
        return tuple(k for k in range(1, self.k_max + 1) if k not in self.skip)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of every prompt: the start value, two per operation, the equals sign, and dots."""
        return 2 * self.k_max + 2

    def text(self, chain: Sequence[str]) -> str:
        """Return the prompt of a chain, padded with dots to keep step j at one distance from operation j."""
        return " ".join([*chain, "=", *[FILLER] * (self.prompt_tokens - len(chain) - 1)])

    def prompts(self, split: Split) -> list[Prompt]:
        """Return the prompts of a split, balanced over chain lengths; ids are `chain/<k>/<number>`."""
        return self._splits[split]

    @cached_property
    def heldout_texts(self) -> frozenset[str]:
        """The texts of the held-out prompts, which must not occur in any training data."""
        return frozenset(prompt.text for prompt in self.prompts("heldout"))

    @property
    def heldout_hash(self) -> str:
        """Hash of the held-out set without messages (unlike `Task.heldout_hash`), as in old records."""
        lines = "\n".join(f"{p.id}\t{p.text}\t{p.answer}" for p in self.prompts("heldout"))
        return hashlib.blake2b(lines.encode(), digest_size=8).hexdigest()

    @cached_property
    def _splits(self) -> dict[Split, list[Prompt]]:
        rng = Random(self.seed)
        splits: dict[Split, list[Prompt]] = {"heldout": [], "train": []}
        for k in self.lengths:
            chains = _distinct(rng, k, self.heldout_per_length + self.train_per_length)
            for number, text in enumerate(map(self.text, chains)):
                split: Split = "heldout" if number < self.heldout_per_length else "train"
                splits[split].append(Prompt(f"chain/{k}/{number}", text, str(solve(text)[-1])))
        return splits

    def verify(self, prompt: Prompt, text: str) -> Reward:
        """Return +1 if exactly the right digit follows the end of thinking, else -1."""
        # The first marker counts: any text between two markers was thinking on the budget of the answer.
        _, separator, answer = text.partition(END_OF_THINKING)
        correct = bool(separator) and answer.strip() == prompt.answer
        return Reward(1.0 if correct else -1.0, correct)

    def ceiling(self, thinking_tokens: int) -> float:
        """Return the pass rate of a model that is right within the budget, and guesses beyond it."""
        return sum(1.0 if 2 * k <= thinking_tokens else 0.1 for k in self.lengths) / len(self.lengths)


def solve(text: str) -> list[int]:
    """Return the value after each operation of a prompt."""
    symbols = chain_of(text)
    x, values = int(symbols[0]), []
    for op, b in zip(symbols[1::2], symbols[2::2], strict=True):
        x = apply(op, x, int(b))
        values.append(x)
    return values


def chain_of(text: str) -> list[str]:
    """Return the symbols of a prompt before the equals sign."""
    return text.partition("=")[0].split()


def random_chain(rng: Random, k: int) -> list[str]:
    """Return the symbols of a random chain of `k` operations."""
    symbols = [DIGITS[rng.randrange(10)]]
    for _ in range(k):
        op = "+-*"[rng.randrange(3)]
        symbols += [op, rng.choice(OPERANDS[op])]
    return symbols


def _distinct(rng: Random, k: int, n: int) -> list[tuple[str, ...]]:
    if k == 1:  # few enough to list
        chains = [(x, op, b) for x in DIGITS for op in "+-*" for b in OPERANDS[op]]
        return rng.sample(chains, min(n, len(chains)))
    seen: dict[tuple[str, ...], None] = {}  # in order, unlike a set
    while len(seen) < min(n, 10 * 24**k):  # chains of k operations in all
        seen[tuple(random_chain(rng, k))] = None
    return list(seen)


@dataclass(frozen=True)
class Demonstrations:
    """Worked examples for the base model, with errors that RL can remove.

    Each example has a probability, uniform in [0, 2 `give_up`], of giving up before a step; it then answers
    with the current value, which is right one time in ten. A value is wrong with probability `slip`, and the
    chain continues from it. The answer is followed by another digit with probability `ramble`, and by each
    further one with probability one half, so that some answers overrun their budget. Thinking that reaches
    `thinking_tokens` is interrupted as the generator does it.

    With the three probabilities at 0 the demonstrations are perfect: the right answer follows even
    interrupted thinking, so a model trained on them shows whether it can do the rest without writing it down.
    """

    task: Chain
    thinking_tokens: int
    give_up: float = 0.35
    slip: float = 0.03
    ramble: float = 0.1

    def sample(self, rng: Random) -> tuple[str, str]:
        """Return a prompt that is not held out, and a completion of it."""
        held_out = self.task.heldout_texts
        while (text := self.task.text(random_chain(rng, rng.choice(self.task.lengths)))) in held_out:
            pass
        return text, self.complete(rng, text)

    def complete(self, rng: Random, text: str) -> str:
        """Return a worked completion of the prompt `text`."""
        symbols = chain_of(text)
        x, thinking = int(symbols[0]), []
        closing = END_OF_THINKING
        impatience = rng.random() * 2 * self.give_up
        for op, b in zip(symbols[1::2], symbols[2::2], strict=True):
            if rng.random() < impatience:
                break
            if len(thinking) + 2 > self.thinking_tokens:
                x = x if self.give_up else solve(text)[-1]
                break
            x = apply(op, x, int(b))
            if rng.random() < self.slip:
                x = (x + 1 + rng.randrange(9)) % 10
            thinking += [op, str(x)]
        if len(thinking) >= self.thinking_tokens:
            closing = INTERRUPTION
        answer = [str(x)]
        chance = self.ramble
        while rng.random() < chance:
            answer.append(str(rng.randrange(10)))
            chance = 0.5
        return " ".join([*thinking, closing, *answer, END])


def write_tokenizer(folder: str) -> None:
    """Save the tokenizer of `chain` in Hugging Face format: one token per symbol."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)
    wrapped.save_pretrained(folder)
