"""Code that vLLM's own processes import by name, in an environment in which scalerl is not installed.

    Worker            --worker-extension-cls: updates the weights between two decode steps, and reports the
                      length of every completion in flight, so that each token's version is known
    LengthProcessor   --logits-processors: ends the thinking by force within a completion, which keeps its KV
                      cache; a second request with the phrase in its prompt would compute part of it again

Of scalerl it imports only the root, `protocol` and `scalerl.rl.algo.length`, which need no more than numpy.

Shapes in names: V vocabulary, R decode slots of a `LengthState`.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from scalerl.rl.algo.length import LengthRule, LengthState
from scalerl.rl.engine.vllm.protocol import LENGTH, rule_from_json, shape_of


class Worker:
    """Methods that vLLM adds to its workers; `/collective_rpc` calls them between two steps."""

    model_runner: Any

    def scalerl_install(self, path: str) -> dict[str, int]:
        """Load the safetensors files of a folder into the model; the KV cache stays as it is.

        Returns the tokens sampled so far of each started completion, by vLLM's request name.
        """

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for part in sorted(Path(path).glob("*.safetensors")):
                with safe_open(part, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118
                        yield name, file.get_tensor(name)

        self.reload_weights(weights_iterator=weights())  # type: ignore[attr-defined]
        model = self.model_runner.get_model()
        head: Any = getattr(model, "lm_head", None)
        if getattr(model.config, "tie_word_embeddings", False) and hasattr(head, "quant_method"):
            # A tied head loads no weights of its own: on a CPU its processed copy would stay the old one.
            head.quant_method.process_weights_after_loading(head)
        return self.scalerl_progress()

    def scalerl_describe(self) -> dict[str, Any]:
        """Return the settings of the server on which its samples and log-probabilities depend."""
        config: Any = self.vllm_config  # type: ignore[attr-defined]
        model, scheduler, parallel = config.model_config, config.scheduler_config, config.parallel_config
        return {
            "dtype": str(model.dtype).removeprefix("torch."),
            "head_dtype": str(model.head_dtype).removeprefix("torch."),
            "logprobs_mode": model.logprobs_mode,
            "max_num_seqs": scheduler.max_num_seqs,
            "seed": model.seed,
            "v2_model_runner": bool(config.use_v2_model_runner),
            "shape": shape_of(model.hf_text_config),
            "length_control": f"{__name__}:{LengthProcessor.__name__}" in (model.logits_processors or ()),
            "data_parallel": parallel.data_parallel_size,
            "pipeline_parallel": parallel.pipeline_parallel_size,
            "speculative": config.speculative_config is not None,
        }

    def scalerl_cache_bytes(self) -> int:
        """Return the bytes for the KV cache that vLLM has measured on this GPU; 0 if it has not."""
        return int(getattr(self, "available_kv_cache_memory_bytes", 0))

    def scalerl_progress(self) -> dict[str, int]:
        """Return the number of tokens sampled so far of each started completion, by vLLM's request name."""
        return {name: len(r.output_token_ids) for name, r in self.model_runner.requests.items()}


@dataclass
class _Row:
    """A completion in the batch: its row in `state`, and how many of its tokens that has seen."""

    state: _States
    row: int
    output: list[int]
    seen: int = 0


class LengthProcessor(LogitsProcessor):
    """Enforces the length rule in a request's `vllm_xargs`, by the code of the built-in generator.

    It forces the tokens of the phrase where the rule requires them, and the end token when the answer has run
    out of budget: this ends the request, and the client drops that token.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._n_rows = 2 * vllm_config.scheduler_config.max_num_seqs  # vLLM adds before it removes
        self._model = vllm_config.model_config
        self._rows: dict[int, _Row] = {}
        self._states: dict[str, _States] = {}

    def is_argmax_invariant(self) -> bool:
        """Return False: forcing a token changes which one is the most likely."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Track completions that enter, leave or move within the batch."""
        process_dict_updates(self._rows, batch_update, self._begin)
        for states in self._states.values() if batch_update else ():
            states.keep({row.row for row in self._rows.values() if row.state is states})

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Read the newest tokens; where the next token is forced, mask all others."""
        for states in self._states.values():
            rows = {index: row for index, row in self._rows.items() if row.state is states}
            states.advance(list(rows.values()))
            forced_R = states.forced()
            for index, row in rows.items():
                if (token := int(forced_R[row.row])) >= 0:
                    # The log-probability of a forced token is then 0, whatever the temperature.
                    logits[index] = -torch.inf
                    logits[index, token] = 0.0
        return logits

    def _begin(self, params: Any, prompt: list[int] | None, output: list[int]) -> _Row | None:
        text = (params.extra_args or {}).get(LENGTH)
        if text is None:
            return None
        values = json.loads(text)
        # One state for each rule: servers at `urls` may serve several runs.
        key = json.dumps([values["rule"], values["end_tokens"]], sort_keys=True)
        if key not in self._states:
            rule = rule_from_json(values["rule"], self._decode)
            self._states[key] = _States(rule, values["end_tokens"], self._n_rows)
        states = self._states[key]
        return _Row(states, states.start(values["interrupt_at"]), output)

    def _decode(self, tokens: list[int]) -> str:
        from vllm.tokenizers import cached_tokenizer_from_config

        return cached_tokenizer_from_config(self._model).decode(tokens)


class _States:
    """The completions with the same length rule."""

    def __init__(self, rule: LengthRule, end_tokens: Sequence[int], n_rows: int) -> None:
        self._state = LengthState(rule, n_rows)
        self._end_tokens, self._n_rows = end_tokens, n_rows
        self._used: set[int] = set()
        self._done_R = np.zeros(n_rows, dtype=bool)

    def start(self, interrupt_at: int) -> int:
        """Allocate a row for a new completion and return it."""
        row = next(row for row in range(self._n_rows) if row not in self._used)
        self._used.add(row)
        self._done_R[row] = False
        self._state.start(row, interrupt_at)
        return row

    def keep(self, rows: set[int]) -> None:
        """Free all rows but these."""
        self._used = rows

    def advance(self, rows: list[_Row]) -> None:
        """Advance each row to its newest token; a completion that was preempted has several new ones."""
        while behind := [row for row in rows if row.seen < len(row.output)]:
            token_R = np.full(self._n_rows, -1)
            for row in behind:
                token_R[row.row] = row.output[row.seen]
                row.seen += 1
            # `LengthState` advances all of its rows, so the others are saved and restored.
            others = np.setdiff1d(np.arange(self._n_rows), [row.row for row in behind])
            kept = self._state.save(others)
            done_R, _ = self._state.advance(token_R, self._end_tokens)
            self._state.load(others, kept)
            moved = [row.row for row in behind]
            self._done_R[moved] |= done_R[moved]

    def forced(self) -> np.ndarray:
        """Return the token that must come next in each row, or -1."""
        return np.where(self._done_R, self._end_tokens[0], self._state.forced_token())
