"""A task whose environment answers every turn, in symbols of `chain`; its prompts say how."""

import time
from dataclasses import dataclass, field

from scalerl.rl import Limits, Prompt, Reward, Task


@dataclass(frozen=True)
class Answering(Task):
    """`prompt.answer` says what an answer does: symbols are its text, other words are what happens."""

    turns: int = 3
    pause: float = 0.0
    """Seconds that every answer takes."""
    limits: Limits = field(default_factory=lambda: Limits(seconds=60))

    def prompts(self, split):
        return [
            Prompt(f"{split}/{i}", f"{i % 5 + (split == 'train')} + {i % 7} =", "1 + 2") for i in range(6)
        ]

    def respond(self, prompt, turns):
        time.sleep(600 if prompt.answer == "sleeps" else self.pause)
        if prompt.answer == "raises":
            raise KeyError("no such thing")
        if prompt.answer == "is a text":
            return "7"
        if prompt.answer == "ends":
            return []
        return [prompt.answer, " " + " ".join("=" * len(turns))]

    def verify(self, prompt, text):
        return Reward(0.0, False)

    def verify_turns(self, prompt, turns):
        return Reward(float(len(turns)), len(turns) == self.turns)
