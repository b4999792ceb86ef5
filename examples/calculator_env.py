"""An environment of several turns, as TRL takes it: sums, and a tool that adds.

    python examples/calculator_env.py            # writes sums.jsonl
    scalerl train examples/calculator.toml

The class has no get_reward(): the verifier of the recipe looks at the answer of the last turn.
"""

import json
from pathlib import Path
from random import Random


class Calculator:
    """A calculator that adds."""

    def reset(self, answer: str, **row: object) -> None:
        """Begin; a text that is returned would be appended to the prompt."""
        self._calls = 0

    def add(self, numbers: list[int]) -> str:
        """
        Add whole numbers.

        Args:
            numbers: The numbers to add.
        """
        self._calls += 1
        if self._calls > 3:
            raise ValueError("the battery is empty")  # which the model is told
        return f"{sum(numbers)}\n"


def main() -> None:
    """Write the sums."""
    rng = Random(0)
    rows = []
    for _ in range(600):
        numbers = [rng.randint(100, 999) for _ in range(3)]
        rows.append({"prompt": f"What is {' + '.join(map(str, numbers))}?", "answer": str(sum(numbers))})
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
