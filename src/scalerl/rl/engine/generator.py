"""The built-in generator: continuous batching on a Hugging Face model, one decode step at a time.

    submit -> waiting (in order of admission) -> rows -> finished -> collect (in order of admission)

A row holds one completion. When it finishes, the next waiting completion takes the row at once, whatever
the other rows are doing; rows are never shared by age or by group. `update` exchanges the weights between two
decode steps: completions in flight go on with the KV cache that older weights wrote, and every token records
the version that sampled it. Completions of one group that start together share the pass over their prompt.

Shapes in names: R rows, A rows that hold a completion, B prompts that are read, G completions of a group,
L positions of a row (prompt and completion), D hidden size, V vocabulary, T tokens of a completion.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from scalerl.errors import InputError
from scalerl.rl.algo.length import LengthRule
from scalerl.rl.config.settings import EngineKind
from scalerl.rl.engine.engine import make_engine
from scalerl.rl.engine.random import stream_keys, uniform
from scalerl.rl.engine.saved_rollouts import pack_rollouts, unpack_rollouts
from scalerl.rl.model.causal_lm import FlopCount, install_weights, log_probs_TV, prompt_tokens
from scalerl.rl.types import Counters, Prompt, Rollout, Weights

PROMPTS_KEPT = 10_000
"""Prompts whose tokens are kept for when they are drawn again."""


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled: shared by every completion of a run, and by its evaluations."""

    temperature: float
    fp32_logits: bool
    seed: int
    max_prompt_tokens: int
    length: LengthRule
    """When thinking and answer end (token ids resolved)."""
    end_token: int
    engine: EngineKind = "auto"


class _Request(NamedTuple):
    """A completion that waits for a row, or has one."""

    seq_no: int
    prompt: Prompt
    prompt_T: np.ndarray
    epoch: int
    sample: int
    key: np.uint64
    interrupt_at: int


def _groups_of(requests: Sequence[_Request]) -> list[list[Any]]:
    """What the completions of one group share, once for each group."""
    groups = {request.seq_no: request for request in requests}
    return [[seq_no, dict(vars(r.prompt)), r.prompt_T.tolist(), r.epoch] for seq_no, r in groups.items()]


_BY_ROW = (
    "_token_RL",
    "_logp_RL",
    "_sampled_RL",
    "_version_RL",
    "_first_version_R",
    "_key_R",
    "_start_R",
    "_next_R",
)


class TorchGenerator:
    """Samples with a Transformers model in this process, `n_rows` completions at a time."""

    def __init__(self, model: nn.Module, tokenizer: Any, sampling: Sampling, n_rows: int) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.version = 0
        self.counters = Counters()
        self._tokens = lru_cache(PROMPTS_KEPT)(partial(prompt_tokens, tokenizer))
        self._flop_count = FlopCount.of(model)
        self._device = next(model.parameters()).device
        self._waiting: deque[_Request] = deque()
        self._finished: dict[int, list[Rollout | None]] = {}
        self._admitted = 0
        self._collected = 0
        self._complete = 0
        n_positions = sampling.max_prompt_tokens + sampling.length.max_tokens
        self._engine = make_engine(
            model, n_rows, sampling.max_prompt_tokens, sampling.length.max_tokens, sampling.engine
        )
        self._rows: list[_Request | None] = [None] * n_rows
        self._token_RL = np.zeros((n_rows, n_positions + 1), dtype=np.int64)
        self._logp_RL = np.zeros((n_rows, n_positions + 1), dtype=np.float32)
        self._sampled_RL = np.zeros((n_rows, n_positions + 1), dtype=bool)
        self._version_RL = np.zeros((n_rows, n_positions + 1), dtype=np.int32)
        self._first_version_R = np.zeros(n_rows, dtype=np.int32)
        self._key_R = np.zeros(n_rows, dtype=np.uint64)
        self._start_R = np.zeros(n_rows, dtype=np.int64)  # where the completion begins
        self._next_R = np.zeros(n_rows, dtype=np.int64)  # where the next token goes
        self._state = sampling.length.state(n_rows)
        self._active_R = np.zeros(n_rows, dtype=bool)

    # -- the interface ---------------------------------------------------------------------------------

    def submit(self, prompt: Prompt, epoch: int, n_samples: int) -> int:
        """Admit a group; see `scalerl.rl.types.Generator`."""
        seq_no = self._admitted
        self._admitted += 1
        prompt_T = self._tokens(prompt)
        if not 1 <= len(prompt_T) <= self.sampling.max_prompt_tokens:
            raise ValueError(
                f"prompt {prompt.id} has {len(prompt_T)} tokens; context.prompt allows 1 to "
                f"{self.sampling.max_prompt_tokens}"
            )
        self._finished[seq_no] = [None] * n_samples
        self._waiting += self._requests(seq_no, prompt, prompt_T, epoch, range(n_samples))
        return seq_no

    def _requests(
        self, seq_no: int, prompt: Prompt, prompt_T: np.ndarray, epoch: int, samples: Sequence[int]
    ) -> list[_Request]:
        key_G = stream_keys(self.sampling.seed, prompt.id, epoch, last=samples)
        u_G = uniform(key_G, np.full(len(key_G), -2))  # the positions of tokens are 0 and above
        own = zip(samples, key_G, self.sampling.length.draw(u_G), strict=True)
        return [_Request(seq_no, prompt, prompt_T, epoch, *values) for values in own]

    @property
    def ready(self) -> int:
        """Groups that are complete, next in order, and not taken."""
        n = max(self._complete, self._collected)
        while n in self._finished and all(rollout is not None for rollout in self._finished[n]):
            n += 1
        self._complete = n  # what is complete is not looked at again
        return n - self._collected

    @property
    def busy(self) -> bool:
        """Whether a completion waits or is under way."""
        return bool(self._waiting) or bool(self._active_R.any())

    def work(self) -> None:
        """One decode step."""
        started = time.perf_counter()
        self.tick()
        self.counters.seconds += time.perf_counter() - started

    def take(self, n_groups: int) -> list[tuple[Rollout, ...]]:
        """The next `n_groups` groups in order of admission."""
        seq_nos = range(self._collected, self._collected + n_groups)
        self._collected = seq_nos.stop
        return [tuple(r for r in self._finished.pop(seq_no) if r is not None) for seq_no in seq_nos]

    def collect(self, n_groups: int) -> list[tuple[Rollout, ...]]:
        """Decode until the next `n_groups` groups in order of admission are complete, and take them."""
        admitted = self._admitted - self._collected
        if n_groups > admitted:
            raise ValueError(f"only {admitted} groups are admitted, {n_groups} were asked for")
        while self.ready < n_groups:
            self.work()
        return self.take(n_groups)

    def update(self, weights: Weights, version: int) -> None:
        """Install new weights between two decode steps; the KV cache stays as it is."""
        started = time.perf_counter()
        install_weights(self.model, weights)
        self.version = version
        self.counters.seconds += time.perf_counter() - started

    def start(self, weights: Weights, version: int) -> None:
        """Install the first weights, which is start-up and counted as no work."""
        self.update(weights, version)
        self.counters.seconds = 0.0

    def wait_until_started(self) -> None:
        """It has: see `start`."""

    def close(self) -> None:
        """Nothing is held."""

    @property
    def installed(self) -> int:
        """The version of the weights: they are exchanged at once."""
        return self.version

    @property
    def in_flight(self) -> int:
        """Groups that are admitted and not taken."""
        return len(self._finished)

    # -- resume ----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything but the weights: the resumed run is the same run, bit for bit."""
        rows = np.flatnonzero(self._active_R)
        under_way = [request for row in rows if (request := self._rows[row])]
        done = [(seq_no, r) for seq_no, group in self._finished.items() for r in group if r is not None]
        return {
            "version": self.version,
            "admitted": self._admitted,
            "collected": self._collected,
            "counters": asdict(self.counters),
            "sizes": [[seq_no, len(group)] for seq_no, group in self._finished.items()],
            "groups": _groups_of([*self._waiting, *under_way]),
            "waiting": [[request.seq_no, request.sample] for request in self._waiting],
            "under_way": [[request.seq_no, request.sample] for request in under_way],
            "done": pack_rollouts([rollout for _, rollout in done]),
            "done_seq_nos": [seq_no for seq_no, _ in done],
            "rows": rows,
            "arrays": {name: getattr(self, name)[rows] for name in _BY_ROW},
            "length": self._state.save(rows),
            "cache": self._engine.state(rows, self._next_R[rows]),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`, with rows, tokens and KV cache as they were.

        Raises:
            InputError: it is the state of generators in other processes.
        """
        if "collected" not in state:
            raise InputError("the run has generated in other processes ([cluster]): it goes on there")
        self.version = state["version"]
        self._admitted, self._collected = state["admitted"], state["collected"]
        self.counters = Counters(**state["counters"])
        self._finished = {seq_no: [None] * size for seq_no, size in state["sizes"]}
        for seq_no, rollout in zip(state["done_seq_nos"], unpack_rollouts(state["done"]), strict=True):
            self._finished[seq_no][rollout.sample] = rollout
        groups = {
            seq_no: (seq_no, Prompt.from_json(prompt), np.array(tokens, dtype=np.int64), epoch)
            for seq_no, prompt, tokens, epoch in state["groups"]
        }
        waiting = (self._requests(*groups[seq_no], [sample]) for seq_no, sample in state["waiting"])
        self._waiting = deque(request for (request,) in waiting)
        rows = state["rows"]
        for row, (seq_no, sample) in zip(rows, state["under_way"], strict=True):
            (self._rows[row],) = self._requests(*groups[seq_no], [sample])
        self._active_R[rows] = True
        for name in _BY_ROW:
            getattr(self, name)[rows] = state["arrays"][name]
        self._state.load(rows, state["length"])
        self._engine.restore(rows, state["cache"])

    # -- one decode step -------------------------------------------------------------------------------

    @torch.inference_mode()
    def tick(self) -> None:
        """Refill free rows, run the model one position on, sample, and hand over what is finished."""
        before = np.flatnonzero(self._active_R)
        groups = self._refill()
        rows = np.concatenate([before, *groups])
        if not len(rows):
            return
        hidden_AD = self._forward(before, groups)
        logp_AV = log_probs_TV(self.model, hidden_AD, self.sampling.temperature, self.sampling.fp32_logits)
        at = self._next_R[rows]
        token_A, logp_A = self._sample(logp_AV, rows, at)
        forced_A = self._state.forced_token()[rows]
        sampled_A = forced_A < 0
        token_A = np.where(sampled_A, token_A, forced_A)

        self._token_RL[rows, at] = token_A
        self._logp_RL[rows, at] = np.where(sampled_A, logp_A, 0.0)
        self._sampled_RL[rows, at] = sampled_A
        self._version_RL[rows, at] = self.version
        self._next_R[rows] += 1

        self.counters.ticks += 1
        self.counters.tokens += int(sampled_A.sum())
        token_R = np.full(len(self._rows), -1)
        token_R[rows] = token_A
        done_R, truncated_R = self._state.advance(token_R, self.sampling.end_token)
        for row in np.flatnonzero(done_R & self._active_R):
            self._finish(int(row), bool(truncated_R[row]))

    def _forward(self, before: np.ndarray, groups: list[np.ndarray]) -> torch.Tensor:
        """Last hidden states: of the rows that go on, then of each group of rows that start."""
        hidden: list[torch.Tensor] = []
        if len(before):
            position_A = self._next_R[before] - 1
            hidden.append(self._engine.decode(before, self._token_RL[before, position_A], position_A))
            self._count(len(before), float((position_A + 1).sum()))
        if groups:
            prompts = [self._token_RL[rows[0], : self._start_R[rows[0]]] for rows in groups]
            hidden_BD = self._engine.prefill(groups, prompts)
            prompt_A = np.repeat(np.arange(len(groups)), [len(rows) for rows in groups])
            hidden.append(hidden_BD[torch.from_numpy(prompt_A).to(self._device)])
            for prompt_T in prompts:
                self._count(len(prompt_T), len(prompt_T) * (len(prompt_T) + 1) / 2)
        return torch.cat(hidden)

    def _sample(
        self, logp_AV: torch.Tensor, rows: np.ndarray, at: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Invert the cumulative distribution at a number that only (key, position) decide."""
        draw_A = uniform(self._key_R[rows], at - self._start_R[rows])
        cdf_AV = logp_AV.double().exp_().cumsum(-1)  # its end is 1 but for rounding
        threshold_A1 = torch.from_numpy(draw_A).to(self._device)[:, None] * cdf_AV[:, -1:]
        token_A1 = torch.searchsorted(cdf_AV, threshold_A1, right=True).clamp_(max=cdf_AV.shape[-1] - 1)
        logp_A = logp_AV.gather(-1, token_A1)[:, 0]
        return token_A1[:, 0].cpu().numpy(), logp_A.cpu().numpy()

    def _refill(self) -> list[np.ndarray]:
        """Give free rows to the next waiting completions; returns the rows that start, by group."""
        free = np.flatnonzero(~self._active_R)[: len(self._waiting)]
        groups: dict[int, list[int]] = {}
        for row in free.tolist():
            request = self._waiting.popleft()
            n = len(request.prompt_T)
            self._rows[row] = request
            self._token_RL[row] = 0
            self._token_RL[row, :n] = request.prompt_T
            self._key_R[row] = request.key
            self._start_R[row] = self._next_R[row] = n
            self._first_version_R[row] = self.version
            self._state.start(row, request.interrupt_at)
            groups.setdefault(request.seq_no, []).append(row)
        self._active_R[free] = True
        return [np.array(rows) for rows in groups.values()]

    def _count(self, tokens: float, positions: float) -> None:
        self.counters.flops += self._flop_count.forward(tokens, positions)

    def _finish(self, row: int, truncated: bool) -> None:
        request = self._rows[row]
        assert request is not None
        span = slice(int(self._start_R[row]), int(self._next_R[row]))
        sampled_T = self._sampled_RL[row, span].copy()
        self._finished[request.seq_no][request.sample] = Rollout(
            prompt=request.prompt,
            epoch=request.epoch,
            sample=request.sample,
            prompt_T=request.prompt_T,
            token_T=self._token_RL[row, span].copy(),
            sampled_T=sampled_T,
            logp_T=self._logp_RL[row, span].copy(),
            version_T=self._version_RL[row, span].copy(),
            first_version=int(self._first_version_R[row]),
            truncated=truncated,
            interrupted=not sampled_T.all(),
        )
        self._rows[row] = None
        self._active_R[row] = False
